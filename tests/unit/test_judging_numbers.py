"""The numbers that judging rests on, each at the very place where the verdict changes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing._comparison import default_tolerances

from ditto_core.compare.judging import judge, judge_logits, output_names, unjudged
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import SiteResult
from ditto_core.compare.row import RowError
from ditto_core.compare.rows import row_errors, usual, worst_row
from ditto_core.compare.tokens import Flip, measure_logits
from ditto_core.compare.tolerance import EPSILON, TABLE, Tolerance
from ditto_core.compare.ulp import spacing, tolerance
from ditto_core.compare.verdict import DIVERGED, INCONCLUSIVE, UNJUDGED, WITHIN, Verdict, decide
from ditto_core.session import KernelProperty, SessionInfo
from ditto_core.sites import Tap
from ditto_core.stepping.lockstep import Sides, noise_of, token_results
from ditto_core.stepping.measured import Measured
from ditto_core.stepping.prompts import TokenBatch


@pytest.mark.parametrize("dtype", EPSILON)
def test_epsilon_is_the_distance_from_1_to_the_next_number(dtype):
    """The next number has the next bit pattern; torch.finfo is wrong about float8_e5m2fnuz."""
    one = torch.ones(1, dtype=getattr(torch, dtype))
    bits = one.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize])
    assert EPSILON[dtype] == float((bits + 1).view(one.dtype).double()) - 1
    assert EPSILON[dtype] == spacing(one.dtype).eps


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


NUMBERS = torch.tensor([5.0, -5.0] * 32)
"""64 numbers whose root mean square is 5."""
TF32 = KernelProperty("TF32", 3.0, "measured")
HALF = "float16"


def one_off(by, expected=NUMBERS):
    """The numbers, the first of them off by so much."""
    actual = expected.clone()
    actual[0] += by
    return measure(actual, expected)


def judged(metrics, floor=0.01, *, dtype=HALF, **more):
    return Tolerance().judge(("x",), 0, metrics, dtype, floor, **more)


def row(error, floor, rows=100):
    return RowError((0, 3), error, floor, rows, 64)


@pytest.mark.parametrize(
    ("floor", "bound"),
    [(0.01, 0.06), (2.0**-30, 6 * 2.0**-11), (0.08, 0.48)],
    ids=["6 times its floor", "at least half of epsilon", "nearly one half"],
)
@pytest.mark.parametrize(("times", "status"), [(0.99, WITHIN), (1.01, DIVERGED)])
def test_the_worst_of_100_rows_may_have_six_times_its_floor(floor, bound, times, status):
    found = judged(one_off(0.0), row=row(times * bound, floor))
    assert found.status == status
    assert status == WITHIN or (found.metric, found.bound) == ("row_rel_l2", pytest.approx(bound))


def test_a_row_whose_bound_is_one_half_or_more_is_not_judged():
    """6 x 1/12 is one half."""
    assert judged(one_off(0.0), row=row(10.0, 0.5 / 6)).status == WITHIN
    assert judged(one_off(0.0), row=row(10.0, None)).status == WITHIN


@pytest.mark.parametrize(("error", "status"), [(0.179, WITHIN), (0.181, DIVERGED)])
def test_a_kernel_three_times_as_coarse_allows_a_row_three_times_its_bound(error, status):
    """Of 100 rows the worst may have 6 x 0.01, so 0.18."""
    assert judged(one_off(0.0), row=row(error, 0.01), kernels=(TF32,)).status == status


@pytest.mark.parametrize(
    ("element", "kernels", "bound"),
    [
        (0.02, (), 8 * 0.02),
        (0.0, (), 8 * 2.0**-11 * 5),
        (0.001, (), 8 * 2.0**-11 * 5),
        (0.02, (KernelProperty("float16 accumulation", 1.1, "measured"), TF32), 8 * 3 * 0.02),
        (0.02, (KernelProperty("TF32", 0.5, "measured"),), 8 * 0.02),
    ],
    ids=[
        "8 times the reference's",
        "half of epsilon at 5",
        "half of epsilon is more",
        "coarsest kernel",
        "fine kernel",
    ],
)
@pytest.mark.parametrize(("times", "status"), [(0.99, WITHIN), (1.01, DIVERGED)])
def test_one_element_may_be_off_by_eight_times_the_references_largest(element, kernels, bound, times, status):
    found = judged(one_off(times * bound), element=element, kernels=kernels)
    assert found.status == status
    assert status == WITHIN or (found.metric, found.bound) == ("max_abs", pytest.approx(bound, rel=1e-5))


@pytest.mark.parametrize(("count", "bound"), [(8, 4 * 1.375), (31, 4 * 34 / 31), (32, 4.0), (64, 4.0)])
def test_a_tensor_of_fewer_than_32_elements_has_a_wider_factor(count, bound):
    found = Tolerance().judge(("x",), 0, measure(NUMBERS[:count], NUMBERS[:count]), HALF, 0.01)
    assert found.bound == pytest.approx(0.01 * bound)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), (HALF, 0.1), ("bfloat16", 0.5)])
@pytest.mark.parametrize(("times", "status"), [(0.99, WITHIN), (1.01, DIVERGED)])
def test_without_a_floor_a_row_may_have_ten_times_the_table_at_most_one_half(dtype, bound, times, status):
    found = judged(one_off(0.0), None, dtype=dtype, row=row(times * bound, None))
    assert found.status == status
    assert status == WITHIN or (found.metric, found.bound) == ("row_rel_l2", pytest.approx(bound))


def test_a_tensor_beyond_the_table_is_named_before_its_rows():
    assert judged(measure(2 * NUMBERS, NUMBERS), None, row=row(1.0, None)).metric == "rel_l2"


def test_the_table_is_the_documented_one():
    documented = {"float64": 1e-12, "float32": 1e-4, HALF: 1e-2, "bfloat16": 8e-2}
    eights = {dtype: eps for dtype, eps in EPSILON.items() if dtype.startswith("float8")}
    assert dict(TABLE) == {**documented, **eights}


@pytest.mark.parametrize(
    ("dtype", "kl", "agreement"),
    [("int8", 0.0014, 0.95), ("q6", 0.0055, 0.95), ("q5", 0.011, 0.93), ("int4", 0.043, 0.89), ("q4", 0.043, 0.89)],
)
def test_logits_of_a_quantized_engine_may_have_llama_cpps_kl_and_disagreement(dtype, kl, agreement):
    """llama.cpp, pull requests 6936 and 12557."""
    logits = measure_logits(NUMBERS.reshape(1, -1), NUMBERS.reshape(1, -1), dtype="float32", step=0, k=1)
    bounds = {verdict.metric: verdict.bound for verdict in judge_logits(logits, dtype, Tolerance())}
    assert bounds == {"kl_mean": kl, "top1_disagreement": pytest.approx(1 - agreement)}


@pytest.mark.parametrize("side", ["engine", "reference"])
@pytest.mark.parametrize("bad", [(math.nan,), (math.inf,), (math.nan, math.inf)])
def test_where_everything_has_to_be_finite_each_nan_and_inf_is_counted(side, bad):
    broken = NUMBERS.clone()
    broken[: len(bad)] = torch.tensor(bad)
    pair = (broken, NUMBERS) if side == "engine" else (NUMBERS, broken)
    found = Tolerance(finite=True).judge(("x",), 0, measure(*pair), HALF, 0.01)
    assert (found.status, found.value) == (DIVERGED, len(bad))


def test_where_everything_has_to_be_finite_those_of_both_sides_add_up():
    broken = NUMBERS.clone()
    broken[:2] = torch.tensor([math.nan, math.inf])
    assert Tolerance(finite=True).judge(("x",), 0, measure(broken, broken), HALF, 0.01).value == 4


def test_a_nan_beside_an_inf_of_the_engine_is_wrong_without_a_floor_too():
    broken = NUMBERS.clone()
    broken[:2] = torch.tensor([math.nan, math.inf])
    assert judged(measure(broken, NUMBERS), math.inf).status == DIVERGED


def test_one_wrong_integer_is_inconclusive_where_the_reference_does_not_repeat_its_own():
    expected = torch.arange(100)
    actual = expected.clone()
    actual[0] = 5
    assert judged(measure(actual, expected), math.nan, dtype="int64", exact=True).status == INCONCLUSIVE
    assert judged(measure(expected, expected), math.nan, dtype="int64", exact=True).status == WITHIN


def test_one_element_out_of_rtol_and_atol_fails():
    assert Tolerance(allclose=True).judge(("x",), 0, one_off(1.0), HALF).status == DIVERGED
    assert Tolerance(allclose=True).judge(("x",), 0, one_off(0.0), HALF).status == WITHIN


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_what_either_side_demands_of_finite_numbers_and_elements_stays(first, second):
    both = Tolerance(allclose=first, finite=first).over(Tolerance(allclose=second, finite=second))
    assert (both.allclose, both.finite) == (True, True)
    plain = Tolerance().over(Tolerance())
    assert (plain.allclose, plain.finite) == (False, False)


def test_a_stored_tolerance_without_strict_settings_has_none():
    assert Tolerance.from_json({"factor": 4, "rules": []}) == Tolerance()


@pytest.mark.parametrize(
    ("value", "bound", "ok", "margin"),
    [
        (20.0, 10.0, True, 0.5),
        (10.0, 10.0, True, 1.0),
        (9.0, 10.0, False, 10 / 9),
        (0.5, 0.25, True, 0.5),
        (math.inf, 10.0, True, 0.0),
        (0.0, 10.0, False, math.inf),
        (-1.0, -1.0, True, 0.0),
    ],
)
def test_the_margin_of_what_has_to_be_at_least_so_much_is_bound_over_value(value, bound, ok, margin):
    found = decide("snr_db", value, bound, "yours", at_least=True)
    assert (found.ok, found.margin) == (ok, pytest.approx(margin))


def sample(step, floor, error=0.0, site="mlp"):
    """A tensor of 64 numbers that is off by ``error``."""
    return SiteResult(step, site, 0, measure((1 + error) * NUMBERS, NUMBERS), UNJUDGED, floor)


@pytest.mark.parametrize(("error", "status"), [(0.0399, WITHIN), (0.0401, DIVERGED)])
@pytest.mark.parametrize("step", [1, 2])
def test_a_lucky_floor_is_at_least_the_median_of_the_decoding_steps(step, error, status):
    """The floors of decoding are 0.001, 0.01 and 0.01; that of the prefill, 0.1, is none of them."""
    floors = {step: 0.001} | {other: 0.01 for other in (1, 2, 3) if other != step}
    results = [sample(0, 0.1), *(sample(s, floors[s], error if s == step else 0.0) for s in (1, 2, 3))]
    found = judge(results, Tolerance(), (), SessionInfo("engine", "onnxruntime", HALF))
    assert found[step].verdict.status == status


def test_the_floors_of_decoding_do_not_widen_the_prefills():
    results = [sample(0, 0.01, 0.0401), *(sample(s, 0.1) for s in (1, 2, 3))]
    assert judge(results, Tolerance(), (), SessionInfo("engine", "x", HALF))[0].verdict.status == DIVERGED


@pytest.mark.parametrize(("floor", "said"), [(math.inf, "overflows"), (0.97, "9.7e-01"), (math.nan, "repeat itself")])
def test_a_floor_that_is_none_says_what_the_reference_does(floor, said):
    first, second = sample(0, 0.01), replace(sample(0, floor, 1.0), site="lm_head", order=1)
    found = judge([first, second], Tolerance(), (), SessionInfo("engine", "x", HALF))[1].verdict
    assert found.status == INCONCLUSIVE
    assert said in found.rule
    assert "first at lm_head" in found.rule


def test_an_output_without_taps_has_the_names_of_the_tapped_one():
    taps = (Tap("model.norm", "norm"), Tap("lm_head", "logits"))
    assert output_names("logits:untapped", taps) == ("logits:untapped", "logits", "lm_head")
    assert output_names("logits", taps) == ("logits",)


def final(bound, *, output=True):
    return replace(sample(0, None), verdict=Verdict(WITHIN, "rel_l2", 0.0, bound, "yours"), final=output)


@pytest.mark.parametrize(
    ("dtype", "results", "logits", "missing"),
    [
        ("int8", [final(math.inf)], (), True),
        ("int8", [final(0.1)], (), False),
        ("int8", [final(0.1), final(math.inf)], (), True),
        ("int8", [final(math.inf), final(0.1, output=False)], (), True),
        ("int8", [final(0.1), final(math.inf, output=False)], (), False),
        ("int8", [], (), True),
        ("int8", [final(math.inf)], ("step 0",), False),
        (HALF, [final(math.inf)], (), False),
    ],
)
def test_a_quantized_engine_needs_logits_or_a_bound_for_each_output(dtype, results, logits, missing):
    assert bool(unjudged(dtype, results, logits)) is missing


def test_rows_of_zeros_on_both_sides_are_right():
    assert row_errors(torch.zeros(3, 64), torch.zeros(3, 64), ("batch", "x")).tolist() == [0, 0, 0]


def test_a_row_without_error_is_never_the_worst():
    assert worst_row(torch.tensor([0.0, 0.5]), torch.zeros(2), (2, 64), ("batch", "x")).index == (1,)
    assert worst_row(torch.tensor([0.0, 0.005]), torch.full((2,), 0.01), (2, 64), ("batch", "x")).index == (1,)


@pytest.mark.parametrize(
    ("floors", "median"),
    [([0.0, 0.0, 0.0, 0.2], 0.2), ([0.1, 0.2, 0.3], 0.2), ([3.0, 0.1, 0.2], 0.2), ([0.0, 0.0], 0.0)],
)
def test_the_usual_floor_leaves_out_rows_that_have_none(floors, median):
    assert usual(torch.tensor(floors, dtype=torch.float64)) == pytest.approx(median)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_elementwise_defaults_are_those_of_torch(dtype):
    assert tolerance(dtype) == default_tolerances(dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_integers_are_one_apart_and_equal_or_not(dtype):
    assert (spacing(dtype).ulp(7), tolerance(dtype)) == (1.0, (0.0, 0.0))
