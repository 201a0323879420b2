"""Tolerances from files and from calibration. Measurements are made by hand: no engine runs here."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ditto_core.compare.bounds import LOGITS_METRICS, METRICS, QUALITIES, Rule, is_metric, parse_rules
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.judging import judge, judge_logits
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import SiteResult
from ditto_core.compare.tokens import measure_logits
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.tolerance_files import calibrate, load_tolerance, project_tolerance
from ditto_core.compare.verdict import DIVERGED, EXPLAINED, WITHIN, Verdict
from ditto_core.errors import SelectorError, UsageError
from ditto_core.session import KernelProperty, SessionInfo
from ditto_core.sites import Tap

UNJUDGED = Verdict(WITHIN, "rel_l2", 0.0, 0.0, "")
INFO = SessionInfo("hand made", "none", "float16")


def off_by(error):
    """Metrics whose rel-L2 is ``error``: 1 + error against 1 in float64."""
    return measure(torch.full((64,), 1 + error, dtype=torch.float64), torch.ones(64, dtype=torch.float64))


def comparison(errors, tolerance=None, info=INFO, floor=1e-3):
    results = [SiteResult(step, site, i, off_by(e), UNJUDGED, floor) for i, (site, step, e) in enumerate(errors)]
    tolerance = tolerance or Tolerance()
    return Comparison(info, INFO, judge(results, tolerance, (), info), tolerance)


def test_the_bound_is_the_factor_times_the_floor():
    found = comparison([("a", 0, 3.9e-3), ("b", 0, 4.1e-3)])
    assert [r.verdict.status for r in sorted(found.results, key=lambda r: r.order)] == [WITHIN, DIVERGED]
    assert found.first_bad.verdict.rule == "4 x noise floor 1.0e-03"
    assert found.first_bad.verdict.margin == pytest.approx(4.1 / 4)


def test_a_floor_that_was_small_by_chance_counts_as_the_usual_one():
    floors = [1e-3, 1e-3, 1e-6]
    results = [SiteResult(s + 1, "a", 0, off_by(2e-3), UNJUDGED, f) for s, f in enumerate(floors)]
    assert all(r.verdict.ok for r in judge(results, Tolerance(), (), INFO))


def test_a_measured_kernel_property_explains_what_exceeds_the_floor_in_its_phase_only():
    kernel = KernelProperty("float16 accumulation", 5.0, "probe 1.0e-03, rounding alone 2.1e-04", "prefill")
    info = SessionInfo("engine", "tensorrt", "float16", kernels=(kernel,))
    found = comparison([("a", 0, 8e-3), ("a", 1, 8e-3), ("b", 0, 11e-3)], info=info)
    by = {(r.site, r.step): r.verdict for r in found.results}
    assert by["a", 0].status == EXPLAINED
    assert "float16 accumulation: probe 1.0e-03" in by["a", 0].rule
    assert by["a", 1].status == DIVERGED
    assert by["b", 0].status == DIVERGED


def test_a_rule_beats_the_floor_and_a_later_rule_an_earlier_one():
    rules = {"**": 1e-4, "a": {"bound": 1.0, "reason": "known"}, "b": {"bound": 2e-3, "step": 1}}
    found = comparison([("a", 0, 0.5), ("b", 0, 1e-3), ("b", 1, 1e-3)], Tolerance.of(rules))
    by = {(r.site, r.step): r.verdict for r in found.results}
    assert by["a", 0].status == EXPLAINED
    assert by["a", 0].rule == "rule 'a': known"
    assert by["b", 0].status == DIVERGED
    assert by["b", 1].status == WITHIN


def test_max_mismatch_ratio_allows_a_share_of_elements():
    actual = torch.ones(1000)
    actual[:3] += 1
    rule = Tolerance.of({"**": {"max_mismatch_ratio": 0.003, "rtol": 0.1, "atol": 0.0}})
    metrics = measure(actual, torch.ones(1000), rtol=0.1, atol=0.0)
    assert metrics.mismatched == 3
    assert rule.judge(("x",), 0, metrics, "float32").ok
    tight = Tolerance.of({"**": {"max_mismatch_ratio": 0.002}})
    assert not tight.judge(("x",), 0, metrics, "float32").ok


def test_a_quantized_engine_is_judged_by_its_logits():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    noisy = logits + 0.5 * torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    none = Tolerance()
    good, bad = (list(judge_logits(measure_logits(a, logits, dtype="float32"), "int8", none)) for a in (logits, noisy))
    assert all(v.ok for v in good)
    assert not any(v.ok for v in bad)
    assert [v.metric for v in bad] == ["kl_mean", "top1_disagreement"]
    assert Tolerance().judge(("x",), 0, off_by(0.3), "int8").status == EXPLAINED
    assert not list(judge_logits(measure_logits(logits, logits, dtype="float32"), "float32", none))


@pytest.mark.parametrize("wrong", [5, 7])
def test_a_share_of_other_tokens_that_is_just_the_bound_passes(wrong):
    expected = torch.tensor([[1.0, 0.0]]).repeat(100, 1)
    actual = torch.cat([expected[:wrong].flip(1), expected[wrong:]])
    metrics = measure_logits(actual, expected, dtype="float32")
    rule = {"logits": {"metric": "top1_disagreement", "bound": wrong / 100}}
    (verdict,) = judge_logits(metrics, "float32", Tolerance.of(rule))
    assert verdict.ok
    assert verdict.value == wrong / 100
    by_table = {v.metric: v for v in judge_logits(metrics, {5: "int8", 7: "q5"}[wrong], Tolerance())}
    assert by_table["top1_disagreement"].ok


def test_rules_about_logits_override_the_table_and_leave_their_tensor_alone():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    noisy = logits + 0.5 * torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    metrics = measure_logits(noisy, logits, dtype="float32")
    share = 1 - metrics.top1_agreement
    rules = [{"metric": "kl_mean", "bound": 2 * metrics.kl_mean, "reason": "4 bits"}]
    rules += [{"metric": "top1_disagreement", "bound": share / 2}, {"metric": "kl_max", "bound": 9, "step": 1}]
    tolerance = Tolerance.of({"lm_head": rules, "logits": 1e-3})
    first = list(judge_logits(metrics, "int8", tolerance, ("logits", "lm_head")))
    assert [(v.metric, v.status) for v in first] == [("kl_mean", EXPLAINED), ("top1_disagreement", DIVERGED)]
    assert str(first[0]).endswith("(rule 'lm_head': 4 bits)")
    second = list(judge_logits(replace(metrics, step=1), "float32", tolerance, ("logits", "lm_head")))
    assert [v.metric for v in second] == ["kl_mean", "kl_max", "top1_disagreement"]
    assert tolerance.rules_for(("lm_head",), 0) == ()
    assert [rule.bound for rule in tolerance.rules_for(("logits",), 0)] == [1e-3]
    assert tolerance.on_logits().rules == tolerance.rules[:3]
    tolerance.check(["logits"], ["logits", "lm_head"])
    with pytest.raises(SelectorError, match="lm_head"):
        tolerance.check(["logits", "lm_head"], [])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": {"bnd": 1}}, r"has no field 'bnd'; did you mean 'bound'"),
        ({"a": {"metric": "rel_l2"}}, "has no 'bound'"),
        ({"a": {"bound": 2, "metric": "top1_disagreement"}}, "expected a share from 0 to 1"),
        ({"a": []}, "is an empty list, expected bounds"),
        ({"a": [1e-3, "x"]}, "'x', expected a number or a table"),
        ({"a": {"bound": 1, "metric": "rel_l1"}}, r"no tolerance on 'rel_l1' can be set.*did you mean 'rel_l2'"),
        ({"a": -1.0}, r"is -1\.0, expected a number of 0 or more"),
        ({"a": "x"}, "expected a number or a table"),
        ({"a": {"bound": True}}, "has no 'bound'"),
        ({"a": {"bound": 1, "step": "0"}}, "has step '0', expected a whole number of 0 or more"),
        ({"a": {"bound": 1, "step": -1}}, "has step -1, expected"),
        ({"a": {"bound": 1, "rtol": "x"}}, "has rtol 'x', expected a number of 0 or more"),
        ({"a": {"bound": 1, "atol": float("nan")}}, "has atol nan, expected a number of 0 or more"),
        ({"a": {"bound": 1, "reason": 3}}, "has reason 3, expected a text"),
        ({"a": {"max_mismatch_ratio": 5}}, "is 5, expected a share from 0 to 1"),
        ({"a": {"max_mismatch_ratio": 0.1, "bound": 1}}, "has max_mismatch_ratio and bound, expected one"),
        ({"factor": 0}, "the tolerance factor is 0"),
        ("x", "a tolerance is a number or a table"),
    ],
)
def test_bad_rules_are_one_line(table, message):
    with pytest.raises(UsageError, match=message):
        Tolerance.of(table)


def test_rules_come_from_the_nearest_pyproject(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.ditto_core.tolerances]\nfactor = 5\n"a.*" = 1e-2\n')
    (tmp_path / "sub").mkdir()
    found = project_tolerance(tmp_path / "sub")
    assert (found.factor, found.rules[0].selector, found.rules[0].bound) == (5.0, "a.*", 1e-2)


def test_the_inner_tolerance_overrides_the_project_but_keeps_its_factor():
    merged = Tolerance.of({"a": 1.0}).over(Tolerance.of({"factor": 6, "a": 2.0}))
    assert merged.factor == 6
    assert [rule.bound for rule in merged.rules_for(("a",), 0)] == [1.0]


def test_every_bound_of_a_list_holds_and_a_later_table_overrides_the_list():
    several = [1e-3, {"metric": "max_abs", "bound": 0.05}, {"metric": "kl_mean", "bound": 1}, {"bound": 0.5, "step": 1}]
    tolerance = Tolerance.of({"a": several})
    assert comparison([("a", 0, 9e-4)], tolerance)
    wide = comparison([("a", 0, 2e-3)], tolerance)
    assert str(wide.first_bad.verdict) == "rel_l2 2.0e-03 > 1.0e-03 (rule 'a')"
    late = comparison([("a", 1, 0.04), ("a", 1, 0.06)], tolerance)
    assert [r.verdict.metric for r in late.results] == ["max_abs", "max_abs"]
    assert [r.ok for r in late.results] == [True, False]
    assert comparison([("a", 0, 0.2)], Tolerance.of({"a": {"metric": "max_abs", "bound": 0.3}}).over(tolerance))
    assert Tolerance.from_json(tolerance.to_json()).rules_for(("a",), 0) == tolerance.rules_for(("a",), 0) != ()


def test_the_elementwise_tolerance_of_any_bound_of_a_list_is_measured_by():
    tolerance = Tolerance.of({"a": [{"max_mismatch_ratio": 0, "rtol": 0.1}, 1e-3]})
    assert tolerance.elementwise(("a",), 0) == (0.1, None)
    assert tolerance.elementwise(("b",), 0) == (None, None)


def test_calibration_writes_one_rule_for_all_layers_and_reads_back(tmp_path):
    path = tmp_path / "rules.toml"
    found = comparison([("model.layers.0.mlp", 0, 1e-3), ("model.layers.11.mlp", 0, 3e-3), ("norm", 0, 1e-3)])
    assert calibrate([found], path) == 2
    rules = {r.selector: r.bound for r in load_tolerance(path).rules}
    assert rules == pytest.approx({"model.layers.*.mlp": 6e-3, "norm": 2e-3}, rel=1e-3)
    assert "review" in path.read_text()
    assert bool(found.judged(load_tolerance(path)))


def test_calibration_refuses_a_broken_engine(tmp_path):
    with pytest.raises(UsageError, match="not calibrated: a, step 0 diverges"):
        calibrate([comparison([("a", 0, 0.5)])], tmp_path / "rules.toml")
    unjudged = comparison([("a", 0, 1e-3), ("b", 0, 0.9)], floor=0.3)
    output = replace(unjudged, results=tuple(replace(r, final=r.site == "b") for r in unjudged.results))
    with pytest.raises(UsageError, match="not calibrated: the output b, step 0, could not be judged"):
        calibrate([output], tmp_path / "rules.toml")
    assert not (tmp_path / "rules.toml").exists()


def test_calibration_takes_no_bound_from_what_could_not_be_judged(tmp_path):
    assert calibrate([comparison([("a", 0, 1e-3), ("b", 0, 0.9)], floor=0.3)], tmp_path / "rules.toml") == 1
    assert [rule.selector for rule in load_tolerance(tmp_path / "rules.toml").rules] == ["a"]


def test_calibration_leaves_what_a_person_wrote(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(
        """[tolerances]
factor = 7.0
"logits" = [{ bound = 0.01, metric = "kl_mean" }, { bound = 0.2, metric = "top1_disagreement" }]
"a" = { bound = 8, metric = "max_ulp", reason = "the \\"fused\\" kernel", step = 0 }
"b" = { max_mismatch_ratio = 1e-4, rtol = 1e-2, atol = 0.0 }
"c" = 1e-9
"new" = { bound = 0.3, metric = "kl_max" }
"other" = 0.123
"""
    )
    before = load_tolerance(path)
    assert calibrate([comparison([("a", 0, 1e-3), ("b", 0, 1e-3), ("c", 0, 1e-3), ("new", 0, 1e-3)])], path) == 6
    after = load_tolerance(path)
    assert after.factor == 7.0
    assert after.rules[:4] == before.rules[:4]
    assert after.rules[5] == before.rules[5]
    assert [r.selector for r in after.rules[4:]] == ["c", "new", "new", "other"]
    assert [r.bound for r in after.rules[4:]] == pytest.approx([2e-3, 0.3, 2e-3, 0.123], rel=1e-3)


def test_calibration_gives_integers_no_room(tmp_path):
    found = comparison([("ids", 0, 0.0), ("a", 0, 1e-3)])
    calibrate([replace(found, taps=(Tap("ids", "ids", dtype="int64"),))], tmp_path / "rules.toml")
    assert [r.selector for r in load_tolerance(tmp_path / "rules.toml").rules] == ["a"]


def test_calibration_refuses_a_quantized_engine_whose_logits_diverge(tmp_path):
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    found = comparison([("a", 0, 1e-3)], info=SessionInfo("engine", "none", "int8"))
    found = replace(found, logits=(measure_logits(logits.flip(-1), logits, dtype="float32"),))
    with pytest.raises(UsageError, match="not calibrated: the logits diverge, step 0: kl_mean"):
        calibrate([found], tmp_path / "rules.toml")


@pytest.mark.parametrize(("percent", "known"), [("100", True), ("99.9", True), ("101", False)])
def test_a_percentile_is_at_most_100(percent, known):
    assert is_metric(f"abs_p{percent}") is known
    assert not is_metric(None)


def test_a_rule_of_a_quality_is_a_least_number():
    (rule,) = parse_rules("x", {"metric": "cosine", "at_least": 0.9})
    assert (rule.bound, rule.at_least, rule.also) == (0.9, True, False)
    assert [rule.also for rule in parse_rules("x", [1, 2])] == [False, True]
    with pytest.raises(UsageError, match="expected 'at_least'"):
        Rule("x", 0.9, "cosine")
    with pytest.raises(UsageError, match="expected 'bound'"):
        Rule("x", 0.9, "max_abs", at_least=True)


def test_the_page_lists_every_metric_that_a_rule_may_bound():
    page = (Path(__file__).parents[2] / "docs/tolerances.md").read_text()
    (listed,) = re.findall(r"^Metrics: (.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", listed)) - {"logits", "at_least"} == {*METRICS, *QUALITIES, *LOGITS_METRICS}
