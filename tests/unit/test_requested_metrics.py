"""Rules on what is measured only on request: bounds from below, percentiles, moved entries, functions of the user's.

Expected values are numpy's or worked out by hand; Polygraphy is asked where it has the same comparison.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from ditto_core.cli.compare import parse_rule as parse_text
from ditto_core.compare.bounds import Rule, parse_rule
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.dumps import compare_dumps
from ditto_core.compare.judging import judge
from ditto_core.compare.metrics import measure
from ditto_core.compare.requested import measure_requested
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.tolerance_files import load_tolerance, spelled
from ditto_core.errors import UsageError
from ditto_core.report.schema import comparison_schema
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.stepping.comparer import Comparer
from ditto_core.stepping.dumps import compare_offline
from ditto_core.stepping.measured import Measured

RANDOM = np.random.default_rng(0)


def value(metric, actual, expected, valid=None, **fields):
    actual, expected = (torch.as_tensor(side) for side in (actual, expected))
    rule = parse_rule("x", {"metric": metric, fields.pop("key", "bound"): 1.0, **fields})
    [(name, found)] = measure_requested([rule], measure(actual, expected, valid=valid), actual, expected, valid)
    assert name == rule.requested
    return found


def judged(table, actual, expected):
    """Judge tensors under the name x by a table of tolerances, as two dumps are."""
    actual, expected = (torch.as_tensor(side) for side in (actual, expected))
    metrics = measure(actual, expected)
    tolerance = Tolerance.of(table)
    requested = measure_requested(tolerance.requests(["x"], 0), metrics, actual, expected)
    return tolerance.judge(["x"], 0, replace(metrics, requested=requested), "float32")


@pytest.mark.parametrize("percent", ["0", "37.5", "50", "75", "99.9", "100"])
def test_percentiles_are_numpys(percent):
    a, b = RANDOM.normal(size=(2, 40, 25))
    assert value(f"abs_p{percent}", a, b) == np.percentile(np.abs(a - b), float(percent))
    assert value(f"rel_p{percent}", a, b) == np.percentile(np.abs(a - b) / np.abs(b), float(percent))


def test_percentiles_leave_padding_out_and_know_infinite_relative_errors():
    a, b = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert value("abs_p100", a, b, torch.tensor([[True, True, False]])) == 1.0
    assert value("rel_p50", a, b) == 1.0
    assert value("rel_p75", a, b) == math.inf
    assert value("abs_p50", torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize(
    ("ours", "theirs", "places"),
    [
        ([0, 1, 2], [0, 1, 2], 0),
        ([0, 1, 2], [1, 0, 2], 1),
        ([0, 1, 2], [1, 2, 0], 2),
        ([5, 6, 7, 9], [5, 6, 7, 8], 1),  # the last left the list
        ([5, 6, 9, 7], [5, 6, 7, 8], 2),  # 9 entered it at the second last place
        ([5, 9, 8, 6], [5, 6, 7, 8], 3),
        ([9, 6, 7, 8], [5, 6, 7, 8], math.inf),  # the best is missing
        ([5, 5, 6, 7], [5, 6, 7, 8], 1),
        ([5], [6], math.inf),
    ],
)
def test_ids_of_a_list_moved_by_places(ours, theirs, places):
    assert value("moved", [ours, ours], [theirs, theirs]) == places


def test_ids_that_doubles_cannot_hold_are_told_apart():
    assert value("moved", [[2**60 + 1]], [[2**60]]) == math.inf


def test_rows_of_floats_moved_by_places():
    boxes = torch.tensor([[10.0, 20.0, 0.9], [11.0, 25.0, 0.8], [40.0, 60.0, 0.7]])
    swapped = boxes[[0, 2, 1]] * 1.0001
    assert value("moved", swapped[None], boxes[None], rtol=1e-3, atol=0.0) == 1
    assert value("moved", boxes[[2, 0, 1]], boxes, rtol=1e-3, atol=0.0) == 2
    assert value("moved", boxes + 1, boxes, rtol=1e-3, atol=0.0) == math.inf


@pytest.mark.parametrize(("ours", "theirs"), [([0, 1, 2], [1, 0, 2]), ([0, 1, 2], [1, 2, 0]), ([0, 1, 2], [0, 1, 2])])
@pytest.mark.parametrize("places", [0, 1, 2])
def test_polygraphy_agrees_on_moved_ids(ours, theirs, places):
    comparator = pytest.importorskip("polygraphy.comparator")
    padded = [[*side, 8, 9] for side in (theirs, ours)]  # it leaves the last ones out
    sides = [comparator.IterationResult({"out": np.array([side])}) for side in padded]
    verdict = comparator.IndicesCompareFunc(index_tolerance=places)(*sides)
    assert bool(verdict["out"]) == judged({"x": {"metric": "moved", "bound": places}}, *padded[::-1]).ok


@pytest.mark.parametrize("change", [0.0, 1e-5, 5e-4, 2e-2])
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_polygraphy_agrees_on_absolute_or_relative(change, size):
    comparator = pytest.importorskip("polygraphy.comparator")
    b = np.linspace(size, 2 * size, 12)
    a = b + change
    results = [comparator.IterationResult({"out": side}) for side in (a, b)]
    theirs = bool(comparator.SimpleCompareFunc(rtol=1e-3, atol=1e-4)(*results)["out"])
    assert judged({"x": {"metric": "outside_both", "bound": 0, "rtol": 1e-3, "atol": 1e-4}}, a, b).ok == theirs


@pytest.mark.parametrize(
    ("metric", "name", "bound"),
    [("cosine", "CosineSimilarity", 0.995), ("snr_db", "Snr", 20.0), ("psnr_db", "Psnr", 20.0)],
)
@pytest.mark.parametrize("noise", [1e-3, 0.05, 0.5])
def test_polygraphy_agrees_on_bounds_from_below(metric, name, bound, noise):
    comparator = pytest.importorskip("polygraphy.comparator")
    b = RANDOM.uniform(0.5, 1.5, size=400)
    a = b + noise * RANDOM.normal(size=400)
    results = [comparator.IterationResult({"out": side}) for side in (b, a)]
    argument = {"CosineSimilarity": "cosine_similarity"}.get(name, name.lower())
    theirs = getattr(comparator, f"{name}CompareFunc")(**{f"{argument}_threshold": bound})(*results)["out"]
    ours = judged({"x": {"metric": metric, "at_least": bound}}, a, b)
    assert ours.ok == bool(theirs) == (noise < 0.06)
    assert ours.value == pytest.approx(getattr(theirs, argument), rel=1e-6)


def test_a_bound_from_below_says_so_and_its_margin_is_above_one_where_it_fails():
    verdict = judged({"x": {"metric": "cosine", "at_least": 0.9}}, [1.0, 1.0], [1.0, 0.0])
    assert not verdict.ok
    assert verdict.margin == pytest.approx(0.9 * math.sqrt(2))
    assert str(verdict).startswith("cosine 0.70710678 < 0.9 (")
    assert judged({"x": {"metric": "snr_db", "at_least": 40}}, [1.0], [1.0]).margin == 0.0
    opposite = judged({"x": {"metric": "cosine", "at_least": 0}}, [-1.0], [1.0])
    assert (opposite.ok, opposite.margin) == (False, math.inf)


@pytest.mark.parametrize("table", [{"metric": "cosine", "at_least": 0.1}, {"metric": "abs_p50", "bound": 1e9}])
def test_a_nan_of_one_side_fails_them_all(table):
    assert not judged({"x": table}, [1.0, 2.0, math.nan], [1.0, 2.0, 3.0]).ok
    assert not judged({"x": table}, [1.0, 2.0, math.inf], [1.0, 2.0, 3.0]).ok


def spread(actual, expected):
    return (actual - expected).std()


def sums(tensor):
    return tensor.sum(-1)


def none_left(tensor):
    return tensor[tensor > math.inf]


def unfit(tensor):
    return tensor[: int(tensor[0])]


def broken(*tensors):
    raise RuntimeError("no such kernel")


def words(actual, expected):
    return "much"


class Nearest:
    larger = 1.0

    def __call__(self, actual, expected):
        return self.larger


def test_a_function_of_the_users_is_a_metric_from_above_or_below():
    a, b = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 1.0, 1.0])
    found = judged({"x": {"metric": spread, "bound": 1.0}}, a, b)
    assert (found.ok, found.value) == (False, pytest.approx(float(np.std([0, 1, 3], ddof=1))))
    assert found.metric == f"{__name__}:spread"
    assert judged({"x": {"metric": Nearest(), "at_least": 0.5}}, a, b).ok
    assert not judged({"x": {"metric": lambda a, b: math.nan, "at_least": 0.5}}, a, b).ok


def test_a_function_is_found_by_its_module_or_entry_point(tmp_path, monkeypatch):
    (tmp_path / "house_metrics.py").write_text("def worst(a, b):\n    return float((a - b).abs().max())\nspare = 1\n")
    folder = tmp_path / "house-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[ditto_core.metrics]\nhouse_worst = house_metrics:worst\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("house_metrics:worst", "house_worst"):
        assert value(name, [1.0, 5.0], [1.0, 2.0]) == 3.0
    for name in ("house_metrics:spare", "house_metrics:wrost", "no_such_module:worst"):
        with pytest.raises(UsageError, match=name):
            value(name, [1.0], [1.0])
    monkeypatch.undo()
    with pytest.raises(UsageError, match="house_worst"):
        Rule("x", 1.0, metric="house_worst")


def test_tensors_pass_through_a_preparation_before_any_metric():
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 1.0], [3.0, 4.0]])
    assert judged({"x": {"prepare": sums, "bound": 0.0}}, a, b).ok
    found = judged({"x": {"prepare": sums, "metric": "abs_p100", "bound": 0.5}}, a + 1, b)
    assert (found.ok, found.value, found.metric) == (False, 2.0, f"abs_p100 of {__name__}:sums")
    both = judged({"x": [{"bound": 1.0}, {"prepare": sums, "bound": 1e-3}]}, a + 1, b)
    assert (both.ok, both.metric) == (False, f"rel_l2 of {__name__}:sums")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"metric": ":spread", "bound": 1}, ":spread"),
        ({"prepare": unfit, "bound": 1}, "unfit"),
        ({"prepare": none_left, "bound": 1}, "none_left leaves no element of either side for 'x'"),
        ({"prepare": broken, "bound": 1}, "no such kernel"),
        ({"metric": broken, "bound": 1}, "no such kernel"),
        ({"metric": words, "bound": 1}, "str"),
        ({"metric": "cosine", "bound": 0.9}, "at_least"),
        ({"metric": "rel_l2", "at_least": 0.9}, "'bound'"),
        ({"metric": "cosine", "at_least": 1.5}, "1.5"),
        ({"metric": "cosine", "at_least": 0.5, "bound": 0.5}, "bound and at_least"),
        ({"metric": "cosine", "at_least": True}, "'bound'"),
        ({"metric": "abs_p101", "bound": 1}, "abs_p101"),
        ({"metric": "kl_mean", "prepare": sums, "bound": 1}, "prepare"),
        ({"metric": 5, "bound": 1}, "5"),
    ],
)
def test_what_cannot_be_is_one_line(table, told):
    with pytest.raises(UsageError, match=told) as error:
        judged({"x": table}, [2.0, 2.0], [1.0, 2.0])
    assert "\n" not in str(error.value)


def test_the_command_line_and_a_file_say_the_same():
    assert parse_text("cosine:**>=0.999") == Rule("**", 0.999, metric="cosine", at_least=True)
    assert parse_text("abs_p75:a.b:in=0.1") == Rule("a.b:in", 0.1, metric="abs_p75")
    assert parse_text("house.metrics:worst:a.b=3") == Rule("a.b", 3.0, metric="house.metrics:worst")
    assert parse_text("model.layers.0.self_attn:q_rope=1e-3") == Rule("model.layers.0.self_attn:q_rope", 1e-3)
    assert parse_text("max_abs:a.b:in=1e-3") == Rule("a.b:in", 1e-3, metric="max_abs")


def test_rules_survive_a_file_of_tolerances(tmp_path):
    table = {"metric": "cosine", "at_least": 0.99, "prepare": "house:sums"}
    (tmp_path / "t.toml").write_text(f'[tolerances]\n"x" = {spelled(parse_rule("x", table))}\n')
    assert load_tolerance(tmp_path / "t.toml").rules == Tolerance.of({"x": table}).rules


def test_validate_fails_what_is_not_finite_on_both_sides(tmp_path):
    tensor = torch.tensor([1.0, math.inf, 3.0])
    for name in ("a", "b"):
        save_file({"x": tensor, "y": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    pairs = compare_dumps(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert compare_offline(pairs, tolerance=Tolerance.of({"**": math.inf}))
    found = compare_offline(pairs, tolerance=Tolerance.of({"**": math.inf, "finite": True}))
    assert [(r.site, r.verdict.metric, r.verdict.value) for r in found.failures] == [("x", "nonfinite", 2.0)]


def test_a_comparison_keeps_what_was_asked_for_in_its_json(tmp_path):
    save_file({"x": torch.tensor([1.0, 2.0])}, tmp_path / "a.safetensors")
    save_file({"x": torch.tensor([1.0, 1.0])}, tmp_path / "b.safetensors")
    tolerance = Tolerance.of({"x": [{"metric": spread, "bound": 3.0}, {"metric": "cosine", "at_least": 0.5}]})
    pairs = compare_dumps(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    found = compare_offline(pairs, tolerance=tolerance)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    Draft202012Validator(comparison_schema()).validate(data)
    again = Comparison.from_json(data)
    assert again.results == found.results
    assert again.results[0].metrics.requested == ((f"{__name__}:spread", pytest.approx(math.sqrt(0.5))),)
    assert again.tolerance.rules[0].judge(again.results[0].metrics).ok
    with pytest.raises(UsageError, match="abs_p12"):
        Rule("x", 1.0, metric="abs_p12").judge(again.results[0].metrics)


def test_a_deployed_output_is_measured_by_a_rule_for_the_tap_of_the_same_output():
    taps = (Tap("lm_head", "logits", axes=("batch", "")),)
    tolerance = Tolerance.of({"lm_head": {"metric": "abs_p100", "bound": 0.5}})
    found = Measured()
    comparer = Comparer(taps, 0, {}, found, tolerance, "float32")
    expected = torch.ones(2, 3)
    comparer.outputs = {"logits": expected.clone()}
    comparer.take_engine("lm_head", expected.clone())
    comparer.take_reference("lm_head", expected)
    comparer.finish({"logits": expected})
    comparer.finish_untapped({"logits": expected + 1}, {"logits": expected})
    info = SessionInfo("engine", "made", "float32")
    verdicts = {r.site: (r.verdict.metric, r.verdict.value) for r in judge(found.results, tolerance, taps, info)}
    assert verdicts == {"lm_head": ("abs_p100", 0.0), "logits:untapped": ("abs_p100", 1.0)}
