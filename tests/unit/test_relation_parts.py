"""Relations on the eager model, whose hooks can break each of them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from ditto_core.backends.eager import EagerSession
from ditto_core.compare.tolerance import Tolerance
from ditto_core.errors import RunError, UsageError
from ditto_core.model.loading import load_model
from ditto_core.pair import relating
from ditto_core.profile import ShapeProfile
from ditto_core.relations import BROKEN, InputRelations, Relations, Terms, chunked_prefill, row_in_batch, same_bits
from ditto_core.relations.checks import sizes, steps_to
from ditto_core.relations.feed import Captured, capture, differing_bits, feed, full_width
from ditto_core.relations.inputs import OneStep, row_count
from ditto_core.relations.result import Side, relate
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec, ModelSource
from tests.models import llama

IDS = [3, 40, 5, 61, 7, 82, 9, 110, 11, 132, 13, 154]
MLP, HEAD = "model.layers.0.mlp", "lm_head"
TAPS = (Tap(MLP, "mlp", axes=("batch", "length", "")), Tap(HEAD, "logits", axes=("batch", "length", "")))
SMALL = ShapeProfile.parse({"batch": (1, 1, 2), "length": (1, 4, 6), "past": (0, 2, 6)})
INFO = SessionInfo("stand-in", "stand-in", "float32")
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def model():
    return load_model(ModelSource.of(llama))


@pytest.fixture
def session(model):
    return EagerSession(model, TAPS, dtype="float32")


class Odd(EagerSession):
    """The eager model with a fault: ``fault(inputs, outputs)`` returns other outputs."""

    fault = staticmethod(lambda inputs, outputs: outputs)

    def step(self, inputs, sink):
        return self.fault(inputs, super().step(inputs, sink))


def odd(model, fault, taps=TAPS[:1]):
    session = Odd(model, taps, dtype="float32")
    session.fault = fault
    return session


def test_every_relation_holds_for_eager_beside_its_own_noise(session, model):
    noise = EagerSession(model, TAPS, dtype="float64"), EagerSession(model, TAPS, dtype="float32")
    found = Relations(session, noise=noise, reference=noise[0], vocab_size=256).assert_hold(IDS)
    assert len(found) == 7
    assert all("noise floor" in r.verdict.rule for r in found[0].comparison)
    assert str(found[0]).startswith("prefill = single steps: holds, ")
    found[0].assert_holds()
    assert found[0].to_json()["first"] is None


def test_shapes_agree_with_rows_alone_and_with_the_reference(session, model):
    alone = Relations(session, Terms(profile=SMALL), longest=8).assert_shapes(IDS)
    beside = Relations(session, Terms(profile=SMALL), reference=EagerSession(model, TAPS, dtype="float64"), longest=8)
    assert len(alone) == len(beside.assert_shapes(IDS)) == len(sizes(SMALL, 8))
    assert sizes(SMALL)[:3] == [(1, 1, 0), (1, 4, 2), (2, 6, 6)]


def test_shapes_need_a_profile_with_steps_to_each_size(session):
    with pytest.raises(UsageError, match="no profile given"):
        Relations(session).check_shapes(IDS)
    narrow = ShapeProfile.parse({"batch": (1, 1, 1), "length": (4, 4, 4), "past": (0, 4, 4)})
    with pytest.raises(UsageError, match="the profile has no steps to 4 tokens after 2"):
        steps_to(2, 4, narrow)


def test_a_broken_relation_names_site_row_position_and_step(model):
    def wrong_when_decoding(inputs, outputs):
        return {"logits": outputs["logits"] + (inputs["input_ids"].shape[1] == 1)}

    relations = Relations(odd(model, wrong_when_decoding), Terms(Tolerance.of(1e-3)))
    with pytest.raises(AssertionError, match="1 of 1 relations are broken"):
        relations.assert_hold(IDS, "prefill_equals_steps")
    (broken,) = relations.check(IDS, "prefill_equals_steps")
    assert (broken.status, broken.first.site, broken.first.position, broken.first.step) == (BROKEN, "logits", 0, 0)
    assert broken.to_json()["first"]["verdict"]["status"] == "diverged"
    with pytest.raises(AssertionError, match=r"broken at logits, row 0, position 0 \(step 0\)"):
        broken.assert_holds()


def test_a_run_that_does_not_repeat_itself_breaks_the_same_bits(model):
    noise = iter(range(100))
    broken = same_bits(odd(model, lambda inputs, outputs: {"logits": outputs["logits"] + next(noise)}), IDS)
    assert (broken.status, broken.first.verdict.metric) == (BROKEN, "differing elements")
    assert broken.to_json()["bits"]["logits"] > 0


def test_an_output_of_one_of_two_runs_is_not_comparable(model):
    first = iter([True])
    gone = odd(model, lambda inputs, outputs: outputs if next(first, False) else {})
    found = same_bits(gone, IDS[:1])
    assert not found
    assert str(found).endswith("not comparable at logits: delivered by one of the two runs only")
    found.comparison.missing.clear()
    assert found.first is None


def test_two_shapes_of_one_site_are_said_and_a_side_of_nothing_too():
    def side(tensors):
        captured = Captured(tensors, dict.fromkeys(tensors, ("batch", "length", "")))
        return Side(INFO, captured, OneStep("by hand"))

    found = relate("r", side({"x": torch.ones(1, 2, 3)}), side({"x": torch.ones(1, 2, 4)}), ())
    assert str(found) == "r: not comparable at x: shapes differ: actual [1, 2, 3], expected [1, 2, 4]"
    nothing = relate("r", side({}), side({}), ())
    assert str(nothing).startswith("r: nothing was compared")
    logits = relate("r", side({"logits": torch.ones(1, 2, 3)}), side({"logits": torch.ones(1, 3, 3)}), ())
    assert logits.comparison.logits == ()
    rule = Tolerance.of({"x": {"metric": "max_abs", "bound": 0.5}})
    far = side({"x": torch.tensor([[[1.0], [3.0]]])})
    broken = relate("r", far, side({"x": torch.ones(1, 2, 1)}), (), tolerance=rule)
    assert (broken.first.row, broken.first.position, broken.first.step) == (0, 1, 0)


@pytest.mark.parametrize(
    ("ids", "names", "told"),
    [
        ("text", (), "expected the token ids of one prompt"),
        ([[1], [2]], (), "expected the token ids of one prompt"),
        (IDS, ("same_bitz",), "unknown relation 'same_bitz'.*did you mean 'same_bits'"),
        ([1, 2], ("chunked_prefill",), "2 tokens make one chunk of 2"),
    ],
)
def test_what_cannot_be_checked_is_one_line(session, ids, names, told):
    with pytest.raises(UsageError, match=told):
        Relations(session).check(ids, *names)


def test_a_run_that_fails_names_its_relation(model):
    def fails(inputs, outputs):
        raise RunError("out of memory")

    with pytest.raises(RunError, match=r"^same_bits: out of memory"):
        Relations(odd(model, fails)).check(IDS, "same_bits")


def test_a_feed_of_rows_and_chunks_that_do_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"rows have \[2, 3\] tokens, expected one of at least 1"):
        feed([[1, 2], [1, 2, 3]])
    with pytest.raises(UsageError, match=r"chunks \[1, 1\] hold 2 tokens, the rows have 3"):
        feed([[1, 2, 3]], chunks=[1, 1])
    with pytest.raises(UsageError, match="outside the engine's profile"):
        feed([[1] * 9]).check(SMALL)


def test_rows_of_several_lengths_are_cut_to_the_shortest(session):
    assert row_in_batch(session, [IDS, IDS[:5]]).comparison.engine.label.endswith("in a batch of 2")


def test_what_has_no_row_or_was_not_delivered_at_every_step_is_left_out():
    class Made:
        info = INFO
        taps = (
            Tap("flat", "flat", axes=("", "")),
            Tap("late", "late", axes=("batch", "length")),
            Tap("keys", "keys", axes=("batch", "total", "")),
            Tap("probs", "probs", axes=("batch", "length", "total")),
            Tap("never", "never", axes=("batch", "length")),
        )

        def start(self, batch):
            self._step = 0

        def step(self, inputs, sink):
            rows, length = inputs["input_ids"].shape
            total = inputs["attention_mask"].shape[1]
            sink("flat", torch.zeros(3, 3))
            if self._step:
                sink("late", torch.zeros(rows, length))
            sink("keys", torch.arange(total).float().expand(rows, total)[..., None])
            sink("probs", torch.ones(rows, length, total))
            self._step += 1
            return {"logits": torch.full((rows, 1, 4), float(self._step))}

    found = capture(Made(), feed([IDS[:4]], tail=2))
    assert found.left_out == {
        "flat": "axes ?, ?: no row or no position to align by",
        "late": "not delivered at every step with the axes that the export promised",
        "never": "not delivered",
    }
    assert found.values["keys"].shape == (1, 4, 1)
    assert found.values["probs"].shape == (1, 4, 4)
    assert found.values["probs"][0, :2].tolist() == [[1, 1, 0, 0]] * 2  # later keys have no weight in earlier steps
    assert found.values["logits"][0, :, 0].tolist() == [1, 2, 3]  # of the last token of each step


def test_keys_of_later_steps_are_hidden_where_all_parts_are_masks():
    """[batch, length, keys, head]: the first step sees one key, the second two."""
    parts = [torch.tensor([0.0]).view(1, 1, 1, 1), torch.tensor([0.0, LOWEST]).view(1, 1, 2, 1)]
    wide = full_width(parts, 2)
    assert [part.flatten().tolist() for part in wide] == [[False, True], [False, True]]


@pytest.mark.parametrize(
    ("actual", "expected", "count"),
    [
        (torch.tensor([0.0, math.nan]), torch.tensor([-0.0, math.nan]), 1),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 1),
        (torch.zeros(2), torch.zeros(3), 2),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), 2),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), 1),
    ],
)
def test_differing_bits_are_counted(actual, expected, count):
    assert differing_bits(actual, expected) == count


class Net:
    """A stand-in for an engine that takes inputs by name: it doubles ``x``, and mixes its rows if ``mixed``."""

    info, taps = INFO, (Tap("double", "y", axes=("batch", "")), Tap("sum", "s", axes=("",)))

    def __init__(self, mixed=0.0):
        self._mixed = mixed

    def start(self, batch):
        self.rows = batch

    def step(self, inputs, sink):
        x = inputs["x"]
        double = 2 * x + self._mixed * x.mean(0, keepdim=True)
        sink("double", double)
        sink("sum", double.sum(0))
        return {"y": double, "z": double + inputs.get("bias", 0)}


AXES = {"y": ("batch", ""), "z": ("batch", "")}
ROWS = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "bias": torch.tensor(1.0)}


def test_rows_of_inputs_by_name_hold_and_break():
    held = InputRelations(Net(), ROWS, AXES, noise=(Net(), Net())).assert_hold()
    assert [len(relation.comparison) for relation in held] == [2, 3]  # the sum over rows has no row
    assert held[0].comparison.notes == ("left out sum: axes ?: no row to align by",)
    (broken,) = InputRelations(Net(0.5), ROWS, AXES).check(None, "row_in_batch")
    assert (bool(broken), broken.first.site, broken.first.step) == (False, "double", 0)


@pytest.mark.parametrize(("rule", "holds"), [({}, False), ({"z": 1.0}, False), ({"z": 1.0, "y": 1.0}, True)])
def test_the_outputs_of_a_quantized_engine_that_are_no_logits_need_a_rule(rule, holds):
    """Nothing bounds them: they held whatever they were."""
    net = Net(50.0 * (not holds))
    net.info = SessionInfo("stand-in", "stand-in", "int8")
    (found,) = InputRelations(net, ROWS, AXES, Terms(Tolerance.of(rule))).check(None, "row_in_batch")
    assert bool(found) == holds
    assert holds or "an int8 engine is judged by its logits, which there are none of" in str(found)


def test_a_quantized_engine_holds_by_its_logits_and_breaks_by_them():
    def side(logits):
        captured = Captured({"logits": logits, "inner": logits}, dict.fromkeys(("logits", "inner"), ("batch", "", "")))
        return Side(SessionInfo("stand-in", "stand-in", "int8"), captured, OneStep("by hand"))

    logits = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(0))
    assert relate("r", side(logits), side(logits), ())
    assert str(relate("r", side(-logits), side(logits), ())).startswith("r: engine diverges at the logits")


def test_an_output_without_known_dimensions_and_a_tap_that_does_not_come_are_not_passed_over():
    counting = iter(range(9))
    net = Net()
    net.taps = (*Net.taps, Tap("late", "l"))
    net.step = lambda inputs, sink: Net.step(net, inputs, sink) | {"count": torch.tensor([float(next(counting))])}
    (broken,) = InputRelations(net, ROWS, AXES).check(None, "same_bits")
    assert broken.first.site == "count"
    assert broken.comparison.notes == ("left out late: not delivered",)


def test_inputs_without_rows_and_unknown_relations_are_refused():
    relations = InputRelations(Net(), ROWS, AXES)
    with pytest.raises(UsageError, match="unknown relation 'rows'"):
        relations.check(None, "rows")
    with pytest.raises(UsageError, match="the inputs have 1 row, expected at least two"):
        relations.check({"x": torch.zeros(1, 4)}, "row_in_batch")
    assert row_count({"s": torch.tensor(1.0)}) == 1


@pytest.fixture
def sessions(model, session):
    """What a pair has of its engine and its reference."""
    spec = EngineSpec.of(llama, outputs=[HEAD])
    return SimpleNamespace(spec=spec, model=model, engine=session, reference=session, low_precision=None)


def test_the_relations_of_a_pair_know_its_model(sessions, session):
    found = relating.token_relations(sessions, Tolerance())
    config = sessions.model.module.config
    assert (found.vocab_size, found.longest, found.window) == (256, config.max_position_embeddings, False)
    assert (found.noise, found.terms.profile) == (None, sessions.spec.profile)
    sessions.low_precision = session
    assert relating.token_relations(sessions, Tolerance()).noise == (session, session)
    sessions.output_axes, sessions.export = AXES, SimpleNamespace(check=lambda inputs: None)
    assert relating.input_relations(sessions, ROWS, Tolerance()).axes == AXES


def test_a_chunk_is_a_third_of_the_prompt_unless_a_size_is_given(session):
    assert "chunks of 4, 4, 4" in chunked_prefill(session, IDS).comparison.engine.label
    assert "chunks of 5, 5, 2" in chunked_prefill(session, IDS, chunk=5).comparison.engine.label
