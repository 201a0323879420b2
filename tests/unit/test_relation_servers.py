"""Relations of servers, on stand-ins: the eager model in a server's passes, and requests that displace each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ditto_core.backends.eager import EagerSession
from ditto_core.compare.tolerance import Tolerance
from ditto_core.errors import UsageError
from ditto_core.model.loading import load_model
from ditto_core.pair import relating
from ditto_core.relations import BROKEN, Terms
from ditto_core.relations.requests import check_history
from ditto_core.relations.result import ROUNDING, SAME_BITS
from ditto_core.relations.served import Serving, check_served
from ditto_core.session import SessionInfo, Trail
from ditto_core.spec import EngineSpec, ModelSource
from tests.models import llama

IDS = [3, 40, 5, 61, 7, 82, 9, 110, 11, 132, 13, 154]
MODES = {"plain": {}, "prefix_cache": {"chunk": 4, "kept": 8}, "chunked_prefill": {"chunk": 4}}
NAMES = {
    "prefix_cache": "prefix hit = new prefix",
    "chunked_prefill": "chunks = whole prompt",
    "batch": "row alone = row in batch",
    "prompt_logprobs": "prompt log-probabilities = the reference's",
}
BITS = "differing elements"


@pytest.fixture(scope="module")
def model():
    return load_model(ModelSource.of(llama))


def prefill(session, ids):
    """Return the logits of each token but the last, [length - 1, vocabulary]."""
    one = torch.tensor([ids])
    session.start(1)
    inputs = {"input_ids": one, "attention_mask": torch.ones_like(one), "position_ids": torch.arange(len(ids))[None]}
    return session.step(inputs, lambda site, tensor: None)["logits"][0, :-1]


class Untold(EagerSession):
    """A stand-in for a server that says nothing of its passes and scores no prompt."""

    def __init__(self, model, **options):
        super().__init__(model, (), dtype="float32")
        self.closed = False

    def close(self):
        super().close()
        self.closed = True


class Served(Untold):
    """A stand-in for a server: the eager model in passes of ``chunk`` tokens (0: the prompt at once). The next sequence
    finds the first ``kept`` tokens of the last one in the cache, times ``spoilt``."""

    def __init__(self, model, chunk=0, kept=0, spoilt=1.0):
        super().__init__(model)
        self._chunk, self._kept, self._spoilt = chunk, kept, spoilt

    def start(self, batch):
        cache = self._forward.cache
        if self._kept and cache is not None:
            cache.crop(self._kept - cache.get_seq_length())
            for layer in cache.layers:
                layer.values = layer.values * self._spoilt
        else:
            super().start(batch)
        self.passes = []

    def step(self, inputs, sink):
        mask = inputs["attention_mask"]
        rows, total = mask.shape
        past, at = total - inputs["input_ids"].shape[1], self._forward.cache.get_seq_length()
        while at < total:
            stop = min(total, at + (self._chunk or total))
            cut = {name: inputs[name][:, at - past : stop - past] for name in ("input_ids", "position_ids")}
            outputs = super().step({**cut, "attention_mask": mask[:, :stop]}, sink)
            self.passes.append(((at, stop - at),) * rows)
            at = stop
        return {"logits": outputs["logits"][:, -1:]}

    def prompt_logprobs(self, ids):
        logits = prefill(super(), ids)
        return logits - logits.logsumexp(-1, keepdim=True)


def check(model, *names, kind=Served, low_precision=None, **other):
    """Check relations with some modes' options replaced; every session that was opened has to be closed."""
    opened = []

    def open_mode(mode):
        opened.append(kind(model, **{**MODES, **other}[mode]))
        return opened[-1]

    reference = EagerSession(model, (), dtype="float64")
    found = list(check_served(Serving(open_mode, reference, low_precision), IDS, Terms(), *names))
    assert all(session.closed for session in opened)
    return found


def test_a_server_serves_the_same_in_every_mode(model):
    found = check(model)
    assert [relation.name for relation in found] == list(NAMES.values())
    assert all(found)
    assert found[0].status == SAME_BITS
    assert found[3].comparison.results[0].floor is None


def test_what_the_same_passes_computed_has_the_same_bits(model):
    """A cache that is off by less than rounding breaks the relation, unless the prefix ran in other shapes."""
    off = 1 + 2**-22
    (exact,) = check(model, "prefix_cache", prefix_cache={"chunk": 4, "kept": 8, "spoilt": off})
    (close,) = check(model, "prefix_cache", prefix_cache={"kept": 8, "spoilt": off})
    (far,) = check(model, "prefix_cache", prefix_cache={"kept": 8, "spoilt": 1.5})
    assert (exact.status, exact.first.verdict.metric) == (BROKEN, BITS)
    assert (close.status, close.comparison.worst.verdict.metric) == (ROUNDING, "rel_l2")
    assert (far.status, far.first.site) == (BROKEN, "logits")


def test_chunks_that_see_less_than_the_whole_prompt_break_the_relation(model):
    class Forgets(Served):
        """A server whose later chunks do not see the first one."""

        def start(self, batch):
            super().start(batch)
            self._hidden = 4 if self._chunk else 0

        def step(self, inputs, sink):
            mask = inputs["attention_mask"].clone()
            mask[:, : self._hidden] = 0
            return super().step({**inputs, "attention_mask": mask}, sink)

    (broken,) = check(model, "chunked_prefill", kind=Forgets)
    assert (broken.status, broken.first.position) == (BROKEN, 0)


def test_log_probabilities_that_are_one_token_late_break_the_relation(model):
    class Late(Served):
        def prompt_logprobs(self, ids):
            return super().prompt_logprobs(ids).roll(1, 0)

    (broken,) = check(model, "prompt_logprobs", kind=Late)
    assert (broken.status, broken.first.site, broken.first.position) == (BROKEN, "logprobs", 0)


def test_log_probabilities_are_judged_beside_the_noise_of_the_references(model):
    """The floor is computed here by hand, from the logits of a prefill."""
    low = EagerSession(model, (), dtype="bfloat16")
    (relation,) = check(model, "prompt_logprobs", low_precision=low)
    rounded, truth = (
        prefill(session, IDS).double().log_softmax(-1) for session in (low, EagerSession(model, (), dtype="float64"))
    )
    expected = (rounded - truth).norm() / truth.norm()
    assert relation
    assert relation.comparison.results[0].floor == pytest.approx(float(expected), rel=1e-6)


class Silent(Served):
    """A server of which no pass was seen."""

    def step(self, inputs, sink):
        outputs = super().step(inputs, sink)
        self.passes.clear()
        return outputs


@pytest.mark.parametrize(
    ("name", "facts", "told"),
    [
        ("prefix_cache", {"prefix_cache": {"chunk": 4}}, "no block of 12 tokens was reused"),
        ("chunked_prefill", {"chunked_prefill": {}}, "12 tokens took one pass"),
        ("prefix", {}, "unknown relation 'prefix'.*did you mean 'prefix_cache'"),
        ("prefix_cache", {"kind": Untold}, "eager float32 does not tell its passes"),
        ("chunked_prefill", {"kind": Silent}, "eager float32 does not tell its passes"),
        ("prompt_logprobs", {"kind": Untold}, "eager float32 gives no log-probabilities of a prompt"),
    ],
)
def test_a_mode_in_which_nothing_was_shown_is_no_check(model, name, facts, told):
    with pytest.raises(UsageError, match=told):
        check(model, name, **facts)


class Backend:
    """A stand-in for a backend that serves in several ways."""

    def modes(self, spec):
        return MODES


def test_each_mode_of_a_server_is_an_engine_of_its_own(model, monkeypatch):
    built = []

    def build(spec):
        built.append(dict(spec.options))
        return SimpleNamespace(open=lambda: Served(model, **dict(spec.options)))

    spec, workspace = EngineSpec.of(llama, outputs=["lm_head"]), SimpleNamespace(build=build)
    reference = EagerSession(model, (), dtype="float32")
    sessions = SimpleNamespace(
        spec=spec, workspace=workspace, model=model, engine=reference, reference=reference, low_precision=None
    )
    with pytest.raises(UsageError, match="onnxruntime serves in one way only"):
        relating.served_relations(sessions, Tolerance(), IDS, ())
    monkeypatch.setattr(relating, "get_backend", lambda name: Backend())
    found = relating.served_relations(sessions, Tolerance(), IDS, ("prefix_cache", "chunked_prefill"))
    assert [relation.name for relation in found] == [NAMES["prefix_cache"], NAMES["chunked_prefill"]]
    assert built == [MODES["prefix_cache"], MODES["plain"], MODES["chunked_prefill"]]
    assert len(relating.served_relations(sessions, Tolerance(), IDS, ())) == len(NAMES)


class Requests:
    """A stand-in for a server of requests: a pass computes a token of each of the last ``room`` that came; the older
    lose their places and are begun anew. ``leak``: what the others add to a row; ``forgetful``: a request that is begun
    anew goes on from its prompt alone; ``drift``: each sequence is so much greater than the first, by a state left.
    """

    info = SessionInfo("stand-in", "stand-in", "float32")

    def __init__(self, leak=0.0, room=9, forgetful=False, drift=0.0):
        self.leak, self.room, self.forgetful, self.drift = leak, room, forgetful, drift
        self.count, self.sequences = 0, -1
        self.forget()

    def forget(self):
        self.running, self.done, self.trails, self.out = {}, {}, {}, set()
        self.sequences += 1

    def submit(self, ids, new_tokens):
        self.count += 1
        name = f"r{self.count}"
        self.running[name], self.done[name], self.trails[name] = (list(ids), new_tokens), [], Trail()
        return name

    def abort(self, name):
        self.running.pop(name, None)

    def step(self):
        names = list(self.running)[-self.room :]
        self.out |= {name for name in self.running if name not in names and self.done[name]}
        shape = tuple(self._pass(name) for name in names)
        for row, name in enumerate(names):
            self._compute(name, len(names) - 1)
            begun = Trail(len(self.done[name]) - 1) if name in self.out else self.trails[name]
            self.out.discard(name)
            self.trails[name] = Trail(begun.kept, (*begun.passes, (row, shape)))
            if len(self.done[name]) == self.running[name][1]:
                del self.running[name]
        return bool(self.running)

    def _pass(self, name):
        known = len(self.running[name][0]) + len(self.done[name])
        begins = not self.done[name] or name in self.out
        return (0, known) if begins else (known - 1, 1)

    def _compute(self, name, others):
        known = sum(self.running[name][0])
        if not (self.forgetful and (name in self.out or self.trails[name].kept)):
            known += sum(int(row.argmax()) for row in self.done[name])
        row = torch.cos(torch.arange(1, 9.0) * (known + 1)) * (1 + self.drift * self.sequences)
        self.done[name].append(row + self.leak * others)

    def logits(self, name):
        return torch.stack(self.done[name])

    def trail(self, name):
        return self.trails[name]


HISTORY = [("submit", 0), ("step", 1), ("submit", 1), ("step", 1), ("submit", 0), ("abort", 2), ("abort", 9)]


def history(server, events=HISTORY):
    return check_history(server, [[1, 2], [3]], events, 3, Terms())


def test_each_request_of_a_history_gets_what_it_gets_alone():
    found = history(Requests())
    assert [relation.name for relation in found] == [
        "request r1 of prompt 0 = the request alone",
        "request r2 of prompt 1 = the request alone",
    ]
    assert all(found)
    assert [bool(relation) for relation in history(Requests(leak=5.0))] == [False, False]


def test_what_the_same_passes_computed_of_a_request_has_the_same_bits():
    """Drift within rounding: found in a request that ran by itself, but not where another shared its passes."""
    (exact,) = history(Requests(drift=1e-6), [("submit", 0), ("step", 1)])
    close = history(Requests(drift=1e-6))
    assert (exact.status, exact.first.verdict.metric) == (BROKEN, BITS)
    assert [(relation.status, relation.comparison.worst.verdict.metric) for relation in close] == [
        (ROUNDING, "rel_l2"),
        (ROUNDING, "rel_l2"),
    ]


def test_a_request_that_lost_its_place_goes_on_as_one_that_begins_with_its_tokens():
    events = [("submit", 0), ("step", 1), ("submit", 1), ("step", 1)]
    found = history(Requests(room=1), events)
    assert [relation.name for relation in found] == [
        "request r1 of prompt 0 = the request alone",
        "request r1 of prompt 0 resumed after 1 tokens = the request alone",
        "request r2 of prompt 1 = the request alone",
    ]
    assert all(found)
    assert found[1].comparison.worst.verdict.metric == BITS
    broken = history(Requests(room=1, forgetful=True), events)
    assert [bool(relation) for relation in broken] == [False, False, True]
    assert (broken[1].first.verdict.metric, broken[1].first.position) == (BITS, 0)


@pytest.mark.parametrize("event", [("send", 0), ("submit", 2)])
def test_an_event_that_is_none_is_refused(event):
    with pytest.raises(UsageError, match=r"the event .* is unknown, expected submit, step, abort and a number"):
        history(Requests(), [event])
