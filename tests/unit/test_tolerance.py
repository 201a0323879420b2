"""How a single error is judged. Bounds are worked out by hand."""

import math

import pytest
import torch

from ditto_core.compare.bounds import METRICS, Rule, parse_rule
from ditto_core.compare.metrics import measure
from ditto_core.compare.tolerance import FACTOR, Tolerance
from ditto_core.compare.verdict import DIVERGED, EXPLAINED, INCONCLUSIVE, WITHIN, Verdict, decide
from ditto_core.errors import UsageError
from ditto_core.session import KernelProperty

OFF_BY_A_TENTH = measure(torch.full((64,), 1.1, dtype=torch.float64), torch.ones(64, dtype=torch.float64))


def judged(tolerance: Tolerance, floor: float | None = None, sites=("a.b",), step=0, dtype="float32") -> Verdict:
    return tolerance.judge(sites, step, OFF_BY_A_TENTH, dtype, floor)


def test_the_floor_decides_and_the_verdict_says_so():
    assert str(judged(Tolerance(factor=3), floor=0.05)) == "rel_l2 1.0e-01 <= 1.5e-01 (3 x noise floor 5.0e-02)"
    assert str(judged(Tolerance(factor=3), floor=0.03)) == "rel_l2 1.0e-01 > 9.0e-02 (3 x noise floor 3.0e-02)"


@pytest.mark.parametrize(("dtype", "epsilon"), [("float16", 2**-10), ("bfloat16", 2**-7), ("float32", 2**-23)])
def test_a_floor_is_never_taken_below_half_an_epsilon(dtype, epsilon):
    verdict = judged(Tolerance(factor=1), floor=0.0, dtype=dtype)
    assert verdict.bound == epsilon / 2


@pytest.mark.parametrize(("count", "multiple"), [(1, "16"), (2, "10"), (4, "7"), (16, "4.75"), (31, "4.39")])
def test_a_few_elements_are_given_more(count, multiple):
    found = measure(torch.full((count,), 1.1, dtype=torch.float64), torch.ones(count, dtype=torch.float64))
    verdict = Tolerance().judge(("a",), 0, found, "float32", 0.01)
    assert verdict.rule == f"{multiple} x noise floor 1.0e-02 of {count} elements"
    assert verdict.bound == pytest.approx(0.01 * 4 * (count + 3) / count)


def test_without_a_floor_the_table_decides():
    verdict = judged(Tolerance(factor=100), dtype="float16")
    assert (verdict.status, verdict.bound) == (DIVERGED, 1e-2)
    assert verdict.rule == "table for float16, no floor measured"


def test_a_rule_applies_by_any_of_a_sites_names_and_at_its_step_only():
    tolerance = Tolerance(rules=(Rule("model.*", 1.0, step=1),))
    assert judged(tolerance, sites=("a", "model.norm"), step=1).status == WITHIN
    assert judged(tolerance, sites=("a", "model.norm"), step=0).status == DIVERGED
    assert judged(tolerance, sites=("a", "model.norm.x"), step=1).status == DIVERGED


def test_a_rule_may_bound_another_metric():
    verdict = judged(Tolerance(rules=(Rule("**", 0.05, metric="max_abs"),)))
    assert (verdict.metric, verdict.status) == ("max_abs", DIVERGED)
    assert verdict.value == pytest.approx(0.1)


def test_a_reason_explains_only_what_it_allows():
    assert judged(Tolerance(rules=(Rule("**", 0.2, reason="known"),))).status == EXPLAINED
    assert judged(Tolerance(rules=(Rule("**", 0.02, reason="known"),))).status == DIVERGED


def test_nan_never_passes():
    assert decide("rel_l2", math.nan, math.inf, "").status == DIVERGED


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_rule_lets_a_nan_or_inf_of_one_side_pass(metric, bad):
    found = measure(torch.tensor([1.0, bad]), torch.ones(2))
    verdict = Rule("**", 1.0 if metric == "mismatch_ratio" else 1e9, metric=metric).judge(found)
    assert (verdict.status, verdict.value) == (DIVERGED, math.inf)
    assert verdict.rule == "rule '**'; 1 NaN or Inf are never allowed"
    anything = Rule("**", math.inf, metric=metric).judge(found)
    assert (anything.status, anything.margin) == (WITHIN, 0.0)


def test_nan_on_both_sides_breaks_a_rule_unless_they_were_said_to_be_equal():
    both = torch.tensor([1.0, math.nan])
    rule = Rule("**", 1.0, metric="max_abs")
    assert rule.judge(measure(both, both)).status == DIVERGED
    assert rule.judge(measure(both, both, equal_nan=True)).status == WITHIN
    assert Rule("**", 0.5, metric="mismatch_ratio").judge(measure(both, both)).status == WITHIN


def test_the_margin_is_value_over_bound():
    assert Verdict(WITHIN, "rel_l2", 2.0, 8.0, "").margin == 0.25
    assert Verdict(DIVERGED, "rel_l2", 1e-9, 0.0, "").margin == math.inf
    assert Verdict(WITHIN, "rel_l2", 0.0, 0.0, "").margin == 0.0


def test_a_tolerance_is_made_of_a_number_a_table_or_nothing():
    assert Tolerance.of(None) == Tolerance(FACTOR)
    assert Tolerance.of(3) == Tolerance(3.0)
    table = {"factor": 2, "a.*": 0.1, "b": {"bound": 8, "metric": "max_ulp", "step": 0, "reason": "r"}}
    made = Tolerance.of(table)
    assert made == Tolerance(2.0, (Rule("a.*", 0.1), Rule("b", 8, "max_ulp", 0, "r")))
    assert Tolerance.of(made) is made
    assert Tolerance.from_json(made.to_json()) == made


@pytest.mark.parametrize("factor", [0, -1, math.nan, math.inf, True])
def test_a_factor_is_a_positive_number(factor):
    with pytest.raises(UsageError, match="expected a positive number"):
        Tolerance.of({"factor": factor})


@pytest.mark.parametrize(
    "value", [True, "1e-3", {"metric": "rel_l2"}, {"bound": "1"}, {"bound": -1}, {"bound": math.nan}]
)
def test_a_rule_needs_a_bound(value):
    with pytest.raises(UsageError, match="tolerance for 'a'"):
        parse_rule("a", value)


def test_inner_rules_come_last_and_so_decide():
    outer, inner = Tolerance.of({"factor": 9, "**": 1.0}), Tolerance.of({"a.b": 1e-3})
    merged = inner.over(outer)
    assert merged.factor == 9
    assert judged(merged).status == DIVERGED
    assert judged(merged, sites=("other",)).status == WITHIN


@pytest.mark.parametrize("floor", [math.inf, math.nan, 0.125, 1.0])
@pytest.mark.parametrize(("engine", "status"), [(1.001, WITHIN), (1.1, INCONCLUSIVE), (0.0, INCONCLUSIVE)])
def test_a_floor_whose_bound_reaches_a_half_is_no_tolerance(floor, engine, status):
    """The table for float16 is 0.01; 4 x 0.125 is 0.5."""
    found = measure(torch.full((64,), engine, dtype=torch.float64), torch.ones(64, dtype=torch.float64))
    verdict = Tolerance().judge(("a",), 0, found, "float16", floor, reason="eager overflows, first at x")
    assert verdict.status == status
    assert verdict.ok
    assert "eager overflows, first at x" in str(verdict)
    assert verdict.bound == (0.01 if status == WITHIN else math.inf)


def test_a_floor_just_below_the_ceiling_is_a_tolerance():
    assert judged(Tolerance(), floor=0.1249).bound == pytest.approx(0.4996)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_nan_and_inf_of_the_engine_alone_fail_without_a_usable_floor(wrong, dtype):
    engine = torch.ones(64)
    engine[3] = wrong
    verdict = Tolerance().judge(("a",), 0, measure(engine, torch.ones(64)), dtype, math.inf)
    assert verdict.status == DIVERGED


@pytest.mark.parametrize("count", [1, 2, 8])
def test_few_elements_get_no_bound_beyond_the_ceiling(count):
    found = measure(torch.zeros(count), torch.ones(count))
    verdict = Tolerance().judge(("a",), 0, found, "bfloat16", 0.12)
    assert (verdict.status, verdict.bound <= 0.5) == (DIVERGED, True)


def test_a_kernel_property_does_not_widen_beyond_the_ceiling():
    found = measure(torch.zeros(64), torch.ones(64))
    kernel = KernelProperty("TF32", 1e6, "measured")
    assert Tolerance().judge(("a",), 0, found, "float32", 1e-4, [kernel]).status == DIVERGED


@pytest.mark.parametrize(("wrong", "status"), [(4, WITHIN), (5, DIVERGED)])
def test_as_many_integers_may_differ_as_a_multiple_of_the_references_own(wrong, status):
    """One of 1,000 differs in the reference's own low-precision run: 4 x 1 may."""
    ids = torch.arange(1000)
    found = measure(ids + (ids < wrong), ids)
    verdict = Tolerance().judge(("ids",), 0, found, "float16", 0.001, exact=True)
    assert (verdict.status, verdict.value, verdict.bound) == (status, wrong, pytest.approx(4))
    assert Tolerance().judge(("ids",), 0, found, "float16", None, exact=True).status == DIVERGED
    assert Tolerance().judge(("ids",), 0, found, "float16", 0.5, exact=True).status == INCONCLUSIVE
