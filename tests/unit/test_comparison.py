"""The structured result: what makes it fail, what is first and worst, what heals, and its JSON form."""

import json
import math
from dataclasses import replace

import pytest
import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.judging import enclosing, judge
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import ObserverEffect, TokenResult
from ditto_core.compare.tokens import measure_logits
from ditto_core.compare.tolerance import Tolerance
from ditto_core.errors import SelectorError, TraceError
from ditto_core.session import KernelProperty
from ditto_core.sites import Tap
from ditto_core.stepping.comparer import Comparer
from ditto_core.stepping.lockstep import observe
from ditto_core.stepping.measured import Measured
from tests.unit.hand_made import ENGINE, REFERENCE, SITES, compared

DOWN, BLOCK, ROPE = "model.layers.0.mlp.down_proj", "model.layers.0", "model.layers.0.self_attn:q_rope"


def test_a_clean_comparison_holds():
    run = compared({(0, DOWN): 3.9e-3})
    assert run
    assert run.first_bad is None
    assert (run.steps, len(run), run.sites) == (2, 12, SITES)
    run.assert_close()


def test_nothing_compared_or_something_missing_does_not_hold():
    assert not Comparison(ENGINE, REFERENCE, ())
    assert not compared({}, missing={"x": "refused"})


def test_the_first_bad_site_is_the_earliest_step_then_the_first_computed():
    run = compared({(1, BLOCK): 1.0, (0, "lm_head"): 0.1, (0, BLOCK): 0.5})
    assert [(r.step, r.site) for r in run.failures] == [(0, BLOCK), (0, "lm_head"), (1, BLOCK)]
    assert (run.first_bad.step, run.first_bad.site) == (0, BLOCK)
    with pytest.raises(AssertionError, match=f"engine diverges at {BLOCK}, step 0: rel_l2 5.0e-01 > 4.0e-03"):
        run.assert_close()


def test_iteration_is_worst_margin_first():
    run = compared({(0, "lm_head"): 0.1, (1, BLOCK): 0.5})
    assert [(r.site, r.step) for r in run][:2] == [(BLOCK, 1), ("lm_head", 0)]
    assert run.worst.verdict.margin == pytest.approx(0.5 / 4e-3)


def test_an_error_that_is_gone_at_the_end_of_an_enclosing_module_has_healed():
    run = compared({(0, ROPE): 0.05, (1, ROPE): 0.05, (1, BLOCK): 1.0, (1, "model.layers.0.self_attn"): 1.0})
    assert [(r.step, r.site) for r in run.healed] == [(0, ROPE)]
    assert run.first_bad.step == 1
    assert run.first_bad.site == ROPE


def test_an_error_does_not_heal_by_an_output_that_is_off_for_a_reason():
    measured = compared({(0, DOWN): 0.1, (0, BLOCK): 8e-3})
    engine = replace(ENGINE, kernels=(KernelProperty("TF32", 5.0, "probe 3.0e-04", "both"),))
    run = replace(measured, engine=engine).judged(Tolerance())
    assert {r.site for r in run.results if r.verdict.status == "explained"} == {BLOCK}
    assert not run.healed
    assert (run.first_bad.step, run.first_bad.site) == (0, DOWN)


def test_an_error_does_not_heal_by_what_was_computed_before_it():
    run = compared({(0, DOWN): 0.05})
    assert [r.site for r in run.healed] == [DOWN]
    last = max(r.order for r in run.results) + 1
    moved = replace(run, results=tuple(replace(r, order=last) if r.site == DOWN else r for r in run.results))
    assert moved.judged(Tolerance()).first_bad.site == DOWN
    assert not moved.judged(Tolerance()).healed
    assert not compared({(0, "lm_head"): 1.0})


def test_enclosing_modules_go_from_the_inside_out():
    assert list(enclosing("a.b.c:port")) == ["a.b.c", "a.b", "a"]
    assert list(enclosing("a.b")) == ["a"]
    assert list(enclosing("a")) == []


def test_filter_and_judged_keep_the_measurements():
    run = compared({(0, DOWN): 5e-3, (1, "lm_head"): 1.0})
    assert run.filter("model.**")
    assert run.filter("lm_head", step=0)
    assert {r.site for r in run.filter("lm_head")} == {"lm_head"}
    strict = run.judged(Tolerance(factor=1.0))
    assert strict.first_bad.verdict.bound == pytest.approx(1e-3)
    assert run.judged(Tolerance(factor=1000.0))
    assert run.judged(1000) == run.judged(Tolerance(factor=1000.0))
    assert not run.judged({"**": 1e-30})
    assert [r.metrics for r in strict.results] == [r.metrics for r in run.results]


def test_steps_that_one_side_lacks_are_missing_of_every_part():
    run = compared({}, missing={"steps": "2 in a, 1 in b"})
    assert not run.filter("lm_head")
    with pytest.raises(SelectorError, match="matches none of 6 sites"):
        run.filter("steps")


def test_a_part_that_no_site_belongs_to_is_refused():
    with pytest.raises(SelectorError, match=r"selector 'model.layer.\*' matches none of \d+ sites; closest: model"):
        compared({}).filter("model.layer.*")


def test_a_part_holds_what_is_said_of_its_own_sites():
    run = compared({})
    other = Tap("lm_head", "logits", "", "", "", aliases=("head",))
    logits = (measure_logits(torch.ones(1, 3), torch.ones(1, 3), dtype="float32"),)
    run = replace(run, missing={"model.gone": "fused"}, taps=(other,), logits=logits)
    assert not run
    assert run.filter("lm_head")
    assert run.filter("lm_head").missing == {}
    assert run.filter("model.**").missing == {"model.gone": "fused"}
    assert {r.site for r in run.filter("head")} == {"lm_head"}
    assert run.filter("head").logits == logits
    assert run.filter("head", step=0).logits == run.filter().logits == logits
    assert run.filter("head", step=1).logits == run.filter("model.**").logits == ()


def test_a_part_by_step_alone_holds_the_ports_too():
    run = compared({(0, ROPE): 1.0, (0, BLOCK): 1.0, (0, "model.layers.0.self_attn"): 1.0})
    assert ROPE in run.filter(step=0).sites
    assert run.filter().results == run.results
    assert not run.filter(step=0)
    assert run.filter(step=1)


def test_rows_are_flat_and_in_the_order_of_computation():
    rows = compared({(1, DOWN): 0.05}).rows()
    assert [(row["step"], row["site"]) for row in rows] == [(step, site) for step in (0, 1) for site in SITES]
    assert (rows[9]["status"], rows[9]["healed"]) == ("diverged", True)
    assert all(isinstance(v, int | float | str | bool | None) for row in rows for v in row.values())
    assert {k for row in rows for k, v in row.items() if isinstance(v, str)} == {"site", "status", "metric", "rule"}


def test_token_flips_leave_near_ties_out():
    token = TokenResult("p", engine=(1, 2, 3, 4), reference=(1, 9, 3, 8), near_ties=(3,))
    assert token.differences == (1, 3)
    assert token.flips == (1,)
    assert token.prefix == 1
    run = compared({}, tokens=(token,))
    with pytest.raises(AssertionError, match="another token at step 1, row 0: 2, expected 9"):
        run.assert_same_tokens()
    compared({}, tokens=(TokenResult("p", (1, 2), (1, 3), near_ties=(1,)),)).assert_same_tokens()


def test_tokens_that_all_depend_on_a_near_tie_of_experts_are_no_agreement():
    """One token that is equal, or that no such choice decides, is something to go by."""
    lost = TokenResult("p", (4, 5), (1, 2), left_out=(0, 1))
    assert (lost.judged, lost.flips) == (0, ())
    with pytest.raises(AssertionError, match="no token could be judged"):
        compared({}, tokens=(lost,)).assert_same_tokens()
    for other in (TokenResult("q", (1, 9), (1, 2), left_out=(0, 1)), TokenResult("q", (3,), (3,))):
        compared({}, tokens=(lost, other)).assert_same_tokens()


@pytest.mark.parametrize(("notes", "reason"), [((), "only generate"), (("the reference has no logits: x",), "x")])
def test_where_no_tokens_were_compared_they_are_not_the_same(notes, reason):
    with pytest.raises(AssertionError, match=f"no tokens were compared: .*{reason}"):
        compared({}, notes=notes).assert_same_tokens()


def test_json_goes_both_ways_with_nan_and_infinity(tmp_path):
    logits = measure_logits(torch.tensor([[1.0, math.nan]]), torch.tensor([[1.0, 2.0]]), dtype="float16")
    run = compared(
        {(0, DOWN): math.inf, (1, "lm_head"): math.nan},
        tokens=(TokenResult("p", (1,), (2,), "a", "b", (0,)),),
        logits=(logits,),
        observer=ObserverEffect(1e-3, 1, "logits"),
        missing={"x": "refused"},
        notes=("note",),
        dump="somewhere",
    )
    run.save(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    back = Comparison.load(tmp_path / "run.json")
    assert back.to_json() == run.to_json()
    assert back.first_bad.metrics.nan_actual == run.first_bad.metrics.nan_actual
    assert back.tokens == run.tokens
    assert back.observer.changed


def test_another_schema_version_is_refused():
    data = compared({}).to_json() | {"schema_version": 99}
    with pytest.raises(TraceError, match="comparison has schema version 99, this version reads 1"):
        Comparison.from_json(data)


def test_a_gates_result_is_no_comparison():
    with pytest.raises(TraceError, match=r"no comparison .*`ditto gate check` shows a gate's result"):
        Comparison.from_json({"schema": 1, "ok": True, "records": []})


def test_its_repr_is_one_line_with_the_verdict():
    assert "\n" not in repr(compared({}))
    text = repr(compared({(0, "lm_head"): 1.0}))
    assert text.startswith(
        "<Comparison: onnxruntime float16 against eager float32, 2 steps, 6 sites: engine diverges at lm"
    )


def test_a_quantized_engine_fails_by_its_logits_alone():
    info = type(ENGINE)("e", "onnxruntime", "int8")
    agreeing = measure_logits(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]]), dtype="float32")
    parting = measure_logits(torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 2.0]]), dtype="float32", step=1)
    fine = Comparison(info, REFERENCE, compared({}).results, logits=(agreeing,))
    assert fine
    bad = Comparison(info, REFERENCE, compared({}).results, logits=(agreeing, parting))
    with pytest.raises(AssertionError, match="engine diverges at the logits, step 1: kl_mean"):
        bad.assert_close()


def test_measured_errors_are_what_the_fixtures_say():
    assert measure(torch.full((2,), 1.5), torch.ones(2)).rel_l2 == pytest.approx(0.5)


def test_an_observer_effect_of_infinity_goes_through_json(tmp_path):
    run = replace(compared({}), observer=ObserverEffect(math.inf, 0, "logits"))
    run.save(tmp_path / "run.json")
    assert Comparison.load(tmp_path / "run.json").observer == run.observer


def test_nan_with_and_without_taps_is_no_observer_effect():
    found = Measured()
    observe(found, 0, {"logits": torch.tensor([1.0, math.nan])}, {"logits": torch.tensor([1.0, math.nan])})
    assert not found.observer.changed
    observe(found, 1, {"logits": torch.tensor([1.0, math.nan])}, {"logits": torch.tensor([1.0, 2.0])})
    assert (found.observer.rel_l2, found.observer.step) == (math.inf, 1)


def test_outputs_that_tapping_did_not_change_are_not_measured(monkeypatch):
    monkeypatch.delattr("ditto_core.stepping.lockstep.measure")
    found, logits = Measured(), torch.tensor([1.0, 2.0])
    observe(found, 3, {"logits": logits}, {"logits": logits.clone()})
    assert found.observer == ObserverEffect(0.0, 3, "logits")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema_version": 1}'])
def test_a_file_that_is_no_comparison_is_one_line(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(TraceError):
        Comparison.load(tmp_path / "run.json")


def test_a_text_in_the_place_of_a_number_is_one_line(tmp_path):
    whole = compared({(0, DOWN): 1e-3}).to_json()
    result = whole["results"][0]
    numbers = [(part, name) for part in (result["metrics"], result["verdict"], result) for name in part]
    numbers = [(part, name) for part, name in numbers if isinstance(part[name], float)]
    assert len(numbers) > 20
    for part, name in numbers:
        kept, part[name] = part[name], "much"
        (tmp_path / "run.json").write_text(json.dumps(whole))
        with pytest.raises(TraceError, match="'much' is no number"):
            Comparison.load(tmp_path / "run.json")
        part[name] = kept


@pytest.mark.parametrize(
    ("engine", "alike"),
    [
        ([0.0, -math.inf], True),
        ([0.0, -1e4], True),
        ([0.5, -1e4], False),
        ([-1e4, -1e4], False),
        ([math.nan, -1e4], False),
    ],
)
def test_masks_are_compared_as_what_they_hide_unless_the_engines_is_none(engine, alike):
    lowest = torch.finfo(torch.float32).min
    ours, theirs = (torch.tensor(values).reshape(1, 1, 1, 2) for values in (engine, [0.0, lowest]))
    found = Measured()
    comparer = Comparer([Tap("mask", "mask")], 0, {}, found, Tolerance())
    comparer.take_engine("mask", ours)
    comparer.take_reference("mask", theirs)
    comparer.flush()
    (result,) = found.results
    assert (result.metrics.rel_l2 == 0) is alike


@pytest.mark.parametrize("elements", [8, 1 << 12])
def test_a_reference_that_is_overwritten_later_in_its_step_was_compared_before(elements):
    found = Measured()
    comparer = Comparer([Tap("norm", "norm")], 0, {}, found, Tolerance())
    theirs = torch.ones(elements)
    comparer.take_engine("norm", theirs.clone())
    comparer.take_reference("norm", theirs)
    theirs.add_(1)
    comparer.flush()
    assert [result.metrics.max_abs for result in found.results] == [0.0]


def test_results_keep_the_order_of_the_sites_whether_they_wait_or_not():
    found = Measured()
    sites = {"small": 8, "large": 1 << 12, "another": 8, "last": 1 << 12}
    comparer = Comparer([Tap(site, site) for site in sites], 0, {}, found, Tolerance())
    for site, elements in sites.items():
        comparer.take_engine(site, torch.ones(elements))
        comparer.take_reference(site, torch.ones(elements))
    comparer.flush()
    assert [result.site for result in found.results] == [*sites]


def test_ids_that_a_dump_holds_as_floats_are_equal_or_not():
    """A float32 tolerance of 1.3e-6 would let ids of a large vocabulary pass for their neighbours."""
    found = Measured()
    tap = Tap("ids", "ids", dtype="int64")
    comparer = Comparer([tap], 0, {}, found, Tolerance())
    comparer.take_engine("ids", torch.tensor([[1_000_001]]))
    comparer.take_reference("ids", torch.tensor([[1_000_000.0]]))
    comparer.flush()
    (result,) = judge(found.results, Tolerance(), [tap], ENGINE)
    assert str(result.verdict) == "mismatched 1.0e+00 > 0.0e+00 (integers are equal or not)"
