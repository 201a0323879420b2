"""`ditto debug reduce`: the smallest part of an ONNX model that still fails."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import onnx

from ditto_core.compare.tolerance import TABLE
from ditto_core.debug.align import named_alike
from ditto_core.debug.check import Verdict
from ditto_core.debug.evaluate import PLAIN, OnnxRuntime, capture
from ditto_core.debug.iterations import IterationOptions, Iterations, Made, Say
from ditto_core.debug.minimize import minimize
from ditto_core.debug.oracle import Oracle, Reference, digest, distance, main_dtype, model_digest, suspects, tensor
from ditto_core.dumps.polygraphy import save_inputs, save_outputs
from ditto_core.errors import RunError, UsageError
from ditto_core.graphs.files import save
from ditto_core.graphs.graph import Arrays, Graph, NoTensorError
from ditto_core.graphs.precision import fitted
from ditto_core.system.fingerprint import fingerprint

INPUTS_SUFFIX, EXPECTED_SUFFIX = "_inputs.json", "_expected.json"


@dataclass(frozen=True)
class ReduceOptions:
    """What is reduced, and how a part is judged without a check command.

    ``feed``: the real inputs (empty only with a check that makes its own). ``tolerance``: bound on rel-L2 of every
    output; 0 takes the table's for the model's dtype.
    """

    model: Path
    feed: Arrays = field(default_factory=dict)
    reference: Reference = field(default_factory=Reference)
    engine: OnnxRuntime = field(default_factory=OnnxRuntime)
    tolerance: float = 0.0


@dataclass(frozen=True)
class Reduced:
    """The result: nodes that remain (positions and labels), what it cost, and where it was written."""

    nodes: tuple[int, ...]
    labels: tuple[str, ...]
    total: int
    iterations: int
    judged: int
    seconds: float
    output: Path
    ranking: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**self.__dict__, "output": str(self.output), "ranking": {k: str(v) for k, v in self.ranking.items()}}


def reduce_model(options: ReduceOptions, iteration: IterationOptions, output: Path, say: Say) -> Reduced:
    """Reduce a model and write the smallest failing part to ``output``, its inputs and expected outputs beside it.

    Raises :class:`UsageError` when the whole model passes, or when what must pass (the reference, or a model that
    hands its input through) fails: then the check or the tolerance is wrong, and a search would find nonsense.
    """
    graph = Graph.load(options.model)
    search = Search(graph, options, iteration, say)
    with Iterations(iteration, search.identity(), say, search.companions()) as iterations:
        search.baselines(iterations)
        nodes = minimize(range(len(graph.nodes)), partial(search.fails, iterations), guesses=search.guesses())
        search.write(nodes, output, expected=True)
        return Reduced(
            tuple(nodes),
            tuple(graph.label(i) for i in nodes),
            len(graph.nodes),
            iterations.count,
            iterations.judged,
            round(iterations.seconds, 3),
            output,
            {graph.label(i): search.errors[i] for i in suspects(search.errors)},
        )


class Search:
    """One reduction: the failing graph, what was captured in it, and how a part of it is judged."""

    def __init__(self, graph: Graph, options: ReduceOptions, iteration: IterationOptions, say: Say) -> None:
        self.graph, self.options, self.iteration = graph, options, iteration
        self.tolerance = options.tolerance or TABLE[main_dtype(graph)]
        self.captured: dict[str, Any] = {}
        if options.feed or not graph.inputs:
            self.captured = {**capture(graph, options.feed), **options.reference.recorded}
            reference = named_alike(graph, options.feed, self.captured, options.reference)
            self.options = replace(options, reference=reference)
        elif iteration.check is None:
            raise UsageError(
                "give --inputs FILE: without --check or --interactive, a part can only be judged on real data"
            )
        else:
            say("no --inputs: nothing is captured, so the check must generate its own data at the cuts")
        self.oracle: Oracle | None = self._oracle()
        self.errors = {} if self.refused else self.options.reference.rank(graph, self.captured) if self.captured else {}

    def _oracle(self) -> Oracle | None:
        try:
            return self.options.reference.oracle(self.graph)
        except UsageError:
            if self.iteration.check is None and not self.refused:
                raise
            return None

    @cached_property
    def refused(self) -> bool:
        """Whether the engine does not load the model, which it does without optimizations: then that is reduced."""
        judged_here = self.iteration.check is None and bool(self.captured)
        return judged_here and not refusal(self.graph.model, self.options.engine).good

    def identity(self) -> str:
        """Return the fingerprint of everything that decides the verdicts."""
        reference, check = self.options.reference, self.iteration.check
        good = reference.graph(self.graph)
        return fingerprint(
            "reduce",
            model_digest(self.options.model),
            [{n: digest(a) for n, a in sorted(arrays.items())} for arrays in (self.options.feed, reference.recorded)],
            None if good is None else fingerprint(digest(good.model)),
            check.to_json() if check else [self.tolerance, self.options.engine.to_json()],
        )

    def companions(self) -> list[Path]:
        """Return the files that are written beside each iteration's model."""
        path = self.iteration.iter_artifact
        if path is None:
            return []
        ends = (INPUTS_SUFFIX, EXPECTED_SUFFIX)
        return [path.with_name(f"{path.name}.data"), *(path.with_name(path.stem + end) for end in ends)]

    def baselines(self, iterations: Iterations) -> None:
        """See the whole model fail and a good one pass. Raises :class:`UsageError` when either does not."""
        everything = frozenset(range(len(self.graph.nodes)))
        verdict = iterations.run("all", partial(self.judge, everything), "the whole model, which must fail")
        if verdict.good:
            raise iterations.pointless(f"the whole model passes ({verdict.reason}), so there is no failure to reduce")
        if self.iteration.check is None:
            return  # the built-in comparison of the reference with itself cannot fail
        verdict = iterations.run("good", self._make_good, "a good model, which must pass")
        if not verdict.good:
            raise iterations.pointless(
                f"the check fails on a good model too ({verdict.reason}): it does not test for this fault; narrow it "
                f"with --fail-regex or --fail-code"
            )

    def fails(self, iterations: Iterations, nodes: frozenset[int]) -> bool:
        """Judge one set of nodes."""
        what = f"{len(nodes)} of {len(self.graph.nodes)} nodes"
        labels = [self.graph.label(i) for i in sorted(nodes)[:20]]
        key = fingerprint(sorted(nodes))[:32]
        return not iterations.run(key, partial(self.judge, nodes), what, {"nodes": labels}).good

    def guesses(self) -> list[Sequence[int]]:
        """Return what to try first: the worst node, the two worst, all that stand out, and what connects them."""
        ranked = suspects(self.errors)
        worst = self.with_unknown(ranked[:1])
        sets = [ranked[:1], worst, ranked[:2], self.graph.closure(ranked[:2]), ranked, self.graph.closure(ranked)]
        return list({tuple(sorted(s)): s for s in sets if s}.values())

    def with_unknown(self, nodes: Sequence[int]) -> list[int]:
        """Add the nodes before these whose values no part can begin at.

        The good graph lacks them, as a fault that adds nodes lies between known values, or they are no tensors.
        """
        good = self.options.reference.graph(self.graph)
        known = set(self.captured) if good is None else set(self.captured) & set(good.producer)
        found, waiting = set(nodes), list(nodes)
        while waiting:
            read = [n for n in self.graph.reads[waiting.pop()] if n in self.graph.producer and n not in known]
            new = {self.graph.producer[name] for name in read} - found
            found |= new
            waiting += new
        return sorted(found)

    def judge(self, nodes: Collection[int]) -> Made:
        """Write the part for the check command, or compare it here. One that cannot be cut out does not fail."""
        try:
            return self._judge(nodes)
        except NoTensorError as error:
            if len(nodes) == len(self.graph.nodes):
                raise
            return Verdict(True, str(error))

    def _judge(self, nodes: Collection[int]) -> Made:
        path = self.iteration.iter_artifact
        if self.iteration.check is not None or path in self.iteration.artifacts:
            if path is None:
                raise UsageError("a check needs --iter-artifact, the file that it checks")
            self.write(nodes, path, expected=self.oracle is not None)
        return {} if self.iteration.check is not None else self.compare(nodes)

    def compare(self, nodes: Collection[int]) -> Verdict:
        """Run a part on its captured inputs and compare its outputs with what they should be."""
        model = self.graph.cut(nodes, self.captured)
        if self.refused:
            return refusal(model, self.options.engine)
        names = [value.name for value in model.graph.output]
        expected = self.expected(nodes, names)
        if not expected and len(nodes) == len(self.graph.nodes):
            reference = self.options.reference
            ours, theirs = (
                ", ".join(n) for n in (names, reference.model.outputs if reference.model else reference.recorded)
            )
            raise UsageError(f"cannot be compared: outputs {ours} are not known to the reference, which has {theirs}")
        if not expected:
            return Verdict(True, "nothing of it can be compared with the reference")
        try:
            actual = self.options.engine.run(model, self.captured, list(expected))
        except RunError as error:
            if len(nodes) == len(self.graph.nodes):
                raise
            return Verdict(True, f"not comparable: {error}")
        errors = {name: distance(actual[name], expected[name]) for name in expected}
        worst = max(errors, key=lambda name: errors[name])
        good = errors[worst] <= self.tolerance
        sign = "<=" if good else ">"
        return Verdict(good, f"rel_l2 {errors[worst]:.1e} {sign} {self.tolerance:.1e} at {worst}")

    def expected(self, nodes: Collection[int], outputs: Sequence[str]) -> dict[str, Any]:
        """Return what a part should give out for its captured inputs, as far as the reference knows."""
        if self.oracle is None:
            return {}
        taken, _ = self.graph.boundary(nodes)
        given = {name: self.captured[name] for name in taken if name in self.captured}
        good = self.options.reference.graph(self.graph)
        if good is not None and any(n in self.graph.producer and n not in good.producer for n in taken):
            return {}  # from what else it reads, the reference would compute what more nodes than these do
        if good is not None and all(name in good.producer or name in good.inputs for name in taken):
            # A fault may have lost an operand: the good nodes then read more than the part does.
            made = {name for i in nodes for name in self.graph.nodes[i].output}
            given = {name: array for name, array in self.captured.items() if name not in made}
        return self.oracle.expected(outputs, given)

    def write(self, nodes: Collection[int], path: Path, *, expected: bool) -> None:
        """Write a part, and beside it its captured inputs and expected outputs in the form that Polygraphy reads."""
        model = self.graph.cut(nodes, self.captured)
        values = self.expected(nodes, [value.name for value in model.graph.output]) if expected else {}
        self._write(model, self.captured, values, path)

    def _write(self, model: onnx.ModelProto, known: Arrays, values: Arrays, path: Path) -> None:
        """Write a model, its inputs where all are known, and expected values; nothing of an earlier part stays."""
        inputs, expected = (path.with_name(path.stem + suffix) for suffix in (INPUTS_SUFFIX, EXPECTED_SUFFIX))
        for stale in (inputs, expected):
            stale.unlink(missing_ok=True)
        save(model, path)
        names = [value.name for value in model.graph.input]
        if all(name in known for name in names) and names:
            save_inputs(inputs, [{name: tensor(known[name]) for name in names}])
        if values:
            save_outputs(expected, [{name: tensor(array) for name, array in values.items()}], "reference")

    def _make_good(self) -> Made:
        """Write the reference model, or one that hands its first input (or a constant) through, which must pass."""
        path = self.iteration.iter_artifact
        if path is None:
            raise UsageError("a check needs --iter-artifact, the file that it checks")
        good = self.options.reference.model
        if good is not None:
            feed = fitted(self.options.feed, good.inputs)
            self._write(
                good.model, feed, self.options.reference.outputs(self.graph, feed) if self.captured else {}, path
            )
            return {}
        name = next(iter(self.graph.inputs), None)
        one = onnx.helper.make_tensor_value_info("one", onnx.TensorProto.FLOAT, [1])
        value = one if name is None else self.graph.typed(name, self.captured)
        passed = onnx.ValueInfoProto()
        passed.CopyFrom(value)
        passed.name = f"{value.name}_passed"
        taken = [] if name is None else [value]
        weights = [] if name else [onnx.helper.make_tensor(one.name, onnx.TensorProto.FLOAT, [1], [1.0])]
        node = onnx.helper.make_node("Identity", [value.name], [passed.name])
        self._write(self.graph.with_graph([node], taken, [passed], weights), self.captured, {}, path)
        return {}


def refusal(model: onnx.ModelProto, engine: OnnxRuntime) -> Verdict:
    """Judge whether the engine loads a model; one that it refuses without optimizations too is no failing part."""
    try:
        engine.load(model)
    except RunError as error:
        with suppress(RunError):
            PLAIN.load(model)
            return Verdict(False, str(error))
    return Verdict(True, "onnxruntime loads it, or refuses it without optimizations too")
