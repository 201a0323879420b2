"""Parts of the measurement that a usual pair does not reach: a second block with NaN, octaves, merged parts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from ditto_core.compare import findings
from ditto_core.compare._accumulate import OCTAVE, Accumulator
from ditto_core.compare._assemble import assemble
from ditto_core.compare._blocks import BLOCK
from ditto_core.compare._columns import BINS, quantiles_of
from ditto_core.compare.assertion import assert_close
from ditto_core.compare.bounds import parse_rule
from ditto_core.compare.masks import as_masks, is_mask, may_hide
from ditto_core.compare.metrics import ShapeMismatch, make_rules, measure, prepare, run_part, together
from ditto_core.compare.packed import TensorPair, measure_all
from ditto_core.compare.requested import measure_requested
from ditto_core.compare.tolerance import Tolerance
from ditto_core.errors import UsageError

LOWEST = torch.finfo(torch.float32).min


def noisy(size: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(size, generator=generator)
    return expected + 1e-3 * torch.randn(size, generator=generator), expected


def accumulated(actual: torch.Tensor, expected: torch.Tensor, block: int = BLOCK) -> Accumulator:
    pair = prepare(actual, expected, None, ())
    layout = pair.plan(block)
    return run_part(layout, make_rules(pair, None, None, False), 0, layout.count)


@pytest.mark.parametrize("equal", [False, True])
def test_nan_in_two_blocks_is_counted_in_both_and_placed_in_the_first(equal):
    expected = torch.ones(BLOCK * 3)
    actual = expected.clone()
    actual[7] = actual[BLOCK * 2 + 5] = math.nan
    if equal:
        expected = actual.clone()
    found = measure(actual, expected, threads=1, equal_nan=equal)
    assert (found.nan_actual, found.nan_mismatch, found.mismatched) == (2, 0 if equal else 2, 0 if equal else 2)
    assert found.first_nonfinite == ((7,), "both" if equal else "actual")
    assert (found.first_mismatch, found.worst_mismatch) == ((None, None) if equal else ((7,), (7,)))


def test_errors_counted_by_octave_give_quantiles_within_their_octave():
    """What a kernel on CUDA counts: by octave, without the finer bins."""
    actual, expected = noisy()
    seen = accumulated(actual, expected)
    fine = assemble(seen, actual, expected)
    keys, numbers = seen.histogram()
    seen.few, seen.fine = None, False
    seen.bins = np.bincount(keys[keys > 0] // OCTAVE, weights=numbers[keys > 0], minlength=2).astype(np.int64)
    coarse = assemble(seen, actual, expected)
    assert coarse.histogram == fine.histogram
    for name in ("p50", "p90", "p99", "p999"):
        truth = np.quantile((actual - expected).abs().numpy(), float(f"0.{name[1:]}"))
        assert truth / 2 < getattr(coarse, name) < truth * 2
        assert getattr(coarse, name) != getattr(fine, name)


def test_a_part_that_is_moved_and_merged_keeps_its_places():
    actual, expected = noisy()
    actual[100] += 5.0
    whole, part = accumulated(actual, expected), accumulated(actual[50:], expected[50:], block=512)
    part.shift(50)
    assert (part.max_abs_at, part.first_nonfinite) == (100, -1)
    first = accumulated(actual[:50], expected[:50], block=16)
    first.merge(part)
    found, known = (assemble(seen, actual, expected) for seen in (first, whole))
    assert (found.max_abs_index, found.worst_mismatch) == ((100,), (100,))
    assert found.rel_l2 == pytest.approx(known.rel_l2, rel=1e-12)
    assert found.histogram == known.histogram


def test_integers_that_float64_cannot_hold_are_exact_beside_floats():
    found = measure(torch.tensor([2**60 + 256, 5]), torch.tensor([2.0**60, 5.0], dtype=torch.float64))
    assert (found.max_abs, found.max_abs_index) == (256.0, (0,))


@pytest.mark.parametrize(
    ("actual", "expected", "psnr"),
    [
        ([1.0, 2.0], [1.0, 2.0], math.inf),
        ([math.nan, 2.0], [1.0, 2.0], -math.inf),
        ([0.5], [0.0], -math.inf),
        ([10.0, 9.0], [10.0, 10.0], 20 * math.log10(10 / math.sqrt(0.5))),
    ],
)
def test_the_peak_signal_to_noise_ratio(actual, expected, psnr):
    assert measure(torch.tensor(actual), torch.tensor(expected)).psnr_db == pytest.approx(psnr)


@pytest.mark.parametrize("smaller", [0, 1])
def test_of_two_devices_the_smaller_tensor_moves(smaller):
    """A meta tensor stands in for one on a GPU: it has a device and a size, and no numbers."""
    sides = [torch.zeros(4), torch.zeros(4)]
    sides[1 - smaller] = torch.zeros(4, dtype=torch.float64, device="meta")
    moved = together(sides[0], sides[1], None)
    assert {side.device.type for side in moved[:2] if side is not None} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zeros_suggest_an_overflow_in_half_precision_alone(dtype):
    actual, expected = torch.zeros(8, dtype=dtype), torch.full((8,), 300.0, dtype=dtype)
    (found,) = findings.find(actual, expected, measure(actual, expected))
    assert ("overflow in float16?" in found.text) is (dtype == torch.float16)
    assert found.name == "all_zero"


def test_exchanging_dimensions_of_two_sizes_is_tried_where_the_copy_is_small(monkeypatch):
    expected = torch.arange(12.0).reshape(3, 4).sin()
    actual = expected.t().reshape(3, 4)
    metrics = measure(actual, expected)
    assert [found.name for found in findings.find(actual, expected, metrics)] == ["transposed"]
    monkeypatch.setattr(findings, "COPIED", 4)
    assert not findings.find(actual, expected, metrics)


def test_a_preparation_that_leaves_nan_on_one_side_fails_from_both_directions():
    rules = [
        parse_rule("x", {"prepare": "torch:log", "bound": 1.0}),
        parse_rule("x", {"prepare": "torch:log", "metric": "cosine", "at_least": 0.5}),
    ]
    actual, expected = torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 1.0])
    values = dict(measure_requested(rules, measure(actual, expected), actual, expected, None))
    assert sorted(values.values()) == [-math.inf, math.inf]


def test_nothing_has_moved_in_a_list_without_entries():
    rule = parse_rule("x", {"metric": "moved", "bound": 0.0})
    empty = torch.zeros(2, 0, dtype=torch.int64)
    assert measure_requested([rule], measure(empty, empty), empty, empty, None) == (("moved", 0.0),)


def test_the_two_caches_of_an_encoder_decoder_are_compared_by_their_tensors():
    def cache(last: float) -> EncoderDecoderCache:
        made = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for part, value in ((made.self_attention_cache, 1.0), (made.cross_attention_cache, last)):
            part.update(torch.ones(1, 1, 2, 3), torch.full((1, 1, 2, 3), value), 0)
        return made

    assert_close(cache(1.0), cache(1.0))
    with pytest.raises(AssertionError, match=r"cross.*values"):
        assert_close(cache(2.0), cache(1.0))


def test_only_the_last_selector_that_applies_decides_and_no_bound_of_another():
    table = {
        "*": [{"bound": 0.5}, {"metric": "cosine", "at_least": 0.9}],
        "a*": [{"bound": 0.1}, {"metric": "max_abs", "bound": 1}],
    }
    found = Tolerance.of(table).rules_for(["ab"], 0)
    assert {(rule.selector, rule.metric) for rule in found} == {("a*", "rel_l2"), ("a*", "max_abs")}


def test_bounds_of_one_selector_hold_together_though_another_stands_between_them():
    """As `ditto compare --rule a*=... --rule *=... --rule a*=...` gives them."""
    first, between, last = (
        parse_rule("a*", 0.1),
        parse_rule("*", 9.0),
        parse_rule("a*", {"metric": "max_abs", "bound": 1}),
    )
    rules = (first, between, replace(last, also=True))
    assert set(Tolerance(rules=rules).rules_for(["ab"], 0)) == {first, last}


def test_quantiles_by_octave_alone_are_within_their_octave():
    """What a kernel on CUDA counts of many pairs: zeros, then octaves by the exponent in bfloat16."""
    errors = torch.tensor([[0.0, 1.0, 1.5, 3.0], [0.0, 0.0, 0.0, 0.25]], dtype=torch.float64)
    bins = np.zeros((2, BINS), np.int64)
    for row, each in enumerate(errors.tolist()):
        for error in each:
            bins[row, 0 if error == 0 else 1 + 127 + math.frexp(error)[1] - 1] += 1
    found = quantiles_of(bins, np.array([4, 4]), errors.numpy().max(1))
    p50, p999 = found[0], found[3]
    assert (1.0 <= p50[0] <= 2.0, p50[1]) == (True, 0.0)
    assert p999.tolist() == [3.0, 0.25]  # no more than the largest error


def test_a_mask_or_axes_that_do_not_fit_are_the_error_of_their_pair_alone():
    pairs = [TensorPair(*noisy(16)) for _ in range(3)]
    with pytest.raises(UsageError, match="2 axes for 1 dimensions"):
        measure_all([*pairs, pairs[0]._replace(axes=("batch", ""))])
    mask = torch.ones(5, dtype=torch.bool)
    assert isinstance(measure_all([*pairs, pairs[0]._replace(valid=mask)])[3], ShapeMismatch)


@pytest.mark.parametrize(
    ("tensor", "mask"),
    [
        (torch.tensor([[[[0.0, LOWEST]]]]), True),
        (torch.tensor([[[[0.0, 1.0]]]]), False),
        (torch.tensor([[0.0, LOWEST]]), False),
        (torch.zeros(1, 1, 0, 2), False),
        (torch.zeros(1, 1, 1, 2, dtype=torch.int64), False),
    ],
)
def test_a_mask_has_four_dimensions_of_zeros_and_lowest_numbers(tensor, mask):
    assert is_mask(tensor) is mask


def test_tensors_that_are_no_masks_come_back_as_they_are():
    flat, scores, mask = torch.zeros(2, 3), torch.rand(1, 1, 2, 3), torch.full((1, 1, 2, 3), LOWEST)
    for actual, expected in ((flat, flat), (scores, scores), (scores.long(), mask), (mask > 0, mask)):
        assert as_masks(actual, expected)[0] is actual
    metrics = measure(scores, scores)
    assert not may_hide(flat, metrics)
    assert not may_hide(scores, metrics)
    assert may_hide(scores, replace(metrics, inf_expected=1))
