"""Faults of a KV cache on tensors made by hand: grids, scales, padding, and what is said of each."""

from dataclasses import replace

import pytest
import torch

from ditto_core.causes.cache import quantized, step_of
from tests.unit.test_cause_rules import KEYS, T, cache, kind_of, step

WIDE = torch.linspace(0.004, 1.0, 128, dtype=torch.float64).reshape(1, 64, 2)
"""Cached keys up to 1: a fitting int8 scale has steps of 1 / 127."""


@pytest.mark.parametrize(
    ("values", "grid"),
    [
        ([0.0, 0.5, 1.0, -2.0], 0.5),
        ([1.0, 2.0, 256.0], 1.0),
        ([1.0, 2.0, 257.0], None),  # beyond 256 codes
        ([1.0, 2.0 * (1 + 2e-7), 3.0], 1.0),
        ([1.0, 2.0 * (1 + 3e-7), 3.0], None),  # off the grid by more than float32 rounds
        ([3.0, 7.0, 127.0], 1.0),  # no two are neighbours
        ([1e-9, 127.0], None),
        ([0.0, 7.0, -7.0], None),  # one size alone shows no grid
        ([0.0, 0.0], None),
    ],
)
def test_a_grid_is_the_step_of_which_all_values_are_multiples(values, grid):
    assert step_of(torch.tensor(values, dtype=torch.float64)) == grid


@pytest.mark.parametrize(("count", "grid"), [(256, 1.0), (257, None)])
def test_a_grid_has_at_most_256_codes(count, grid):
    assert step_of(torch.arange(1, count + 1, dtype=torch.float64)) == grid


def test_half_precision_rounds_what_lies_on_the_grid():
    seen = (torch.tensor([3.0, 50.0, 101.0, 127.0]) * 0.0123).half().double()
    assert step_of(seen) is None
    assert step_of(seen, 2.0**-10) == pytest.approx(0.0123, rel=1e-3)


def rounded(past, grid):
    return (past / grid).round() * grid


@pytest.mark.parametrize(
    ("steps", "kind", "advice"),
    [
        (1.2, "quantized KV cache", "nothing, if intended"),
        (1.9, "quantized KV cache", "nothing, if intended"),
        (2.1, "quantized KV cache scale", "calibrate the scale"),
    ],
)
def test_a_scale_twice_as_coarse_as_a_fitting_one_is_wrong(steps, kind, advice):
    found = cache(step(WIDE, rounded(WIDE, steps / 127)))
    assert found.kind == kind
    assert found.next_step.startswith(advice)
    assert f"cached values are multiples of {steps / 127:.4g}" in found.evidence[0]
    assert f"uses {round(127 / steps) + 1} of 256 codes" in found.evidence[0]
    assert "largest value 1; int8 with a fitting scale would use steps of 0.0079" in found.evidence[1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_few_keys_with_the_scale_of_their_own_peak_are_named(dtype):
    """24 numbers, hardly two of which are neighbours on the grid of 127 steps."""
    kind = getattr(torch, dtype)
    past = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(1)).to(kind)
    seen = rounded(past.float(), float(past.abs().max()) / 127).to(kind)
    found = cache(replace(step(past.double(), seen.double()), dtype=dtype))
    assert (found.kind, found.rule) == ("quantized KV cache", "cache.quantized")


def test_values_on_a_grid_that_are_not_the_rounded_ones_are_not_called_quantized():
    """More than three tenths of the error is left after rounding."""
    assert quantized(step(WIDE, rounded(WIDE.flip(1), 1 / 127))) is None


def test_a_model_whose_own_keys_lie_on_the_grid_is_not_called_quantized():
    own = rounded(WIDE, 1 / 127)
    assert quantized(step(own, own)) is None


def padded(found, tokens):
    """The same step with its first tokens as padding."""
    mask = found.inputs["attention_mask"].clone()
    mask[:, :tokens] = 0
    return replace(found, inputs={**found.inputs, "attention_mask": mask})


def test_what_padding_holds_is_no_fault_of_the_cache():
    seen = T.clone()
    seen[0] = 99.0
    found = step([T], [seen])
    assert kind_of(cache(padded(found, 1))) is None
    scaled = 1.5 * T
    scaled[0] = 99.0
    assert kind_of(cache(padded(step([T], [scaled]), 1))) == "KV cache scale"
    assert kind_of(cache(step([T], [scaled]))) is None


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (1.5 * T, "multiplied by 1.5,"),
        (0 * T, "come back as zeros"),
        ((T * 1.001).bfloat16().double(), None),
        (T[[0, 0, 1, 2]], "each step reads the row before"),
        (T[[0, 1, 2, 2]], "a copy of the one before it"),
    ],
)
def test_what_became_of_the_cached_tokens_is_said(seen, said):
    found = cache(step([T], [seen]))
    assert (found is None) == (said is None)
    if said:
        assert said in found.evidence[0]


def test_a_narrow_cast_names_the_format():
    past = WIDE[:, :4]
    found = cache(step(past, past.bfloat16().double()))
    assert (found.kind, "rounded to bfloat16" in found.evidence[0]) == ("narrow cast", True)


@pytest.mark.parametrize(("error", "kind"), [(0.9e-6, None), (1.1e-6, "KV cache scale")])
def test_a_past_may_be_off_by_a_millionth_before_it_is_looked_at(error, kind):
    assert kind_of(cache(step([T], [T * (1 + error)]))) == kind


@pytest.mark.parametrize(("error", "kind"), [(0.9e-5, "stale KV cache"), (1.1e-5, None)])
def test_a_new_entry_is_a_copy_within_a_hundred_thousandth(error, kind):
    assert kind_of(cache(step([T], [T], new=tuple((T[3] * (1 + error)).tolist())))) == kind


def test_a_step_of_several_tokens_or_without_a_past_repeats_nothing():
    empty = step([T[:1]], [T[:1]], new=tuple(T[0].tolist()))
    assert kind_of(cache(empty)) == "stale KV cache"
    assert cache(replace(empty, past={KEYS: empty.past[KEYS][:, :, :0]})) is None
    assert cache(replace(empty, past={})) is None


def test_a_token_that_should_repeat_the_last_one_is_no_cause_of_what_is_wrong_before_it():
    """The same token twice, whose value in the first layer is the same; the wrong past has no name."""
    again = tuple(T[3].tolist())
    found = step([T], [T[[0, 2, 1, 3]]], new=again, expected_new=again)
    assert cache(found) is None
    other = found.expected.index_fill(2, torch.tensor(4), 9.0)
    assert kind_of(cache(replace(found, expected=other))) == "stale KV cache"
