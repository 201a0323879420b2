"""The numbers that judging rests on, each at the very place where the verdict changes."""

import math

import pytest
import torch

from ditto_core.compare.metrics import measure
from ditto_core.compare.tokens import measure_logits
from ditto_core.compare.tolerance import EPSILON, TABLE, Tolerance
from ditto_core.compare.verdict import DIVERGED, INCONCLUSIVE, WITHIN


@pytest.mark.parametrize("dtype", EPSILON)
def test_epsilon_is_the_distance_from_1_to_the_next_number(dtype):
    assert EPSILON[dtype] == torch.finfo(getattr(torch, dtype)).eps


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_the_table_allows_one_step_of_an_8_bit_float(dtype):
    assert TABLE[dtype] == torch.finfo(getattr(torch, dtype)).eps


def test_a_floor_is_a_tolerance_as_long_as_its_bound_is_below_one_half():
    """Four times 1/8 is one half of the tensor's norm."""
    assert Tolerance().usable(0.1249)
    assert not Tolerance().usable(0.125)


@pytest.mark.parametrize(("wrong", "status"), [(4, WITHIN), (5, DIVERGED)])
def test_as_many_integers_may_differ_as_four_times_those_that_nearly_tie(wrong, status):
    """1 % of 100 nearly tie."""
    expected = torch.arange(100)
    actual = expected.clone()
    actual[:wrong] += 1
    assert Tolerance().judge(("x",), 0, measure(actual, expected), "int64", 0.01, exact=True).status == status


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("side", "status"), [("engine", DIVERGED), ("reference", INCONCLUSIVE)])
def test_numbers_that_are_not_finite_are_wrong_on_the_engines_side_alone(bad, side, status):
    clean = torch.ones(8)
    broken = clean.clone()
    broken[3] = bad
    pair = (broken, clean) if side == "engine" else (clean, broken)
    assert Tolerance().judge(("x",), 0, measure(*pair), "float16", math.inf).status == status


@pytest.mark.parametrize(("steps", "near"), [(2, True), (3, False)])
def test_a_near_tie_is_within_two_units_in_the_last_place(steps, near):
    """At 1 a unit of float16 is 2^-10."""
    expected = torch.tensor([[1.0, 1.0 - steps * 2**-10, 0.0]])
    (flip,) = measure_logits(expected[:, [1, 0, 2]], expected, dtype="float16", step=0, k=1).flips
    assert (flip.near_tie, flip.gap) == (near, steps * 2**-10)
