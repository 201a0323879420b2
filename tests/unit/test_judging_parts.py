"""What a tensor within its floor may hide, and what stands where no floor decides: bounds worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from ditto_core.compare.judging import judge_logits
from ditto_core.compare.metrics import measure
from ditto_core.compare.row_error import RowError
from ditto_core.compare.tokens import measure_logits
from ditto_core.compare.tolerance import EMPTY, EPSILON, FACTOR, TABLE, Tolerance, by_kernels
from ditto_core.compare.verdict import DIVERGED, EXPLAINED, INCONCLUSIVE, WITHIN, decide
from ditto_core.errors import SelectorError, UsageError
from ditto_core.session import KernelProperty

HERE = ("x",)
EXACT = measure(torch.ones(64), torch.ones(64))


def numbers(**fields):
    """Metrics of 64 equal numbers, with these fields in place of what was measured."""
    return replace(EXACT, **fields)


def judged(metrics=EXACT, floor=1e-2, dtype="float16", tolerance=None, **more):
    return (tolerance or Tolerance()).judge(HERE, 0, metrics, dtype, floor, **more)


def row(error, floor=1e-2, rows=10, width=64):
    """The worst of ten rows: four times its floor, and a quarter more for the tenfold number of samples."""
    return RowError((0, 3), error, floor, rows, width)


def kernel(ratio, phase="both"):
    return KernelProperty("TF32", ratio, "measured", phase)


@pytest.mark.parametrize(
    ("worst", "bound"),
    [
        (row(0), 5e-2),
        (row(0, rows=1), 4e-2),
        (row(0, rows=100), 6e-2),
        (row(0, width=3), 1e-1),
        (row(0, floor=1e-9), 5 * 2.0**-11),
    ],
)
@pytest.mark.parametrize(("share", "status"), [(0.999, WITHIN), (1.001, DIVERGED)])
def test_the_worst_row_has_a_floor_of_its_own(worst, bound, share, status):
    verdict = judged(row=replace(worst, error=share * bound))
    assert verdict.status == status
    if status == DIVERGED:
        assert (verdict.metric, verdict.bound) == ("row_rel_l2", pytest.approx(bound))


@pytest.mark.parametrize("floor", [0.1, 0.2, math.nan, None])
def test_a_row_whose_bound_would_reach_the_ceiling_is_not_judged(floor):
    """Five times 0.1 is one half."""
    assert judged(row=row(0.9, floor=floor)).status == WITHIN


@pytest.mark.parametrize(
    ("error", "status", "metric", "bound"),
    [
        (0.049, WITHIN, "rel_l2", 4e-2),
        (0.051, EXPLAINED, "row_rel_l2", 15e-2),
        (0.149, EXPLAINED, "row_rel_l2", 15e-2),
        (0.151, DIVERGED, "row_rel_l2", 5e-2),
    ],
)
def test_a_kernel_property_widens_a_row_by_its_whole_factor(error, status, metric, bound):
    """Three times the floor of 1e-2, five times; a whole tensor would get half of that."""
    verdict = judged(row=row(error), kernels=[kernel(3)])
    assert (verdict.status, verdict.metric, verdict.bound) == (status, metric, pytest.approx(bound))
    assert ("TF32: measured" in verdict.rule) is (status == EXPLAINED)


@pytest.mark.parametrize(
    ("value", "kernels", "status", "bound"),
    [
        (0.079, [kernel(3)], WITHIN, None),
        (0.081, [kernel(3), kernel(2)], EXPLAINED, 24e-2),
        (0.239, [kernel(3), kernel(2)], EXPLAINED, 24e-2),
        (0.241, [kernel(3), kernel(2)], DIVERGED, 8e-2),
        (0.081, [kernel(3, "decode")], DIVERGED, 8e-2),
        (0.081, [kernel(0.5)], DIVERGED, 8e-2),
    ],
)
def test_a_kernel_property_widens_the_worst_element_by_its_whole_factor(value, kernels, status, bound):
    """Eight times the reference's largest of 1e-2, times the ratio; the step is the prefill."""
    metrics = numbers(rel_l2=1e-3, rms=1e-3, max_abs=value, max_abs_index=(7,))
    verdict = judged(metrics, element=1e-2, kernels=kernels)
    assert verdict.status == status
    if bound:
        assert (verdict.metric, verdict.bound) == ("max_abs", pytest.approx(bound))


def test_a_row_that_fails_decides_though_a_kernel_property_allows_an_element():
    metrics = numbers(rel_l2=1e-3, rms=1e-3, max_abs=0.081, max_abs_index=(7,))
    parts = {"element": 1e-2, "kernels": [kernel(2)]}
    assert judged(metrics, **parts).status == EXPLAINED
    assert judged(metrics, row=row(0.2), **parts).metric == "row_rel_l2"
    assert judged(metrics, row=row(0.2), **parts).status == DIVERGED


@pytest.mark.parametrize(("element", "bound"), [(1e-2, 8e-2), (0.0, 8 * 2.0**-11)])
@pytest.mark.parametrize(("share", "status"), [(0.999, WITHIN), (1.001, DIVERGED)])
def test_the_worst_element_is_judged_by_the_largest_of_the_reference(element, bound, share, status):
    """An rms of 1e-3 and a rel-L2 of 1e-3: the numbers themselves are around 1."""
    metrics = numbers(rel_l2=1e-3, rms=1e-3, max_abs=share * bound, max_abs_index=(7,))
    verdict = judged(metrics, element=element)
    assert verdict.status == status
    if status == DIVERGED:
        assert (verdict.metric, verdict.bound) == ("max_abs", pytest.approx(bound))
        assert "at [7]" in verdict.rule


def test_the_size_of_the_numbers_scales_the_least_error_of_an_element():
    """An rms of 1e-1 and a rel-L2 of 1e-3: numbers around 100, half a unit there is 100 x 2^-11."""
    metrics = numbers(rel_l2=1e-3, rms=1e-1, max_abs=1.0)
    assert judged(metrics, element=0.0).bound != 1
    assert judged(replace(metrics, max_abs=0.38), element=0.0).status == WITHIN
    assert judged(replace(metrics, max_abs=0.4), element=0.0).bound == pytest.approx(800 * 2.0**-11)


@pytest.mark.parametrize("dtype", TABLE)
@pytest.mark.parametrize(("share", "status"), [(0.999, WITHIN), (1.001, DIVERGED)])
def test_without_a_floor_a_row_may_have_ten_times_what_its_tensor_may(dtype, share, status):
    bound = min(10 * TABLE[dtype], 0.5)
    verdict = judged(floor=None, dtype=dtype, row=row(share * bound, floor=None))
    assert verdict.status == status
    assert verdict.metric == ("rel_l2" if status == WITHIN else "row_rel_l2")


def test_a_tensor_beyond_the_table_fails_whatever_its_worst_row_is():
    verdict = judged(numbers(rel_l2=0.02), floor=None, row=row(0.0, floor=None))
    assert (verdict.status, verdict.metric) == (DIVERGED, "rel_l2")


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 8e-2)]
)
def test_the_table_is_that_of_the_documentation(dtype, bound):
    assert judged(numbers(rel_l2=0.999 * bound), floor=None, dtype=dtype).status == WITHIN
    assert judged(numbers(rel_l2=1.001 * bound), floor=None, dtype=dtype).status == DIVERGED


@pytest.mark.parametrize("dtype", [name for name in EPSILON if name.startswith("float8")])
def test_the_table_allows_every_8_bit_float_what_rounding_moves_an_element(dtype):
    """Half of what lies between two neighbours."""
    assert TABLE[dtype] == EPSILON[dtype] / 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rounding_to_an_8_bit_float_is_within_the_table_and_a_scale_off_by_as_much_is_not(dtype):
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    name = str(dtype).removeprefix("torch.")
    stored = exact.to(dtype).float()
    assert judged(measure(stored, exact), floor=None, dtype=name).status == WITHIN
    assert (
        judged(measure((exact * (1.05 + EPSILON[name] / 2)).to(dtype).float(), stored), floor=None, dtype=name).status
        == DIVERGED
    )


@pytest.mark.parametrize(
    ("dtype", "kl", "disagreement"),
    [("int8", 0.0014, 0.05), ("q6", 0.0055, 0.05), ("q5", 0.011, 0.07), ("int4", 0.043, 0.11), ("q4", 0.043, 0.11)],
)
def test_quantized_logits_are_judged_by_kl_and_by_the_share_of_other_tokens(dtype, kl, disagreement):
    logits = measure_logits(torch.ones(1, 4), torch.ones(1, 4), dtype="float32", step=0)
    bounds = {verdict.metric: verdict.bound for verdict in judge_logits(logits, dtype, Tolerance())}
    assert bounds == {"kl_mean": kl, "top1_disagreement": disagreement}


@pytest.mark.parametrize(("gap", "ok"), [(0.40, True), (0.43, False)])
def test_likeliest_tokens_that_errors_within_the_kl_bound_decide_are_near_ties(gap, ok):
    """The bound of 0.043 nats on KL allows errors of sqrt(2 x 0.043) = 0.293, of a difference 0.415."""
    expected = torch.zeros(1, 4, 10)
    expected[..., 0] = gap
    actual = expected.clone()
    actual[:, :2, 1] = gap + 0.01  # two of four tokens flip
    verdicts = {
        v.metric: v for v in judge_logits(measure_logits(actual, expected, dtype="float32"), "int4", Tolerance())
    }
    assert verdicts["kl_mean"].ok
    assert verdicts["top1_disagreement"].ok == ok
    assert verdicts["top1_disagreement"].value == (0 if ok else 0.5)


@pytest.mark.parametrize(("count", "multiple"), [(1, 4.0), (31, 1 + 3 / 31), (32, 1.0)])
def test_a_floor_of_fewer_than_32_elements_is_a_small_sample(count, multiple):
    metrics = numbers(rel_l2=1e-3, count=count)
    assert judged(metrics).bound == pytest.approx(4 * multiple * 1e-2)


@pytest.mark.parametrize("rule", [{}, {"x": 1.0}, {"x": {"metric": "cosine", "at_least": 0.5}}])
def test_a_tensor_without_elements_is_not_judged(rule):
    verdict = Tolerance.of(rule).judge(["x"], 0, measure(torch.ones(0), torch.ones(0)), "float32", 1e-3)
    assert (verdict.status, verdict.rule) == (INCONCLUSIVE, EMPTY)


def test_a_user_may_allow_a_tensor_to_be_empty():
    verdict = Tolerance.of({"x": math.inf}).judge(["x"], 0, measure(torch.ones(0), torch.ones(0)), "float32")
    assert verdict.status == WITHIN


def test_an_error_at_what_a_kernel_property_allows_is_explained():
    """Half of the factor, times the ratio, times the floor: 2 x 2 x 2^-7."""
    verdict = by_kernels([kernel(2)], 0, decide("rel_l2", 2.0**-5, 2.0**-6, "floor"), 2.0**-7, 4)
    assert verdict.status == EXPLAINED
    assert "2 x 2 x noise floor" in verdict.rule


@pytest.mark.parametrize(
    "pair",
    [
        ([math.nan, 1.0], [math.nan, 1.0]),
        ([math.inf, 1.0], [math.inf, 1.0]),
        ([math.nan, math.inf], [1.0, 1.0]),
        ([1.0, 1.0], [math.nan, 1.0]),
    ],
)
def test_finite_fails_a_single_number_that_is_none_on_either_side(pair):
    metrics = measure(*map(torch.tensor, pair))
    assert judged(metrics, tolerance=Tolerance(finite=True)).status == DIVERGED


def test_finite_and_elements_are_judged_exactly():
    off = measure(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    assert judged(off, tolerance=Tolerance(allclose=True)).status == DIVERGED
    one = numbers(nan_actual=1)
    assert judged(one, tolerance=Tolerance(finite=True)).status == DIVERGED


def test_one_other_id_where_the_reference_gives_no_floor_is_inconclusive():
    off = measure(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert judged(off, floor=math.inf, dtype="int64", exact=True).status == INCONCLUSIVE
    assert judged(off, floor=0.0, dtype="int64", exact=True).status == DIVERGED


def test_a_nan_beside_an_inf_of_the_engine_alone_fails_a_quantized_engine():
    metrics = measure(torch.tensor([math.nan, math.inf, 1.0]), torch.ones(3))
    assert judged(metrics, dtype="int8").status == DIVERGED


def test_each_strictness_comes_from_either_side():
    strict = Tolerance(allclose=True), Tolerance(finite=True)
    for first, second in (strict, strict[::-1]):
        both = first.over(second)
        assert both.allclose
        assert both.finite


def test_optional_rules_may_match_nothing():
    rules = Tolerance.of({"nowhere": 1})
    with pytest.raises(SelectorError):
        rules.check(["x"])
    rules.optional().check(["x"])


def test_what_a_rule_says_of_elements_is_found():
    rules = Tolerance.of({"x": {"metric": "mismatched", "bound": 0, "rtol": 0.5, "atol": 0.25}})
    assert rules.elementwise(HERE, 0) == (0.5, 0.25)
    assert rules.elementwise(("y",), 0) == (None, None)


def test_only_what_a_rule_asks_for_is_measured_at_its_site():
    rules = Tolerance.of({"x": 1, "y": {"metric": "abs_p99", "bound": 1}})
    assert rules.requests(HERE, 0) == []
    assert [rule.metric for rule in rules.requests(("y",), 0)] == ["abs_p99"]


def test_a_rule_on_what_was_measured_for_it_decides_by_it():
    rules = Tolerance.of({"x": {"metric": "abs_p99", "bound": 0.5}})
    assert judged(numbers(requested=(("abs_p99", 0.4),)), tolerance=rules).status == WITHIN
    failed = judged(numbers(requested=(("abs_p99", 0.6),)), tolerance=rules)
    assert (failed.status, failed.metric) == (DIVERGED, "abs_p99")
    with pytest.raises(UsageError, match="not measured"):
        judged(tolerance=rules)


@pytest.mark.parametrize(
    ("bounds", "worst"), [({"bound": 1}, math.inf), ({"at_least": 1, "metric": "snr_db"}, -math.inf)]
)
def test_a_nan_is_worse_than_any_number(bounds, worst):
    verdict = judged(measure(torch.tensor([math.nan]), torch.ones(1)), tolerance=Tolerance.of({"x": bounds}))
    assert (verdict.status, verdict.value, verdict.margin) == (DIVERGED, worst, math.inf)
    assert verdict.metric == bounds.get("metric", "rel_l2")


def test_rules_about_steps_that_were_not_compared_are_said():
    at_2, at_9, ever = ({"x": {"bound": 1, "step": step}} for step in (2, 9, None))
    assert Tolerance.of(ever).idle([0, 2]) == Tolerance.of(at_2).idle([0, 2]) == ()
    assert Tolerance.of(at_9).optional().idle([0, 2]) == ()
    (said,) = Tolerance.of(at_9).idle([0, 2])
    assert "step 9" in said
    assert said.endswith("the last step compared is 2")


def test_a_factor_below_1_is_a_factor():
    assert Tolerance.of(0.5).factor == 0.5


def test_a_stored_tolerance_that_says_nothing_of_strictness_has_none():
    assert Tolerance.from_json({"factor": FACTOR, "rules": []}) == Tolerance()


@pytest.mark.parametrize(
    ("value", "bound", "margin"),
    [(2.0, 1.0, 0.5), (0.5, 0.25, 0.5), (0.0, 0.5, math.inf), (0.0, 0.0, 0.0), (math.inf, 1.0, 0.0)],
)
def test_the_margin_of_a_least_number_is_bound_over_value(value, bound, margin):
    assert decide("cosine", value, bound, "rule", at_least=True).margin == margin


def test_a_number_at_its_bound_passes_on_both_sides():
    assert decide("cosine", 0.5, 0.5, "rule", at_least=True).ok
    assert decide("rel_l2", 0.5, 0.5, "rule").ok


def test_digits_are_added_only_where_a_failure_is_by_a_hair():
    assert str(decide("rel_l2", 1.01e-4, 1.04e-4, "r")) == "rel_l2 1.0e-04 <= 1.0e-04 (r)"
    assert str(decide("rel_l2", 1.04e-4, 1.01e-4, "r")) == "rel_l2 0.000104 > 0.000101 (r)"


@pytest.mark.parametrize("at_least", [False, True])
def test_a_number_that_is_none_never_passes(at_least):
    assert not decide("rel_l2", math.nan, math.inf, "rule", at_least=at_least).ok
    assert not decide("rel_l2", math.nan, -math.inf, "rule", at_least=at_least).ok
