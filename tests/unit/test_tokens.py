"""Logits and tokens against values worked out by hand or by numpy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from ditto_core.compare.metrics import ShapeMismatch
from ditto_core.compare.tokens import (
    LogitsMetrics,
    matching_prefix,
    measure_logits,
    next_tokens,
    perplexities,
    perplexity,
    pick,
    quantile,
)
from ditto_core.errors import UsageError


def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def logits():
    generator = torch.Generator().manual_seed(11)
    expected = 3 * torch.randn(2, 150, 4001, generator=generator)
    return expected + 0.2 * torch.randn(expected.shape, generator=generator), expected


def test_divergence_and_agreement_equal_numpy_over_many_chunks(logits):
    actual, expected = logits
    a, b = (log_softmax(x.double().numpy()) for x in logits)
    kl = (np.exp(b) * (b - a)).sum(-1).reshape(-1)
    metrics = measure_logits(actual, expected, dtype="float16", k=7)
    assert metrics.positions == 300
    assert metrics.kl_mean == pytest.approx(kl.mean(), rel=1e-9)
    assert metrics.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-9)
    assert metrics.kl_max == pytest.approx(kl.max(), rel=1e-9)
    same = (a.argmax(-1) == b.argmax(-1)).mean()
    assert metrics.top1_agreement == pytest.approx(same)
    assert 0 < same < 1
    top = [np.argsort(-x.reshape(300, -1), axis=1)[:, :7] for x in (a, b)]
    shared = np.mean([len(set(x) & set(y)) / 7 for x, y in zip(*top, strict=True)])
    assert metrics.topk_agreement == pytest.approx(shared)
    assert [flip.index for flip in metrics.flips] == [
        tuple(map(int, i)) for i in np.argwhere(a.argmax(-1) != b.argmax(-1))
    ]


def test_perplexity_is_that_of_the_targets_on_both_sides(logits):
    actual, expected = logits
    targets = torch.randint(0, 4001, (2, 150), generator=torch.Generator().manual_seed(2))
    targets[0, :10] = -100
    metrics = measure_logits(actual, expected, dtype="float32", targets=targets)
    kept = targets.numpy() >= 0
    for side, found in ((actual, metrics.perplexity_actual), (expected, metrics.perplexity_expected)):
        chosen = np.take_along_axis(log_softmax(side.double().numpy()), targets.clamp(min=0).numpy()[..., None], -1)[
            ..., 0
        ]
        assert found == pytest.approx(math.exp(-chosen[kept].mean()), rel=1e-9)


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 0.25), ("float16", 0.03125), ("fp32", 2.0**-18)])
def test_a_flip_is_a_near_tie_by_the_spacing_of_the_engines_dtype(dtype, unit):
    expected = torch.tensor([[1.0, 40.0, 39.9375], [1.0, 2.0, 3.0]])
    actual = torch.tensor([[1.0, 39.0, 39.5], [1.0, 2.0, 3.0]])
    (flip,) = measure_logits(actual, expected, dtype=dtype).flips
    assert (flip.index, flip.actual, flip.expected, flip.gap, flip.ulp) == ((0,), 2, 1, 0.0625, unit)
    assert flip.near_tie is (2 * unit >= 0.0625)


def test_the_width_of_a_near_tie_can_be_set():
    expected, actual = torch.tensor([[40.0, 39.5]]), torch.tensor([[39.0, 39.5]])
    (wide,) = measure_logits(actual, expected, dtype="bfloat16", near_tie_ulp=2.0).flips
    (narrow,) = measure_logits(actual, expected, dtype="bfloat16", near_tie_ulp=1.0).flips
    assert wide.near_tie
    assert (narrow.near_tie, narrow.gap) == (False, 0.5)


def test_the_gap_is_the_references_not_the_engines():
    (flip,) = measure_logits(torch.tensor([[5.0, 5.0625]]), torch.tensor([[9.0, 1.0]]), dtype="bfloat16").flips
    assert (flip.gap, flip.near_tie) == (8.0, False)


def test_masked_logits_add_nothing_to_the_divergence():
    masked = torch.tensor([[0.0, 1.0, -math.inf]])
    assert measure_logits(masked, masked, dtype="float32").kl_max == 0.0


def test_nan_logits_are_not_hidden():
    metrics = measure_logits(torch.tensor([[0.0, math.nan]]), torch.tensor([[0.0, 1.0]]), dtype="float32")
    assert math.isnan(metrics.kl_mean)
    assert json.dumps(metrics.to_json(), allow_nan=False)


def test_a_token_that_the_engine_excludes_makes_the_divergence_infinite_not_nan():
    actual = torch.tensor([[1.0, -math.inf], [1.0, -math.inf], [0.0, 0.0]])
    metrics = measure_logits(actual, torch.zeros(3, 2), dtype="float16")
    assert (metrics.kl_mean, metrics.kl_p99, metrics.kl_max) == (math.inf, math.inf, math.inf)


def test_json_round_trip(logits):
    metrics = measure_logits(*logits, dtype="float16", targets=torch.zeros(2, 150, dtype=torch.int64))
    assert LogitsMetrics.from_json(json.loads(json.dumps(metrics.to_json(), allow_nan=False))) == metrics


def test_shapes_must_fit():
    with pytest.raises(ShapeMismatch):
        measure_logits(torch.zeros(2, 3), torch.zeros(3, 3), dtype="float32")
    with pytest.raises(ShapeMismatch):
        measure_logits(torch.zeros(2, 3), torch.zeros(2, 3), dtype="float32", targets=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UsageError, match="hold no position"):
        measure_logits(torch.zeros(0, 3), torch.zeros(0, 3), dtype="float32")


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([], [1], 0), ([9], [8], 0), ([5, 5], [5, 5], 2)],
)
def test_matching_prefix_counts_leading_tokens(first, second, length):
    assert matching_prefix(first, second) == length
    assert matching_prefix(torch.tensor(first, dtype=torch.int64), second) == length


def test_a_prompts_targets_are_its_next_tokens_outside_of_padding():
    ids = torch.tensor([[0, 0, 7, 8, 9], [3, 4, 5, 6, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert next_tokens(ids, mask).tolist() == [[-100, -100, 8, 9, -100], [4, 5, 6, -100, -100]]


def test_perplexities_are_those_of_the_targets_alone(logits):
    actual, expected = logits
    targets = torch.full(expected.shape[:2], -100)
    targets[0, 3:120], targets[1, 140] = torch.arange(117), 4000
    found = perplexities(actual, expected, targets)
    for value, side in zip(found, logits, strict=True):
        log = log_softmax(side.double().numpy())
        losses = [-log[0, 3 + i, i] for i in range(117)] + [-log[1, 140, 4000]]
        assert value == pytest.approx(math.exp(np.mean(losses)), rel=1e-9)
    assert perplexities(actual, expected, torch.full_like(targets, -100)) == (None, None)
    assert perplexities(actual, expected, torch.where(targets < 0, 2**40, targets)) == found


def test_logits_that_are_nan_agree_with_no_token():
    expected = torch.tensor([[9.0, 1.0, 2.0], [1.0, 9.0, 2.0]])
    metrics = measure_logits(torch.full_like(expected, math.nan), expected, dtype="float16")
    assert metrics.top1_agreement == 0
    assert [flip.near_tie for flip in metrics.flips] == [False, False]
    both = torch.full_like(expected, math.nan)
    assert measure_logits(both, both, dtype="float16").top1_agreement == 1


def test_the_perplexity_of_logits_that_are_nan_is_nan():
    targets = torch.zeros(1, dtype=torch.int64)
    metrics = measure_logits(torch.full((1, 3), math.nan), torch.zeros(1, 3), dtype="float16", targets=targets)
    assert math.isnan(metrics.perplexity_actual)
    assert metrics.perplexity_expected == pytest.approx(3.0)


def test_a_single_nan_of_the_engine_is_a_flip_in_its_row_alone():
    """The reference prefers token 2 in each row; where both sides have a NaN, neither has lost anything."""
    expected = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    actual = expected.clone()
    actual[1, 0] = math.nan
    actual[2, 0] = expected[2, 0] = math.nan
    assert [flip.index for flip in measure_logits(actual, expected, dtype="float32").flips] == [(1,)]


def test_a_nan_in_the_place_of_a_token_that_nearly_ties_is_no_near_tie():
    expected = torch.tensor([[0.0, 2.0 - 2**-22, 2.0]])
    actual = torch.tensor([[0.0, math.nan, 2.0]])
    (flip,) = measure_logits(actual, expected, dtype="float32").flips
    assert (flip.near_tie, math.isnan(flip.gap)) == (False, True)


def test_an_id_just_beyond_the_vocabulary_does_not_count():
    logits = torch.zeros(1, 3, 4)
    assert perplexities(logits, logits, torch.tensor([[3, 4, -100]])) == (pytest.approx(4), pytest.approx(4))


@pytest.mark.parametrize(("loss", "known"), [(699.0, True), (700.0, False), (701.0, False)])
def test_a_perplexity_that_no_float_can_hold_is_infinite(loss, known):
    assert math.isfinite(perplexity(2 * loss, 2)) is known


def test_the_share_of_other_tokens_is_of_all_positions():
    expected = torch.tensor([[0.0, 1.0]] * 4)
    actual = expected.clone()
    actual[2] = torch.tensor([1.0, 0.0])
    found = measure_logits(actual, expected, dtype="float32")
    assert (found.top1_disagreement, found.step, found.k) == (0.25, 0, 2)
    assert measure_logits(torch.ones(1, 9), torch.ones(1, 9), dtype="float32").k == 5


def test_a_quantile_is_infinite_only_where_nothing_is_nan():
    assert quantile([1.0, math.inf], 0.5) == math.inf
    assert math.isnan(quantile([math.nan, 1.0], 0.5))


def test_sides_of_other_shapes_are_not_spread_over_each_other():
    with pytest.raises(ShapeMismatch):
        pick(slice(None), torch.zeros(2, 7), torch.zeros(1, 7))
