"""One step of two sides: what only one of them has, class maps, logits of the last token, noise and near ties."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from ditto_core.compare.result import SiteResult
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.verdict import UNJUDGED
from ditto_core.sites import Tap
from ditto_core.stepping import measuring
from ditto_core.stepping.choices import Choices
from ditto_core.stepping.comparer import Comparer, same_tensor
from ditto_core.stepping.floor import Noise, lacks, of_roundings, read_floor, write_floor
from ditto_core.stepping.lockstep import run_once_before
from ditto_core.stepping.logits import LogitsOfStep
from ditto_core.stepping.measured import Measured
from ditto_core.stepping.measuring import judged_dtype
from ditto_core.stepping.ties import without_ties
from tests.unit.hand_made import measured

LOWEST = torch.finfo(torch.float32).min
IDS = {"input_ids": torch.tensor([[7, 8, 9]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
X = torch.linspace(-1, 1, 12).view(1, 3, 4)
HEAD = Tap("lm_head", "logits", axes=("batch", "length", ""))


def compared(taps=(), inputs=IDS, **options):
    found = Measured()
    return Comparer(taps, 0, inputs, found, Tolerance(), "float16", **options), found


class StandIn:
    """A session that gives the same taps and outputs at each step."""

    def __init__(self, taps, outputs):
        self.taps, self.outputs = taps, outputs

    def step(self, inputs, sink):
        for site, tensor in self.taps.items():
            sink(site, tensor)
        return self.outputs

    def start(self, rows): ...


def test_what_only_one_side_has_is_missing_with_its_side():
    mask = torch.tensor([[[[0.0, LOWEST]]]])
    taps = (Tap("a.b:in.mask", "m"), Tap("f.forward:12 add", "o"), Tap("c", "c"), Tap("late", "l"))
    comparer, found = compared(taps)
    for site, tensor in (("a.b:in.mask", mask), ("f.forward:12 add", X), ("c", X)):
        comparer.take_engine(site, tensor)
    comparer.take_reference("unknown", X)
    comparer.outputs = {"ours": X, "both": X}
    comparer.finish({"theirs": X, "both": X})
    assert found.missing == {
        "theirs": "the engine does not return this output",
        "ours": "the reference does not return this output",
        "c": "the reference did not compute it",
        "late": "the engine did not deliver it at step 0",
    }
    assert found.notes == [
        "a.b:in.mask is a mask that only the engine has; it is not compared",
        "f.forward:12 add is computed in the exported model alone; it is not compared",
    ]
    assert [(r.site, r.final) for r in found.results] == [("both", True)]


def test_a_recorded_reference_may_lack_outputs():
    comparer, found = compared()
    comparer.outputs = {"ours": X}
    comparer.finish({}, recorded=True)
    assert (found.missing, found.notes) == ({}, ["the reference has no output 'ours': it is not compared"])


def test_an_output_that_the_untapped_engine_lacks_is_missing():
    comparer, found = compared()
    comparer.outputs = {"y": X, "z": X}
    comparer.finish_untapped({"z": X}, {"y": X, "z": X})
    assert found.missing == {"y:untapped": "the untapped engine does not return this output"}
    assert found.results == []  # the same numbers were compared with taps


@pytest.mark.parametrize(("theirs", "judged_there"), [(X, True), (X + 1, False)])
def test_a_tap_stands_for_an_output_where_it_is_the_same_tensor_on_both_sides(theirs, judged_there):
    comparer, found = compared((HEAD,))
    comparer.outputs = {"logits": X}
    comparer.take_engine("lm_head", X.clone())
    comparer.take_noisy("lm_head", X + 1e-3)
    comparer.take_reference("lm_head", X)
    comparer.finish({"logits": theirs})
    assert [(r.site, r.final) for r in found.results] == (
        [("lm_head", True)] if judged_there else [("lm_head", False), ("logits", True)]
    )
    assert ("logits" in found.floor) is judged_there


def test_an_output_that_is_called_as_a_module_has_a_floor_of_its_own():
    comparer, found = compared((Tap("value", "value:value"),), {})
    column, row = X.view(12, 1), X.view(12)
    reference = StandIn({"value": column}, {"value": row})
    run_once_before(reference, {}, comparer)
    comparer.noisy_outputs = [{"value": row + 1e-2}]
    comparer.take_noisy("value", column + 1e-4)
    comparer.take_engine("value", column)
    comparer.outputs = {"value": row}
    comparer.take_reference("value", column)
    comparer.finish({"value": row})
    comparer.finish_untapped({"value": row + 1e-4}, {"value": row})
    assert found.missing == {}
    floors = {r.site: r.floor for r in found.results}
    assert floors["value"] == pytest.approx(floors["output:value"] / 100, rel=1e-3)
    assert floors["value:untapped"] == floors["output:value"]


def test_dimensions_of_an_output_have_the_names_that_are_known():
    comparer, found = compared(axes={"y": ("batch", "length", "")})
    comparer.outputs = {"y": X, "scalar": torch.tensor(1.0)}
    comparer.finish({"y": X + 1e-3, "scalar": torch.tensor(1.0)})
    by = {r.site: r.metrics for r in found.results}
    assert (len(by["y"].by_position), by["scalar"].by_row) == (3, ())


def test_logits_of_the_last_token_are_compared_with_the_last_of_all():
    comparer, found = compared((HEAD,))
    comparer.take_engine("lm_head", X[:, -1:])
    comparer.take_noisy("lm_head", X + 1e-3)
    comparer.take_reference("lm_head", X)
    comparer.flush()
    (result,) = found.results
    assert (result.metrics.count, result.metrics.max_abs) == (4, 0.0)
    assert found.notes == ["one side has the last token's logits only: the others' are not compared"]


def test_logits_of_other_shapes_are_two_shapes():
    comparer, found = compared((HEAD,))
    comparer.take_engine("lm_head", X[:, :2])
    comparer.take_reference("lm_head", X)
    comparer.flush()
    assert found.missing == {"lm_head": "shapes differ: actual [1, 2, 4], expected [1, 3, 4]"}


def test_what_padding_covers_whole_is_not_judged():
    inputs = {"input_ids": IDS["input_ids"], "attention_mask": torch.zeros(1, 3, dtype=torch.int64)}
    comparer, found = compared(inputs=inputs, axes={"hidden": ("batch", "length", "")})
    comparer.outputs = {"hidden": X + 1, "pooled": X}
    comparer.finish({"hidden": X, "pooled": X})
    assert {r.site: r.tied for r in found.results} == {"hidden": "padding covers all of it", "pooled": ""}


def test_a_random_reference_has_no_floor():
    comparer, found = compared((Tap("x", "x", axes=("batch", "length", "")),))
    comparer.take_engine("x", X)
    comparer.take_repeated("x", X + 1)
    comparer.take_noisy("x", X)
    comparer.take_reference("x", X)
    comparer.flush()
    assert found.random == {"x"}
    assert math.isnan(found.floor["x"][0].rel_l2)
    assert math.isnan(Noise.of_samples([Noise(1.0), Noise(math.nan)]).rel_l2)


@pytest.mark.parametrize(
    ("errors", "floor"),
    [
        ([3.0], 3.0),
        ([1.0, 8.0, 0.0, 4.0], 8.0),  # a single number: some rounding is nearly exact
        ([1.0, 8.0, 8.0, 8.0], 4.0),  # many numbers: all roundings lose the same
        ([5.0, 8.0, 8.0, 8.0], 5.0),  # never less than the reference's own
        ([1.0, math.inf, math.inf], math.inf),
        ([math.inf, 1.0, 1.0], math.inf),
    ],
)
def test_the_noise_of_several_roundings_leaves_room_for_luck_where_they_differ(errors, floor):
    assert of_roundings(errors) == floor


def test_each_row_and_the_largest_element_have_the_noise_of_their_own_samples():
    samples = [Noise(1.0, 0.0, (1.0, 0.0)), Noise(4.0, 2.0, (4.0, 6.0)), Noise(4.0, 3.0, (4.0, 0.0))]
    assert Noise.of_samples(samples) == Noise(2.0, 2.0, (2.0, 6.0))


def test_small_pairs_are_measured_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(measuring, "HELD", 20)
    taps = tuple(Tap(name, name) for name in "abc")
    comparer, found = compared(taps)
    for tap in taps:
        comparer.take_engine(tap.site, X)
        comparer.take_reference(tap.site, X)
    assert [r.site for r in found.results] == ["a", "b"]
    comparer.flush()
    assert len(found.results) == 3


def test_attention_scores_that_no_mask_made_are_compared_as_they_are():
    """Their largest number is of a mask's size, but none of them is hidden."""
    scores = torch.full((1, 1, 2, 3), 3e38)
    comparer, found = compared((Tap("scores", "scores"),))
    comparer.take_engine("scores", scores / 2)
    comparer.take_reference("scores", scores)
    comparer.flush()
    assert found.results[0].metrics.rel_l2 == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (X, X, True),
        (X, X.clone(), True),
        (X, X + 1, False),
        (X, None, False),
        (X, X.double(), False),
        (X, X.view(3, 4), False),
    ],
)
def test_tensors_are_the_same_by_their_numbers(first, second, same):
    assert same_tensor(first, second) is same


@pytest.mark.parametrize(
    ("actual", "expected", "dtype"),
    [
        (torch.float16, torch.float32, torch.float16),
        (torch.int64, torch.float32, torch.int64),
        (torch.float32, torch.int64, torch.int64),
        (torch.int8, torch.float32, torch.float32),
    ],
)
def test_ids_beside_floats_are_ids_and_bytes_are_quantized_numbers(actual, expected, dtype):
    assert judged_dtype(actual, expected) == dtype


def test_a_floor_that_was_changed_is_not_used_and_said(tmp_path):
    path, said = tmp_path / "floor.json", []
    write_floor(path, {"x": {0: Noise(1e-3, 1e-2, (0.1,))}})
    assert read_floor(path, said.append) == {"x": {0: Noise(1e-3, 1e-2, (0.1,))}}
    data = json.loads(path.read_text())
    data["floor"]["x"]["0"][0] = 1.0
    path.write_text(json.dumps(data))
    assert read_floor(path, said.append) is None
    assert len(said) == 1
    assert read_floor(tmp_path / "none.json", said.append) is None
    assert len(said) == 1


def test_scores_of_no_class_map_excuse_nothing():
    """One has another shape, one is of integers, one has other likeliest classes."""
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    expected, wrong = torch.tensor([1, 0]), torch.tensor([0, 0])
    outputs = {"flat": torch.zeros(5), "ids": torch.zeros(2, 2, dtype=torch.int64), "other": -scores, "scores": scores}
    floors = dict.fromkeys(("flat", "ids", "other"), 1.0)
    assert without_ties(wrong, expected, outputs, floors) is wrong
    assert torch.equal(without_ties(wrong, expected, outputs, {**floors, "scores": 1.0}), expected)


def test_a_router_of_another_shape_is_no_choice():
    choices = Choices(0, (1, 3), {})
    choices.take(Tap("gate", "gate", choice=1), torch.ones(2, 4), torch.ones(2, 4), (), 1e-3)
    choices.take(Tap("mlp", "mlp"), torch.ones(3, 4), torch.ones(3, 4), (), 1e-3)
    assert choices.left(Tap("mlp", "mlp", axes=("batch", "length", "")), X, None) is None


def test_a_router_without_a_usable_floor_excuses_nothing():
    router = Tap("gate", "gate", axes=("", ""), choice=1)
    comparer, found = compared((router,))
    comparer.take_engine("gate", torch.ones(3, 4))
    comparer.take_reference("gate", torch.ones(3, 4))
    comparer.flush()
    assert (found.tied, len(found.results)) == ({}, 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "measured"),
    [(X, X, 1), (X[:, :, :2], X, 0), (X.long(), X.long(), 0), (X[0, 0], X[0, 0], 0)],
)
def test_logits_are_measured_where_they_are_logits_of_one_shape(ours, theirs, measured):
    found = Measured()
    step = LogitsOfStep(0, found, "float32", None, None, generated=True, every_token=False)
    step.compare(ours, theirs)
    step.compare(ours, theirs)
    assert len(found.logits) == measured


def test_of_a_quantized_engine_the_logits_of_every_real_token_count():
    mask = torch.tensor([[0, 1, 1]])
    for given, positions in ((mask, 2), (None, 3), (torch.ones(2, 2), 3)):
        found = Measured()
        step = LogitsOfStep(0, found, "int8", None, given, generated=False, every_token=True)
        step.compare(X, X)
        assert found.logits[0].positions == positions


def test_the_prompt_has_a_perplexity_where_the_logits_of_all_its_tokens_are_there():
    ids, mask = torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.int64)
    for given, there in (((ids, mask), True), ((ids, mask[:, :2]), False), ((ids[:, :2], mask[:, :2]), False)):
        found = Measured()
        LogitsOfStep(0, found, "float32", *given, generated=True, every_token=False).compare(X, X)
        assert (found.logits[0].perplexity_actual is not None) is there


@pytest.mark.parametrize(
    ("site", "step", "floor", "count", "lacking"),
    [
        ("x", 0, 0.1, 8, False),
        ("x", 1, None, 8, True),
        ("x", 1, None, 0, False),
        ("x", 0, None, 8, True),
        ("other", 0, None, 8, False),
        ("other", 1, None, 8, True),
    ],
)
def test_a_kept_floor_lacks_other_steps_and_other_steps_of_its_sites(site, step, floor, count, lacking):
    """A site that it has at no step may be one that nothing in the engine's dtype computes."""
    result = SiteResult(step, site, 0, replace(measured(0.0), count=count), UNJUDGED, floor)
    assert lacks({"x": {0: Noise(0.1)}, "y": {0: Noise(0.2)}}, [result]) == lacking


def test_the_floor_of_integers_is_no_matter_of_rules():
    """It is kept, and another run may have none: two of four differ by one."""
    ids = torch.tensor([[1, 2, 3, 4]])
    found = Measured()
    rule = Tolerance.of({"ids": {"metric": "mismatched", "bound": 0.0, "atol": 5.0}})
    comparer = Comparer((Tap("ids", "i"),), 0, IDS, found, rule, "float16")
    comparer.take_engine("ids", ids)
    comparer.take_noisy("ids", ids + torch.tensor([0, 1, 1, 0]))
    comparer.take_reference("ids", ids)
    comparer.flush()
    assert found.floor["ids"][0].rel_l2 == 0.5
