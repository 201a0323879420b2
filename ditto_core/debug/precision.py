"""`ditto debug precision`: the operators that must stay in float32 (or bfloat16) for a float16 graph to be accurate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ditto_core.compare.tolerance import TABLE
from ditto_core.debug.align import alike, named_alike
from ditto_core.debug.check import Verdict
from ditto_core.debug.evaluate import capture, evaluate
from ditto_core.debug.iterations import IterationOptions, Iterations, Made, Say
from ditto_core.debug.minimize import minimize
from ditto_core.debug.mixed import LOW, Mixer
from ditto_core.debug.oracle import digest, distance, exploded, main_dtype, model_digest, suspects, tensor
from ditto_core.debug.reduce import EXPECTED_SUFFIX, INPUTS_SUFFIX
from ditto_core.debug.trials import Elsewhere, Judge, PrecisionOptions
from ditto_core.dumps.polygraphy import save_inputs, save_outputs
from ditto_core.errors import UsageError
from ditto_core.graphs.files import save
from ditto_core.graphs.graph import Graph
from ditto_core.graphs.nodes import described
from ditto_core.graphs.precision import fitted
from ditto_core.system.fingerprint import fingerprint


@dataclass(frozen=True)
class Kept:
    """An operator that must be kept: node, operator, module, local error in the low dtype, largest reference value."""

    node: str
    operator: str
    module: str
    local_error: float
    largest: float


@dataclass(frozen=True)
class Mixture:
    """The result. ``minimal``: taking any one operator away was seen to miss the tolerance."""

    kept: tuple[Kept, ...]
    candidates: int
    builds: int
    judged: int
    seconds: float
    minimal: bool
    output: Path
    verdict: str

    def summary(self, keep: str) -> str:
        """Return the list for people."""
        counts = f"{len(self.kept)} of {self.candidates} operators stay in {keep}"
        lines = [f"{counts} ({self.judged} builds, {self.seconds:.1f} s)"]
        for k in self.kept:
            lines.append(
                f"  {k.node} ({k.operator}) {k.module}: local rel_l2 {k.local_error:.1e}, |x| to {k.largest:.3g}"
            )
        if not self.minimal:
            lines.append("  the builds were used up: this set is enough, but a smaller one may be")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        kept = [
            {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in k.__dict__.items()}
            for k in self.kept
        ]
        return {**self.__dict__, "kept": kept, "output": str(self.output)}


def find_precision(
    options: PrecisionOptions, iteration: IterationOptions, output: Path, say: Say, elsewhere: Elsewhere | None = None
) -> Mixture:
    """Find a smallest set of operators to keep and write the mixed graph to ``output``.

    A graph that meets the tolerance as it is needs none. ``elsewhere`` judges ahead what the search is about to try; it
    comes to the same set. Raises :class:`UsageError` when it misses it even with every
    operator kept: then precision is not the fault.
    """
    if elsewhere is not None and iteration.check is not None:
        raise UsageError("--check and --interactive judge one by one: leave out --jobs and --cluster")
    search = PrecisionSearch(Graph.load(options.model), options, iteration, elsewhere)
    with Iterations(iteration, search.identity(), say, search.companions()) as iterations:
        kept = search.search(iterations)
        save(search.mixer.mixed(kept), output)
        return Mixture(
            tuple(search.describe(i) for i in kept),
            len(search.order),
            iterations.count,
            iterations.judged,
            round(iterations.seconds, 3),
            search.left != 0,
            output,
            search.reasons[frozenset(kept)],
        )


class PrecisionSearch:
    """One search: the graph, the reference's values, and the ranking of operators by what the low dtype costs them."""

    def __init__(
        self,
        graph: Graph,
        options: PrecisionOptions,
        iteration: IterationOptions,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.graph, self.options, self.iteration, self.elsewhere = graph, options, iteration, elsewhere
        low = main_dtype(graph)
        if low not in LOW:
            raise UsageError(f"the graph is in {low}, expected a strongly typed float16 or bfloat16 graph")
        self.mixer = Mixer.of(graph, low, options.keep)
        if options.reference.model is not None and not alike(graph, options.reference.model):
            captured = capture(graph, options.feed)
            options = replace(options, reference=named_alike(graph, options.feed, captured, options.reference))
            self.options = options
        good = options.reference.graph(graph)
        if good is None:
            raise UsageError("nothing to compare with: give --reference MODEL or --reference-precision float32")
        self.good = {**capture(good, fitted(options.feed, good.inputs))}
        self.expected = {name: self.good[name] for name in graph.outputs if name in self.good}
        self.verdict = Judge(options, self.mixer, self.expected, options.tolerance or TABLE[low])
        self.early: dict[frozenset[int], Verdict] = {}
        self.errors = self._rank()
        self.order = sorted(self.mixer.candidates(), key=lambda i: (-self.errors.get(i, 0.0), i))
        self.reasons: dict[frozenset[int], str] = {}
        self.left = options.builds or -1

    def search(self, iterations: Iterations) -> list[int]:
        """Return the kept nodes in topological order."""
        meets = partial(self.meets, iterations)
        if meets(frozenset()):
            return []
        everything = frozenset(self.order)
        if self.left == 0:
            raise UsageError("--builds 1 shows that the graph as it is fails, and nothing more: expected 2 or more")
        if not meets(everything):
            raise iterations.pointless(
                f"even with all {len(everything)} operators in {self.options.keep} it fails "
                f"({self.reasons[everything]}): precision is not the fault, or the tolerance is too tight for it"
            )
        return sorted(minimize(self.order, meets, guesses=self.guesses(), ahead=partial(self.ahead, iterations)))

    def ahead(self, iterations: Iterations, sets: Sequence[frozenset[int]]) -> None:
        """Judge sets elsewhere, all at once, before the search asks for them."""
        if self.elsewhere is None:
            return
        new = [s for s in sets if s not in self.early and key_of(s) not in iterations.journal.verdicts]
        start = time.perf_counter()
        self.early.update(
            self.elsewhere.judge(self.identity(), self.verdict, new[: self.left if self.left > 0 else None])
        )
        iterations.seconds += time.perf_counter() - start

    def guesses(self) -> list[Sequence[int]]:
        """Return what to try first: what the low dtype cannot hold at all, then ever more of the ranking."""
        ranked = [i for i in self.order if self.errors.get(i, 0.0) > 0]
        lost = [i for i in ranked if not self.errors[i] < 1]
        standing = [i for i in suspects(self.errors, len(ranked)) if i in set(ranked)]
        sizes = [2**k for k in range(len(ranked).bit_length())]
        sets = [lost, self.graph.closure(lost), standing, *(ranked[:size] for size in sizes)]
        candidates = set(self.order)
        return [[i for i in guess if i in candidates] for guess in sets if guess]

    def meets(self, iterations: Iterations, kept: frozenset[int]) -> bool:
        """Build one mixture and judge it; when no builds are left, nothing meets."""
        if self.left == 0:
            return False
        self.left -= 1
        what = f"{len(kept)} of {len(self.order)} operators in {self.options.keep}"
        labels = [self.graph.label(i) for i in sorted(kept)[:20]]
        verdict = iterations.run(key_of(kept), partial(self.judge, kept), what, {"kept": labels})
        self.reasons[kept] = verdict.reason
        return verdict.good

    def judge(self, kept: Collection[int]) -> Made:
        """Write the mixture for the check command, or run it here."""
        model, path = self.mixer.mixed(kept), self.iteration.iter_artifact
        if path is not None and (self.iteration.check is not None or path in self.iteration.artifacts):
            self._write(model, path)
        if self.iteration.check is not None:
            return {}
        return self.early.get(frozenset(kept)) or self.verdict(kept, model)

    def describe(self, index: int) -> Kept:
        """Return what the list says of a kept node."""
        node = self.graph.nodes[index]
        values = [self.good[name] for name in node.output if name in self.good]
        largest = max((float(np.abs(v).max()) for v in values if v.size and v.dtype.kind == "f"), default=0.0)
        error = self.errors.get(index, math.nan)
        return Kept(self.graph.label(index), node.op_type, described(node, index).module, error, largest)

    def identity(self) -> str:
        """Return the fingerprint of everything that decides the verdicts."""
        options, check = self.options, self.iteration.check
        good = options.reference.graph(self.graph)
        return fingerprint(
            "precision",
            model_digest(options.model),
            {name: digest(array) for name, array in sorted(options.feed.items())},
            digest(good.model) if good is not None else "",
            options.keep,
            check.to_json() if check else [self.verdict.tolerance, options.engine, options.level],
        )

    def companions(self) -> list[Path]:
        """Return the files that are written beside each iteration's model."""
        path = self.iteration.iter_artifact
        ends = (".onnx.data", INPUTS_SUFFIX, EXPECTED_SUFFIX)
        return [path.with_name(path.stem + end) for end in ends] if path is not None else []

    def _rank(self) -> dict[int, float]:
        """Run every operator alone in the low dtype on the reference's values, rounded to the low dtype."""
        emulated = Graph(self.mixer.emulated(self.graph.model))
        given = self.mixer.rounded({name: self.good[name] for name in self._values() if name in self.good})
        model, feed, fresh = exploded(emulated, given)
        values = evaluate(model, feed, list(fresh.values()))
        errors: dict[int, float] = {}
        for name, node in self.graph.producer.items():
            actual = values.get(fresh.get(name, ""))
            if actual is not None:
                errors[node] = max(errors.get(node, 0.0), distance(actual, self.good[name]))
        return errors

    def _values(self) -> list[str]:
        return [*self.graph.inputs, *self.graph.producer]

    def _write(self, model: onnx.ModelProto, path: Path) -> None:
        save(model, path)
        save_inputs(path.with_name(path.stem + INPUTS_SUFFIX), [tensors(self.options.feed)])
        save_outputs(path.with_name(path.stem + EXPECTED_SUFFIX), [tensors(self.expected)], "reference")


def key_of(kept: Collection[int]) -> str:
    """Return a set's name in the journal."""
    return fingerprint(sorted(kept))[:32]


def tensors(arrays: Mapping[str, Any], convert: Callable[[Any], Any] = tensor) -> dict[str, Any]:
    """Return arrays as tensors."""
    return {name: convert(array) for name, array in arrays.items()}
