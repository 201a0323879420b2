"""Errors of taps beside the replay: the short way to one number gives that of the measurement."""

import math

import pytest
import torch

from ditto_core.compare.metrics import ShapeMismatch
from ditto_core.localize.local import Valid, errors, pair_of, rel_error
from ditto_core.sites import Tap

ROWS = Tap("x", "x", axes=("batch", "length", ""))
MASK = Tap("m", "m", axes=("batch", "", "length", "total"))
INPUTS = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "attention_mask": torch.tensor([[1] * 4, [0, 0, 1, 1]])}
LOWEST = torch.finfo(torch.float32).min


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def measured(actual, expected, tap=ROWS):
    (found,) = errors([pair_of(actual, expected, tap, Valid(INPUTS))])
    return found.rel_l2


def with_value(tensor, place, value):
    out = tensor.clone()
    out[place] = value
    return out


EXPECTED = drawn(2, 4, 8)
HIDDEN = torch.full((4, 4), LOWEST).triu(1).expand(2, 1, 4, 4).clone()


@pytest.mark.parametrize(
    ("actual", "expected", "tap"),
    [
        (EXPECTED + 0.01 * drawn(2, 4, 8, seed=1), EXPECTED, ROWS),
        (EXPECTED.float(), EXPECTED, ROWS),
        (with_value(EXPECTED, (1, 0), 50.0), EXPECTED, ROWS),  # padding
        (with_value(EXPECTED, (0, 0, 0), math.inf), EXPECTED, ROWS),
        (with_value(EXPECTED, (1, 0, 0), math.nan), EXPECTED, ROWS),  # in padding, which counts
        (with_value(EXPECTED, (0, 0, 0), math.nan), with_value(EXPECTED, (0, 0, 0), math.nan), ROWS),
        (EXPECTED * 1.5, with_value(EXPECTED, (0, 0, 0), math.inf), ROWS),
        (torch.zeros(2, 4, 8), torch.zeros(2, 4, 8), ROWS),
        (HIDDEN, HIDDEN.double().clamp(min=-1e9) * 1e300, MASK),
        (HIDDEN.roll(1, -1), HIDDEN, MASK),
    ],
    ids=[
        "wrong",
        "rounded",
        "padding",
        "inf",
        "nan in padding",
        "both nan",
        "inf expected",
        "zero",
        "mask",
        "other mask",
    ],
)
def test_one_number_is_that_of_the_measurement(actual, expected, tap):
    whole, short = measured(actual, expected, tap), rel_error(actual, expected, tap, Valid(INPUTS))
    assert short == pytest.approx(whole, rel=1e-12, abs=1e-300, nan_ok=True)


def test_what_is_measured_together_is_what_is_measured_alone():
    sides = [(drawn(2, 4, 8, seed=i), drawn(2, 4, 8, seed=i + 1)) for i in range(9)]
    together = errors([pair_of(*side, ROWS, Valid(INPUTS)) for side in sides])
    assert [found.rel_l2 for found in together] == pytest.approx([measured(*side) for side in sides], rel=1e-12)


def test_other_shapes_are_an_error():
    for measure in (measured, lambda a, b: rel_error(a, b, ROWS, Valid(INPUTS))):
        with pytest.raises(ShapeMismatch):
            measure(drawn(2, 4, 8), drawn(2, 4, 7))
