"""Judge mixtures ahead of a search, in other processes or on a cluster: what the search will ask for next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from ditto_core.debug.check import Verdict
from ditto_core.debug.evaluate import OnnxRuntime
from ditto_core.debug.mixed import Mixer
from ditto_core.debug.oracle import Reference, distance, main_dtype
from ditto_core.errors import UsageError, nearest
from ditto_core.graphs.graph import Arrays, Graph
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from ditto_core.engines.workers import Run
    from ditto_core.engines.workspace import Workspace

EMULATED, ONNXRUNTIME = "emulated", "onnxruntime"
ENGINES = (EMULATED, ONNXRUNTIME)


@dataclass(frozen=True)
class PrecisionOptions:
    """What is searched. ``keep``: dtype of the operators that are kept. ``tolerance``: on rel-L2 of every output.

    A tolerance of 0 takes the table's for the graph's dtype.
    ``engine`` judges if there is no check command: ``emulated`` (rounding where a strongly typed engine stores,
    float32 accumulation) or ``onnxruntime``. ``builds`` bounds the search, 0 does not.
    """

    model: Path
    feed: Arrays
    reference: Reference = field(default_factory=lambda: Reference(precision="float32"))
    keep: str = "float32"
    engine: str = EMULATED
    level: str = "all"
    tolerance: float = 0.0
    builds: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            known = ", ".join(ENGINES)
            raise UsageError(f"unknown engine {self.engine!r}, expected {known}{nearest(self.engine, ENGINES)}")


@dataclass(frozen=True)
class Judge:
    """Runs a graph with some operators kept and compares every output with what is ``expected``, by rel-L2."""

    options: PrecisionOptions
    mixer: Mixer
    expected: Arrays
    tolerance: float

    def __call__(self, kept: Collection[int], model: onnx.ModelProto | None = None) -> Verdict:
        """Judge a set of nodes; ``model`` is its graph, where that is made already."""
        values = self._run(model or self.mixer.mixed(kept))
        errors = {name: distance(values[name], array) for name, array in self.expected.items()}
        worst = max(errors, key=lambda name: errors[name])
        good = errors[worst] <= self.tolerance
        return Verdict(good, f"rel_l2 {errors[worst]:.1e} {'<=' if good else '>'} {self.tolerance:.1e} at {worst}")

    def _run(self, model: onnx.ModelProto) -> dict[str, Any]:
        feed, names = dict(self.options.feed), list(self.expected)
        if self.options.engine == ONNXRUNTIME:
            return OnnxRuntime(self.options.level).run(model, feed, names)
        return OnnxRuntime("basic").run(self.mixer.emulated(model), self.mixer.rounded(feed), names)


@dataclass(frozen=True)
class Trials:
    """What a worker needs to judge sets of a search; two are the same when their ``search`` (a fingerprint) is.

    The model is read from its file, which all workers must have at the same path.
    """

    search: str
    options: PrecisionOptions = field(compare=False, repr=False)
    expected: Arrays = field(compare=False, repr=False)
    tolerance: float
    cache: Path
    remote: str = ""

    def open(self, workspace: Workspace) -> Judge:
        """Load the graph."""
        graph = Graph.load(self.options.model)
        mixer = Mixer.of(graph, main_dtype(graph), self.options.keep)
        return Judge(self.options, mixer, self.expected, self.tolerance)


@dataclass(frozen=True)
class Elsewhere:
    """Where sets are judged ahead: what executes them, and the cache that workers use."""

    run: Run
    workspace: Workspace

    def judge(self, search: str, judge: Judge, sets: Iterable[Collection[int]]) -> Mapping[frozenset[int], Verdict]:
        """Judge all sets at once."""
        cache = self.workspace.cache
        work = Trials(search, judge.options, judge.expected, judge.tolerance, cache.root, cache.remote)
        tasks = {fingerprint(sorted(kept)): tuple(sorted(kept)) for kept in sets}
        return {frozenset(tasks[name]): verdict for name, verdict in self.run(work, tasks, self.workspace)}
