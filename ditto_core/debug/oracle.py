"""What a part of the graph should have computed, and each operator's local error."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import torch

from ditto_core.compare.metrics import ShapeMismatch, measure
from ditto_core.debug.evaluate import evaluate, widen
from ditto_core.errors import UsageError
from ditto_core.graphs.files import file_digests
from ditto_core.graphs.graph import Arrays, Graph
from ditto_core.graphs.precision import fitted
from ditto_core.system.fingerprint import fingerprint

Ranking = Mapping[int, float]
"""Node (position in the graph) -> rel-L2 of its local error, worst output; nodes that could not be rated are absent."""


class Oracle(Protocol):
    """Tells what values should be."""

    def expected(self, outputs: Sequence[str], given: Arrays) -> dict[str, Any]:
        """Return those ``outputs`` that it knows, computed from the values that are ``given``."""
        ...


@dataclass(frozen=True)
class ModelOracle:
    """A good model of the same computation. Values are matched by name; its dtypes may be other ones.

    What lies between given values and outputs is evaluated from the *given* values, so the result is what this part
    alone should have done with its inputs.
    """

    graph: Graph

    def expected(self, outputs: Sequence[str], given: Arrays) -> dict[str, Any]:
        """See :class:`Oracle`."""
        known = [name for name in outputs if name in self.graph.producer]
        nodes = self.graph.upstream(known, given)
        taken, _ = self.graph.boundary(nodes)
        feed = fitted({n: given[n] for n in taken if n in given}, self.graph.types)
        if not known or len(feed) < len(taken):
            return {}
        inputs = [self.graph.typed(name, feed) for name in feed]
        ends = [onnx.ValueInfoProto(name=name) for name in known]
        model = self.graph.with_graph([self.graph.nodes[i] for i in nodes], inputs, ends, self.graph.weights_of(nodes))
        return evaluate(model, feed, known)


@dataclass(frozen=True)
class RecordedOracle:
    """Expected values that were recorded: they hold for a part whose inputs were recorded too."""

    values: Arrays

    def expected(self, outputs: Sequence[str], given: Arrays) -> dict[str, Any]:
        """See :class:`Oracle`."""
        return {name: self.values[name] for name in outputs if name in self.values}


def exploded(graph: Graph, given: Arrays) -> tuple[onnx.ModelProto, dict[str, Any], dict[str, str]]:
    """Return a model in which every node reads given values, so that one run evaluates each node separately.

    The second result is what to feed, the third maps the value that a node computes to its name in that model.
    """
    fresh = {name: f"{name}//computed" for name in graph.producer if name in given}
    nodes = []
    for node in graph.nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.output[:] = [fresh.get(name, name) for name in node.output]
        nodes.append(copy)
    read = {name for names in graph.reads for name in names} - set(graph.weights)
    feed = fitted({name: given[name] for name in sorted(read) if name in given}, graph.types)
    inputs = [graph.typed(name, feed) for name in feed]
    outputs = [onnx.ValueInfoProto(name=name) for name in fresh.values()]
    return graph.with_graph(nodes, inputs, outputs, list(graph.weights.values())), feed, fresh


def local_errors(failing: Graph, captured: Arrays, good: Graph) -> dict[int, float]:
    """Return what each of the failing graph's nodes adds itself: one run of ``good`` on the captured inputs of each.

    A node is worth the rel-L2 between its captured output and what ``good`` computes from its captured inputs; a NaN
    that the reference makes too counts as equal.
    """
    model, feed, fresh = exploded(good, captured)
    values = evaluate(model, feed, list(fresh.values()))
    errors: dict[int, float] = {}
    for name, node in failing.producer.items():
        expected = values.get(fresh.get(name, ""))
        if expected is not None and name in captured:
            errors[node] = max(errors.get(node, 0.0), distance(captured[name], expected))
    return errors


def distance(actual: Any, expected: Any) -> float:
    """Return rel-L2 between two arrays; infinite when shapes differ, or a NaN or Inf stands on one side."""
    try:
        return measure(tensor(actual), tensor(expected), equal_nan=True, threads=1).rel_l2
    except ShapeMismatch:
        return math.inf


def tensor(array: Any) -> torch.Tensor:
    """Return an array as a tensor; dtypes that torch has no numpy form of (bfloat16) become float32."""
    array = np.asarray(array)
    if array.dtype.kind not in "fiub":
        array = array.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)


def suspects(errors: Ranking, limit: int = 16) -> list[int]:
    """Return the nodes that stand out, worst first: ten times the median error and at least 1e-12."""
    if not errors:
        return []
    ordered = sorted(errors, key=lambda node: (-errors[node], node))
    median = sorted(errors.values())[len(errors) // 2]
    return [node for node in ordered if errors[node] > max(10 * median, 1e-12)][:limit]


@dataclass(frozen=True)
class Reference:
    """How the good side is made: another model, the same model in a higher precision, or recorded values."""

    model: Graph | None = None
    precision: str = ""
    recorded: Arrays = field(default_factory=dict)

    def oracle(self, failing: Graph) -> Oracle:
        """Return what tells expected values of parts of ``failing``. Raises :class:`UsageError` when nothing can."""
        graph = self.graph(failing)
        if graph is not None:
            return ModelOracle(graph)
        if self.recorded:
            return RecordedOracle(self.recorded)
        raise UsageError(
            "nothing to compare with: give --reference MODEL, --reference-precision float64, --expected FILE, --check "
            "or --interactive"
        )

    def graph(self, failing: Graph) -> Graph | None:
        """Return the good graph, if the good side is one."""
        good = self.model or (failing if self.precision else None)
        return widen(good, self.precision) if good is not None and self.precision else good

    def outputs(self, failing: Graph, feed: Arrays) -> dict[str, Any]:
        """Return the good outputs of the whole graph."""
        return self.oracle(failing).expected(failing.outputs, feed)

    def rank(self, failing: Graph, captured: Arrays) -> dict[int, float]:
        """Return the local errors; empty when nothing is known to be good.

        With recorded values, the failing graph's own nodes run on them.
        """
        good = self.graph(failing)
        if good is not None:
            return local_errors(failing, captured, good)
        return local_errors(failing, self.recorded, failing) if self.recorded else {}


def main_dtype(graph: Graph) -> str:
    """Return the dtype of most of the weights' bytes, or float32: it chooses the tolerance from the table."""
    names = {1: "float32", 10: "float16", 16: "bfloat16", 11: "float64"}
    sizes: dict[str, int] = {}
    for weight in graph.weights.values():
        if weight.data_type in names:
            name = names[weight.data_type]
            sizes[name] = sizes.get(name, 0) + weight.ByteSize()
    return max(sizes, key=lambda name: sizes[name]) if sizes else "float32"


def digest(content: Any) -> str:
    """Return the SHA-256 of an array's or a model's bytes."""
    data = content.SerializeToString() if isinstance(content, onnx.ModelProto) else content.tobytes()
    return hashlib.sha256(data).hexdigest()


def model_digest(path: Path) -> str:
    """Return the digest of an ONNX file with its weights, under whatever name it lies."""
    return fingerprint(*file_digests(path).values())
