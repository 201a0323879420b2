"""The paths to a verdict. Each runs real engines once, remembers their tensors, and judges what a fault makes of them.

A new path is one entry of ``PATHS``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ditto_core.compare.assertion import assert_close
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.dumps import compare_dumps
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import DittoError
from ditto_core.gates import run_gate
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from ditto_core.stepping.dumps import compare_offline
from tests.adversary.sessions import Fault, Faulty, Remembered, changed
from tests.gate_suites import tiny_gate, tiny_suite
from tests.models import bert, beyond_half, conv_net, llama, loud

PROMPT = [5, 9, 33, 7, 100, 8, 2, 44]
PROMPTS = [PROMPT, [12, 240, 31], [99, 4, 18, 77, 61]]
LAYER = "model.layers.0"

Judge = Callable[[Fault, Collection[str]], "tuple[bool, int]"]
"""Judges an engine with a fault in the tensors of some names: did it pass, and how many tensors were wrong."""


class Live:
    """An engine stepped beside its reference."""

    def __init__(
        self,
        workspace: Workspace,
        model: Callable[[], Any],
        dtype: str,
        outputs: Collection[str],
        *,
        prompts: Any = None,
        steps: int = 1,
        first: int = 0,
        side: str = "engine",
        quantized: bool = False,
        **options: Any,
    ) -> None:
        spec = EngineSpec.of(model, dtype=dtype, outputs=list(outputs))
        self._pair = Pair(workspace, spec, PairOptions(observer=side == "untapped", **options))
        self._prompts, self._steps, self._first, self._side = prompts, steps, first, side
        sessions = self._pair.sessions
        kept = {name: getattr(sessions, name) for name in ("engine", "untapped", "reference")}  # floors are kept anyway
        self._kept = {name: session and Remembered(session) for name, session in kept.items()}
        if quantized:
            self._kept["engine"].info = replace(sessions.engine.info, quantized=True)

    def __call__(self, fault: Fault, names: Collection[str]) -> tuple[bool, int]:
        faulty = Faulty(self._kept[self._side], fault, names, self._first)
        return bool(self.compare({**self._kept, self._side: faulty})), faulty.changed

    def compare(self, sessions: Mapping[str, Any], **options: Any) -> Comparison:
        """Run with these sessions."""
        self._pair.sessions.__dict__.update(sessions)
        pair = Pair(
            self._pair.workspace,
            self._pair.spec,
            replace(self._pair.options, **options),
            sessions=self._pair.sessions,
        )
        if self._prompts is None:
            return pair.run()
        return pair.generate(self._prompts, max_new_tokens=self._steps)


class BetweenDumps(Live):
    """``ditto compare`` of the two traces that a live run wrote."""

    def __init__(self, workspace: Workspace, folder: Path, *args: Any, **options: Any) -> None:
        super().__init__(workspace, *args, **options)
        self._folders: Iterator[Path] = (folder / f"run{i}" for i in itertools.count())

    def __call__(self, fault: Fault, names: Collection[str]) -> tuple[bool, int]:
        faulty, folder = Faulty(self._kept["engine"], fault, names, self._first), next(self._folders)
        self.compare({**self._kept, "engine": faulty}, dump=folder)
        return bool(compare_offline(compare_dumps(folder / "engine", folder / "reference"))), faulty.changed


def against_dump(workspace: Workspace, folder: Path) -> Judge:
    """An engine beside the trace of its reference."""
    recorded = Live(workspace, llama, "float16", [LAYER], prompts=PROMPT, steps=2)
    recorded.compare({}, dump=folder / "recorded")
    reference = str(folder / "recorded" / "reference")
    return Live(workspace, llama, "float16", [LAYER], prompts=PROMPT, steps=2, reference=reference)


def through_gate(workspace: Workspace) -> Judge:
    """A gate over a suite; both sides of its job are wrapped."""
    gate = tiny_gate(tiny_suite(texts=24, choices=0, prompts=0))
    kept: dict[str, Any] = {}

    def judge(fault: Fault, names: Collection[str]) -> tuple[bool, int]:
        wrapped: list[Faulty] = []

        def run(job: Any, tasks: Mapping[str, Any], workspace: Workspace) -> Iterator[tuple[str, Any]]:
            scoring = kept.setdefault("scoring", None) or job.open(workspace)
            if kept["scoring"] is None:
                kept.update(scoring=scoring, engine=Remembered(scoring.scorer.engine))
                scoring.scorer.reference = Remembered(scoring.scorer.reference)
            wrapped.append(Faulty(kept["engine"], fault, names))
            scoring.scorer.engine = wrapped[0]
            yield from ((name, scoring(task)) for name, task in tasks.items())

        passed = bool(run_gate(gate, workspace, run=run))
        return passed, wrapped[0].changed

    return judge


def by_assertion(dtype: torch.dtype) -> Judge:
    """``assert_close`` of two nestings of tensors."""
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    right = {"hidden": x, "logits": x.flip(-1).contiguous(), "square": x[:, :, :8].contiguous()}

    def judge(fault: Fault, names: Collection[str]) -> tuple[bool, int]:
        wrong = fault(dict(right), {}, names)
        try:
            assert_close(wrong, right)
        except AssertionError:
            return False, changed(wrong, right)
        return True, changed(wrong, right)

    return judge


class TwoOutputs(nn.Module):
    """Returns what its layers compute under two names, of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.a(x))
        return {"hidden": hidden, "pooler": self.b(hidden)}


def two_outputs() -> Any:
    return TwoOutputs(), {"x": torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1))}


@dataclass(frozen=True)
class Way:
    """A path: how it is opened, and the tensors that a fault is put into, those of a group together.

    ``allowed``: faults that this path cannot see, by its definition. ``judged``: the engine itself passes there.
    """

    open: Callable[[Workspace, Path], Judge]
    targets: tuple[tuple[str, ...], ...] = ((LAYER,), ("logits",))
    allowed: tuple[str, ...] = ()
    judged: bool = True

    def passing(self, judge: Judge, faults: Mapping[str, Fault]) -> tuple[list[str], int]:
        """Return the faults that pass, each with what it was put into, and how many were tried."""
        found, tried = [], 0
        for names, (fault, change) in itertools.product(self.targets, faults.items()):
            if fault in self.allowed:
                continue
            passed, wrong = refused(judge, change, names)
            tried += wrong > 0
            if passed and wrong:
                found.append(f"{', '.join(names)}: {fault}")
        return found, tried


def refused(judge: Judge, fault: Fault, names: Collection[str]) -> tuple[bool, int]:
    """Judge; an error of one line that names what is wrong is a failure too."""
    try:
        return judge(fault, names)
    except DittoError:
        return False, 1


SAME_DISTRIBUTION = ("shifted by half of its largest", "less its mean")
"""Logits that differ by a constant at each position are the same distribution."""

PREDICTS_NOTHING = ("last position zero", "last position negated", "last position copied from the first")
"""A gate compares the logits that predict a text's tokens; those behind its last token predict none."""


def live(*args: Any, **options: Any) -> Callable[[Workspace, Path], Judge]:
    """Return what opens a live path."""
    return lambda workspace, folder: Live(workspace, *args, **options)


TAPPED = [LAYER]
UNSEEN = [f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn:k_rope"]
"""A softmax over one key is 1 whatever these are."""

PATHS: dict[str, Way] = {
    "prefill": Way(live(llama, "float32", TAPPED, prompts=PROMPT)),
    "prefill in float16": Way(live(llama, "float16", TAPPED, prompts=PROMPT)),
    "decode": Way(live(llama, "float16", TAPPED, prompts=PROMPT, steps=3, first=1)),
    "padded batch": Way(live(llama, "float32", TAPPED, prompts=PROMPTS, steps=2)),
    "queries and keys of one token": Way(
        live(llama, "float32", [*UNSEEN, LAYER], prompts=[5]), tuple((site,) for site in UNSEEN)
    ),
    "encoder": Way(live(bert, "float32", ["encoder.layer.0"]), (("encoder.layer.0",), ("last_hidden_state",))),
    "convolutions": Way(live(conv_net, "float32", ["0"]), (("0",), ("output",))),
    "several outputs": Way(live(two_outputs, "float32", ["a"]), (("hidden",), ("pooler",), ("hidden", "pooler"))),
    "engine as reference": Way(live(llama, "float16", TAPPED, prompts=PROMPT, reference="onnxruntime")),
    "dump as reference": Way(against_dump),
    "ditto compare": Way(lambda w, f: BetweenDumps(w, f, llama, "float32", TAPPED, prompts=PROMPT, steps=2)),
    "untapped engine": Way(live(llama, "float32", TAPPED, prompts=PROMPT, steps=2, side="untapped"), (("logits",),)),
    "quantized": Way(
        live(llama, "float32", TAPPED, prompts=PROMPTS, quantized=True), (("logits",),), SAME_DISTRIBUTION
    ),
    "large activations in float16": Way(live(loud, "float16", TAPPED, prompts=PROMPT)),
    "overflowing float16": Way(live(beyond_half, "float16", ["model.layers.*"], prompts=PROMPT), judged=False),
    "gate": Way(lambda w, f: through_gate(w), (("logits",),), SAME_DISTRIBUTION + PREDICTS_NOTHING),
    "assert_close": Way(lambda w, f: by_assertion(torch.float32), (("hidden",), ("logits", "square"))),
    "assert_close in bfloat16": Way(lambda w, f: by_assertion(torch.bfloat16), (("hidden",), ("logits", "square"))),
}
