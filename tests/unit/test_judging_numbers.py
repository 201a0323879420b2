"""The numbers that judging rests on, each at the very place where the verdict changes."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing._comparison import default_tolerances

from ditto_core.compare.metrics import measure
from ditto_core.compare.result import SiteResult
from ditto_core.compare.tokens import Flip, measure_logits
from ditto_core.compare.tolerance import EPSILON, TABLE, Tolerance
from ditto_core.compare.ulp import spacing
from ditto_core.compare.ulp import tolerance as elementwise
from ditto_core.compare.verdict import DIVERGED, INCONCLUSIVE, UNJUDGED, WITHIN
from ditto_core.sites import Tap
from ditto_core.stepping.choices import Tied
from ditto_core.stepping.lockstep import noise_of, token_results
from ditto_core.stepping.measured import Measured
from ditto_core.stepping.prompts import TokenBatch
from ditto_core.stepping.sides import Sides


@pytest.mark.parametrize("dtype", EPSILON)
def test_epsilon_is_the_distance_from_1_to_the_next_number(dtype):
    """The next number has the next bit pattern; torch.finfo is wrong about float8_e5m2fnuz."""
    one = torch.ones(1, dtype=getattr(torch, dtype))
    bits = one.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize])
    assert EPSILON[dtype] == float((bits + 1).view(one.dtype).double()) - 1
    assert EPSILON[dtype] == spacing(one.dtype).eps


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_the_table_allows_half_a_step_of_an_8_bit_float(dtype):
    assert TABLE[dtype] == torch.finfo(getattr(torch, dtype)).eps / 2


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


def result(site, size, floor, *, step=0, final=True):
    """A tensor of 8 numbers whose root mean square is ``size``."""
    expected = size * torch.tensor([1.0, -1.0] * 4)
    return SiteResult(step, site, 0, measure(1.001 * expected, expected), UNJUDGED, floor, final=final)


NOISE = 4 * math.sqrt(2) * 0.01 * 5
"""Four standard deviations of the difference of two logits around 5 that are each off by 1 %."""


def test_the_noise_of_two_logits_comes_from_their_size_and_floor():
    assert noise_of(result("logits", 5, 0.01), Tolerance()) == pytest.approx(NOISE)
    assert noise_of(result("logits", 5, 0.1249), Tolerance()) == pytest.approx(12.49 * NOISE)


@pytest.mark.parametrize("floor", [None, 0.125, math.inf, math.nan])
def test_a_floor_that_is_no_tolerance_excuses_no_token(floor):
    assert noise_of(result("logits", 5, floor), Tolerance()) == 0


@pytest.mark.parametrize("name", ["logits", "lm_head"])
@pytest.mark.parametrize(("gap", "ties"), [(0.99 * NOISE, (1,)), (1.01 * NOISE, ()), (math.nan, ())])
def test_a_near_tie_is_measured_by_the_noise_of_the_logits_alone(name, gap, ties):
    """Neither another tensor that is larger, nor another step, nor a tap that the logits are not, sets the scale."""
    taps = (Tap("model.norm", "norm"), Tap("lm_head", "logits"))
    others = [result("model.norm", 500, 0.1), result("model.norm", 500, 0.1, step=1)]
    others += [result("other", 500, 0.1, step=1, final=False), result(name, 500, 0.1)]
    found = Measured(results=[others[0], result(name, 5, 0.01, step=1), *others[1:]])
    found.flips = {1: (Flip((0,), 7, 8, gap, 1e-6, near_tie=False),)}
    found.flips[2] = (Flip((1,), 3, 4, 0.5, 1e-6, near_tie=False),)  # a step of which no noise is known
    found.engine_tokens, found.reference_tokens = [[1, 1], [7, 2], [5, 3]], [[1, 1], [8, 2], [5, 4]]
    batch = TokenBatch(torch.ones(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64))
    side = SimpleNamespace(taps=taps)
    first, second = token_results(Sides(side, side), found, batch, Tolerance(), None)
    assert (first.near_ties, first.flips) == (ties, () if ties else (1,))
    assert (second.near_ties, second.flips) == ((), (2,))
    found.tied = {1: Tied(1, "experts nearly tie")}
    second = token_results(Sides(side, side), found, batch, Tolerance(), None)[1]
    assert (second.near_ties, second.left_out, second.flips, second.judged) == ((), (1, 2), (), 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_elements_are_as_close_as_torch_testing_asks(dtype):
    assert elementwise(dtype) == default_tolerances(dtype)


@pytest.mark.parametrize(("dtype", "last"), [(torch.int8, 127), (torch.bool, 1), (torch.int64, 2**63 - 1)])
def test_integers_are_1_apart_everywhere(dtype, last):
    place = spacing(dtype)
    assert (place.eps, place.tiny, place.largest, place.ulp(100)) == (0, 1, float(last), 1)
    assert elementwise(dtype) == (0, 0)


def test_an_8_bit_float_may_be_off_by_one_step():
    """A step at 1 is 2^-3, the smallest number of float8_e4m3fn 2^-9; powers of two alone have no small step."""
    assert elementwise(torch.float8_e4m3fn) == (2.0**-3, 2.0**-9)
    assert elementwise(torch.float8_e8m0fnu) == (0, 0)
