"""Samples through two sessions: the eager model as the engine and as its reference, so every likelihood is known."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ditto_core.backends.eager import EagerSession
from ditto_core.errors import RunError, UsageError
from ditto_core.gates import Sample, scoring
from ditto_core.gates.calibration import Calibration
from ditto_core.gates.journal import Journal
from ditto_core.gates.record import Side
from ditto_core.gates.scoring import Known, Scorer
from ditto_core.model.loading import load_model
from ditto_core.profile import ShapeProfile
from ditto_core.spec import EngineSpec, ModelSource
from tests.gate_suites import tiny_gate, tiny_suite
from tests.models import llama


@pytest.fixture(scope="module")
def model():
    return load_model(ModelSource.of(llama))


@pytest.fixture(scope="module")
def scorer(model):
    engine, reference = (EagerSession(model, (), dtype=dtype) for dtype in ("float32", "float64"))
    return Scorer(engine, reference, None, 256, ShapeProfile(), 3)


def samples(suite):
    return [(sample, None) for sample in suite.samples]


def test_samples_of_a_batch_are_cut_where_their_logits_would_not_fit(scorer, monkeypatch):
    """14 sequences of 9 or 12 tokens and 256 logits: two rows fit, three do not."""
    alone = [scorer.score(sample) for sample in tiny_suite(2, 2, 1).samples]
    rows, real = [], scoring.step_logits
    monkeypatch.setattr(
        scoring, "step_logits", lambda session, batch: (rows.append(batch.rows), real(session, batch))[1]
    )
    monkeypatch.setattr(scoring, "AHEAD", 2 * 12 * 256)
    together = scorer.score_all(samples(tiny_suite(2, 2, 1)))
    assert max(rows) == 2
    assert [r.engine.top for r in together] == [r.engine.top for r in alone]
    assert [r.engine.nll for r in together] == pytest.approx([r.engine.nll for r in alone], rel=1e-6)


def test_a_baseline_stands_for_the_reference_in_a_batch_too(scorer):
    suite = tiny_suite(2, 1, 0)
    known = [Known(r.reference, r.tokens) for r in scorer.score_all(samples(suite))]
    alone = replace(scorer, reference=None)
    found = alone.score_all(list(zip(suite.samples, known, strict=True)))
    assert [r.reference for r in found] == [each.side for each in known]


def test_an_engine_that_leaves_the_references_tokens_goes_on_by_itself(scorer):
    other = load_model(ModelSource.of(llama))
    with torch.no_grad():
        other.module.lm_head.weight.copy_(other.module.lm_head.weight.flip(0))
    wrong = replace(scorer, engine=EagerSession(other, (), dtype="float32"))
    prompt = Sample("p", prompt=(1, 2, 3))
    healthy, found = scorer.score(prompt), wrong.score(prompt)
    assert healthy.engine.generated == healthy.reference.generated == found.reference.generated
    assert found.engine.generated == scorer_of_itself(other).score(prompt).engine.generated
    assert found.engine.generated != found.reference.generated


def scorer_of_itself(model):
    engine, reference = (EagerSession(model, (), dtype=dtype) for dtype in ("float32", "float64"))
    return Scorer(engine, reference, None, 256, ShapeProfile(), 3)


def test_what_a_sample_cannot_be_scored_by_is_one_line(scorer):
    text = Sample("t", text=(1, 2, 3))
    record = scorer.score(text)
    alone = replace(scorer, reference=None)
    with pytest.raises(UsageError, match="no reference, and the baseline lacks sample 't'"):
        alone.score(text)
    with pytest.raises(UsageError, match="sample 't' has 2 tokens here, and 5 in the baseline"):
        alone.score(text, Known(record.reference, 5))
    with pytest.raises(UsageError, match="sample 'one': a text of one token predicts nothing"):
        scorer.score(Sample("one", text=(1,)))
    prompt = Sample("p", prompt=(1, 2))
    with pytest.raises(UsageError, match="sample 'p': the baseline continues by 1 tokens, expected 3"):
        alone.score(prompt, Known(Side(generated=(1,)), 0))


def test_a_prompt_in_words_takes_no_choices_in_ids(scorer):
    words = replace(scorer, tokenizer=Letters())
    with pytest.raises(UsageError, match="to be all text or all token ids"):
        words.score(Sample("c", prompt="ab", choices=((1,), (2,)), answer=0))


class Letters:
    """A stand-in for a tokenizer: a letter is the token of its code."""

    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids):
        return " " + "".join(map(chr, ids))


def test_an_answer_in_words_is_right_where_the_continuation_begins_with_it(scorer):
    words = replace(scorer, tokenizer=Letters())
    tokens = [ord(letter) for letter in "abc"]
    assert words._right(Sample("m", prompt="x", answer="ab "), tokens) is True
    assert words._right(Sample("m", prompt="x", answer="b"), tokens) is False


def test_a_session_without_logits_is_an_error_with_its_outputs(scorer):
    class Bare(EagerSession):
        def step(self, inputs, sink):
            return {"hidden": torch.zeros(1, 2, 3)}

    bare = Bare.__new__(Bare)
    bare.__dict__ = {**vars(scorer.engine)}
    with pytest.raises(RunError, match="returned no logits: it has hidden"):
        replace(scorer, engine=bare).score(Sample("t", text=(1, 2, 3)))


def test_a_journal_gives_back_whole_lines_and_goes_on_after_one_that_was_cut(tmp_path):
    journal = Journal(tmp_path / "j.jsonl", str, int)
    assert journal.read() == {}
    journal.append("a", 1)
    with journal.path.open("ab") as file:
        file.write(b'{"sample": "b", "resu')
    journal.append("c", 3)
    with journal.path.open("ab") as file:
        file.write(b'{"sample": "d", "result": "x"}\n[1]\n')
    assert journal.read() == {"a": 1, "c": 3}
    journal.remove()
    journal.remove()
    assert not journal.path.exists()


def test_a_calibration_taps_a_reference_that_is_an_engine_too(tmp_path):
    workspace = SimpleNamespace(cache=SimpleNamespace(root=tmp_path, remote=""))
    gate = tiny_gate(reference=EngineSpec.of(llama, dtype="float16"))
    work = Calibration.of(gate, ["lm_head"], workspace)
    assert (work.reference.outputs, work.spec.outputs) == (("lm_head",), ("lm_head",))
