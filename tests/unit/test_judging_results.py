"""Results of a run judged together: usual floors, names, reasons, what heals, and what a quantized engine lacks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.judging import judge, of_few, unjudged, usual_floors
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import SiteResult
from ditto_core.compare.row_error import RowError
from ditto_core.compare.tokens import measure_logits
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.verdict import DIVERGED, INCONCLUSIVE, UNJUDGED, WITHIN, decide
from ditto_core.sites import Tap
from tests.unit.hand_made import ENGINE, measured

LOGITS = Tap("lm_head", "logits", aliases=("head",))


def result(site="x", *, step=0, order=0, error=0.0, floor=1e-3, **fields):
    """A result of 64 numbers with this rel-L2."""
    return SiteResult(step, site, order, measured(error), UNJUDGED, floor, **fields)


def judged(*results, tolerance=None, taps=()):
    return judge(results, tolerance or Tolerance(), taps, ENGINE)


def test_an_unjudged_result_is_what_its_fields_make():
    known = {"step": 1, "site": "x", "order": 2, "metrics": measured(0.1)}
    for fields in ({}, {"floor": 0.1, "final": True, "dtype": "int64", "row": RowError((0,), 0.1, None, 2, 3)}):
        found = SiteResult.unjudged(**known, **fields)
        assert found == SiteResult(**known, verdict=UNJUDGED, **fields)
        assert replace(found, healed=True).floor == fields.get("floor")


def test_a_floor_is_at_least_what_is_usual_at_its_site_in_its_phase():
    """The median of the decoding steps is 0.002; the prefill stands for itself."""
    floors = {0: 0.02, 1: 0.001, 2: 0.003, 3: 0.002}
    found = judged(*(result(step=step, floor=floor) for step, floor in floors.items()))
    assert [r.verdict.bound for r in found] == pytest.approx([0.08, 0.008, 0.012, 0.008])


def test_a_result_without_a_floor_says_nothing_of_what_is_usual():
    bare, known = judged(result(step=1, floor=None), result(step=2, floor=0.01))
    assert bare.verdict.bound == 1e-2  # the table of float16
    assert known.verdict.bound == pytest.approx(0.04)


@pytest.mark.parametrize("name", ["lm_head", "head", "logits"])
@pytest.mark.parametrize("site", ["lm_head", "logits:untapped"])
def test_a_rule_means_an_output_by_each_of_its_names(site, name):
    """With taps or without: the engine's output ``logits`` is what ``lm_head`` returns."""
    (found,) = judged(result(site, error=0.5, final=True), tolerance=Tolerance.of({name: 0.6}), taps=[LOGITS])
    assert found.verdict.status == WITHIN
    assert found.verdict.bound == 0.6


def test_an_outputs_name_means_the_output_alone():
    """An inner site whose value has that name in the graph is not meant; neither is what no tap stands for."""
    other = Tap("mlp", "other")
    inner, bare = judged(
        result("lm_head", error=0.5),
        result("mask", error=0.5, final=True),
        tolerance=Tolerance.of({"logits": 0.6}),
        taps=[LOGITS, other],
    )
    assert inner.verdict.status == bare.verdict.status == DIVERGED
    (plain,) = judged(result("logits:untapped", error=0.5), tolerance=Tolerance.of({"mlp": 0.6}), taps=[LOGITS, other])
    assert plain.verdict.status == DIVERGED


@pytest.mark.parametrize(
    ("floor", "expected", "reason"),
    [
        (math.inf, [1.0, 1.0], "eager in float16 overflows, first at x"),
        (0.3, [1.0, 1.0], "eager in float16 is itself off by 3.0e-01, first at x"),
        (math.nan, [1.0, 1.0], "the reference does not repeat itself, first at x"),
        (math.inf, [math.nan, math.inf], "the reference itself has NaN or Inf, first at x"),
    ],
)
def test_what_could_not_be_judged_says_why(floor, expected, reason):
    metrics = measure(torch.tensor([2.0, 2.0]), torch.tensor(expected))
    (found,) = judged(replace(result(floor=floor), metrics=metrics))
    assert (found.verdict.status, found.verdict.rule) == (INCONCLUSIVE, reason)


def test_a_reason_names_the_first_site_in_topological_order():
    later, first, fine = (
        result("b", order=2, error=1, floor=math.inf),
        result("a", order=1, floor=math.inf),
        result("c"),
    )
    assert judged(later, first, fine)[0].verdict.rule.endswith("first at a")


@pytest.mark.parametrize(
    ("order", "error", "floor", "heals"),
    [
        (2, 0.0, 1e-3, True),
        (1, 0.0, 1e-3, False),
        (0, 0.0, 1e-3, False),
        (2, 0.1, 1e-3, False),
        (2, 0.1, math.inf, False),
    ],
)
def test_a_site_heals_where_an_enclosing_module_is_within_later(order, error, floor, heals):
    """Not where it was computed before or with it, has diverged too, or could not be judged."""
    found = judged(result("a.b:port", order=1, error=0.05), result("a", order=order, error=error, floor=floor))
    assert found[0].healed is heals


def test_neither_a_final_output_nor_what_must_be_finite_heals():
    outer = result("a", order=2)
    final, _ = judged(result("a.b", order=1, error=0.05, final=True), outer)
    assert not final.healed
    broken = replace(result("a.b", order=1), metrics=measure(torch.tensor([math.nan]), torch.tensor([math.nan])))
    nan, _ = judged(broken, outer, tolerance=Tolerance(finite=True))
    assert (nan.verdict.status, nan.healed) == (DIVERGED, False)


@pytest.mark.parametrize(
    ("error", "floor", "heals"),
    [(0.063, 1e-3, True), (0.065, 1e-3, False), (0.49, 0.01, True), (0.51, 0.01, False)],
)
def test_what_is_too_far_off_for_rounding_heals_nowhere(error, floor, heals):
    """16 times its bound of 4 floors, and a rel-L2 of one half: these inputs may hide what is another tensor."""
    found = judged(result("a.b:port", order=1, error=error, floor=floor), result("a", order=2))
    assert found[0].healed is heals


def test_a_row_that_is_another_one_heals_nowhere():
    """The tensor is within, one row of 300 is off by 0.3 or 0.6, and its bound is 0.065."""
    near, far = (RowError((0, 3), error, 1e-2, 300, 64) for error in (0.3, 0.6))
    found = [judged(result("a.b", order=1, error=1e-3, row=row), result("a", order=2))[0] for row in (near, far)]
    assert [(r.verdict.metric, r.healed) for r in found] == [("row_rel_l2", True), ("row_rel_l2", False)]


@pytest.mark.parametrize(("floor", "error", "heals"), [(1e-3, 0.09, True), (1e-3, 0.2, False), (1e-2, 0.2, True)])
def test_a_tensor_near_its_bound_heals_nowhere_with_a_row_that_is_far_beyond_its_own(floor, error, heals):
    """The tensor is 12.5 times beyond its bound; one row of 300 may have 16 x 6.5 of its floor."""
    row = RowError((0, 3), error, floor, 300, 64)
    found = judged(result("a.b", order=1, error=0.05, row=row), result("a", order=2))[0]
    assert (found.verdict.metric, found.healed) == ("rel_l2", heals)


def test_a_bound_of_the_users_is_meant_and_heals_nowhere():
    """1.25 times its bound, on either metric; a rule about another site changes nothing."""
    found = (result("a.b", order=1, error=0.05), result("a", order=2))
    for rules in ({"a.b": 0.04}, {"**": {"metric": "rel_l2", "bound": 0.04}}):
        assert not judged(*found, tolerance=Tolerance.of(rules))[0].healed
    assert judged(*found, tolerance=Tolerance.of({"a": 0.04}))[0].healed
    assert judge(found, Tolerance.of({"a.b": 0.04}), (), ENGINE, one_engine=True)[0].healed


def test_of_two_runs_of_one_engine_whatever_is_gone_later_heals():
    """Positions that start elsewhere turn queries and keys together, and no output changes."""
    turned = [result("a.b:port", order=1, error=1.0), result("a", order=2)]
    assert judge(turned, Tolerance(), (), ENGINE, one_engine=True)[0].healed


def bounded(site, bound, *, final=False):
    return replace(result(site, final=final), verdict=decide("rel_l2", 0.0, bound, "rule"))


@pytest.mark.parametrize(
    ("dtype", "results", "missing"),
    [
        ("int8", [bounded("y", math.inf, final=True)], True),
        ("int8", [bounded("y", 0.1, final=True), bounded("z", math.inf, final=True)], True),
        ("int8", [bounded("y", 0.1, final=True), bounded("inner", math.inf)], False),
        ("int8", [bounded("inner", math.inf)], True),
        ("int8", [bounded("inner", 0.1)], False),
        ("int8", [], True),
        ("float16", [bounded("y", math.inf, final=True)], False),
    ],
)
def test_a_quantized_engine_needs_logits_or_a_rule_for_each_output(dtype, results, missing):
    assert bool(unjudged(dtype, results, [])) is missing


def test_the_logits_of_a_quantized_engine_say_nothing_of_its_other_outputs():
    logits = [measure_logits(torch.ones(1, 4), torch.ones(1, 4), dtype="float32", step=0)]
    taps = [Tap("head", "logits"), Tap("inner", "inner")]
    results = [bounded(site, math.inf, final=site != "inner") for site in ("head", "logits:untapped", "inner")]
    assert unjudged("int8", results, logits, taps) == {}
    boxes = [*results, bounded("boxes", math.inf, final=True)]
    assert list(unjudged("int8", boxes, logits, taps)) == ["boxes"]
    assert unjudged("int8", [*results, bounded("boxes", 0.1, final=True)], logits, taps) == {}
    assert unjudged("int8", boxes, logits, taps, generated=True) == {}


def test_what_depends_on_a_near_tie_of_the_reference_is_not_judged():
    (found,) = judged(result(error=0.5, tied="experts nearly tie"))
    assert (found.verdict.status, found.verdict.rule, found.verdict.value) == (
        INCONCLUSIVE,
        "experts nearly tie",
        pytest.approx(0.5),
    )


@pytest.mark.parametrize("fields", [{}, {"tied": "padding covers all of it"}])
def test_an_output_that_is_empty_on_both_sides_needs_another_that_is_not(fields):
    empty = replace(result("boxes", final=True, **fields), metrics=measure(torch.empty(0, 4), torch.empty(0, 4)))
    inner, scores = result("inner", order=1), result("scores", order=2, final=True)
    assert not Comparison(ENGINE, ENGINE, judged(empty, inner))
    assert bool(Comparison(ENGINE, ENGINE, judged(empty, scores))) is not bool(fields)


def test_a_reason_says_how_much_a_sites_own_sums_cancel():
    (found,) = judged(result(floor=math.inf, conditioning=1234.0))
    assert found.verdict.rule.endswith("first at x; sum of |terms| here is 1.2e+03 x |sum|")


def test_only_floors_that_were_measured_make_a_usual_one():
    assert usual_floors([result(step=1, floor=None), result(step=1, floor=0.01), result(step=2, floor=0.03)]) == {
        ("x", True): pytest.approx(0.02)
    }


MASKS = st.lists(st.booleans(), min_size=6, max_size=6)
SITES = st.fixed_dictionaries(
    {
        "site": st.sampled_from(["a", "a.b", "boxes"]),
        "step": st.integers(0, 2),
        "final": st.booleans(),
        "floor": st.sampled_from([None, 1e-3, 0.3, math.nan]),
        "tied": st.sampled_from(["", "experts nearly tie"]),
    }
)
RULES = st.dictionaries(st.sampled_from(["*", "boxes", "a.b"]), st.sampled_from([1e-9, 0.5, 2.0]))


@given(st.lists(st.tuples(SITES, MASKS, st.sampled_from([0.0, 1e-3, 9.0])), max_size=5), RULES)
@settings(max_examples=300, deadline=None)
def test_whatever_is_left_out_a_pass_rests_on_an_element_of_every_output(parts, rules):
    """The elements that count are those of the masks: counted here, not by what judges."""
    seen = {}
    for order, (fields, mask, error) in enumerate(parts):
        valid, expected = torch.tensor(mask), torch.arange(1.0, 7.0)
        metrics = measure(expected * (1 + error), expected, valid=valid)
        tied = "" if any(mask) else fields["tied"] or "padding covers all of it"
        seen[fields["site"], fields["step"]] = SiteResult(
            metrics=metrics, order=order, verdict=UNJUDGED, **{**fields, "tied": tied}
        )
    results = judged(*seen.values(), tolerance=Tolerance.of(rules))
    holds = bool(Comparison(ENGINE, ENGINE, results, Tolerance.of(rules)))
    counts = {r.site: 0 for r in results if r.final}
    for place, (fields, mask, _) in enumerate(parts):
        there = next((r for r in results if r.order == place), None)
        if there is not None and there.verdict.judged:
            counts[fields["site"]] = counts.get(fields["site"], 0) + sum(mask)
    assert not holds or (counts and all(counts[r.site] for r in results if r.final) and any(counts.values()))


def jumped(changed, by=1.0, count=100):
    """A result of so many ones of which the first few have changed."""
    expected = torch.ones(count)
    actual = expected.clone()
    actual[:changed] += by
    return SiteResult(0, "x", 0, measure(actual, expected), UNJUDGED, 1e-3, element=1e-3)


@pytest.mark.parametrize(("changed", "few"), [(1, True), (10, True), (11, False), (100, False)])
def test_an_error_is_of_few_elements_where_nine_of_ten_are_within_their_bound(changed, few):
    (found,) = judged(jumped(changed))
    assert found.verdict.metric == "rel_l2"
    assert of_few(found) == few


def test_a_single_element_may_be_all_that_is_wrong():
    """0.1 of 10,000 ones is a thousandth of the norm, which is within; the element is not."""
    (found,) = judged(jumped(1, by=0.1, count=10_000))
    assert found.verdict.metric == "max_abs"
    assert of_few(found)


@pytest.mark.parametrize(("changed", "few"), [(1, True), (16, True), (17, False)])
def test_few_whole_numbers_are_sixteen(changed, few):
    (found,) = judged(replace(jumped(changed), dtype="int64"))
    assert found.verdict.metric == "mismatched"
    assert of_few(found) == few


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_nan_is_no_threshold_that_was_crossed(wrong):
    (found,) = judged(jumped(1, by=wrong))
    assert found.verdict.status == DIVERGED
    assert not of_few(found)
