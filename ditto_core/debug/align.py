"""Which values of two ONNX files are the same, where their exporters named them differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from ditto_core.debug.oracle import ModelOracle, distance
from ditto_core.graphs.files import subgraphs
from ditto_core.graphs.graph import Arrays, Graph

NEAR = 1e-2
"""Rel-L2 up to which two operators compute the same from the same inputs."""

HEALED = 0.5
"""Share of an output's error that is left, at most, when the right value stands in the place of a wrong one."""


def in_names_of(failing: Graph, captured: Arrays, good: Graph, values: Arrays) -> Graph:
    """Return ``good`` with the value names of ``failing``; as it is when most names of ``failing`` are its own too.

    ``captured`` and ``values``: what each computes on the same inputs. A value without a counterpart gets a name that
    is not in ``failing``.
    """
    if 2 * sum(name in good.producer for name in failing.producer) > len(failing.producer):
        return good
    counterpart = {theirs: ours for ours, theirs in Alignment(failing, captured, good, values).pairs.items()}
    taken = {*failing.producer, *failing.weights, *failing.inputs}
    foreign = {n: f"{n}//reference" for n in (*good.producer, *good.weights) if n in taken and n not in counterpart}
    return Graph(renamed(good.model, {**counterpart, **foreign}))


class Alignment:
    """The search for ``pairs``: value of the failing graph -> value of the good one.

    Two operators correspond when they are of one kind, read corresponding values and compute the same from the failing
    graph's inputs. One that computes something else is the fault, or the exporters did the same in other steps: it
    corresponds only where no other could, and where the good value in its place brings an output of the failing graph
    closer to the good one.
    """

    def __init__(self, failing: Graph, captured: Arrays, good: Graph, values: Arrays) -> None:
        self.failing, self.good, self.captured, self.values = failing, good, captured, values
        self.outputs = [name for name in failing.outputs if name in good.producer and name in captured]
        self.pairs = {name: name for name in (*failing.inputs, *self.outputs) if name in {*good.inputs, *good.outputs}}
        self._nodes: dict[int, int] = {}
        self._index: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for i, node in enumerate(good.nodes):
            self._index.setdefault((node.op_type, activations(good, i)), []).append(i)
        nodes = range(len(failing.nodes))
        while sum(self._pair(node) for node in nodes if node not in self._nodes):
            pass  # a pair that was found late may leave one candidate to an earlier operator

    def _pair(self, node: int) -> bool:
        found = self._candidates(node)
        chosen = next((other for other in found if self._same(node, other)), None)
        if chosen is None and len(found) == 1 and self._heals(node, found[0]):
            chosen = found[0]
        if chosen is None:
            return False
        self._nodes[node] = chosen
        pairs = zip(self.failing.nodes[node].output, self.good.nodes[chosen].output, strict=False)
        taken = set(self.pairs.values())
        self.pairs.update({ours: o for ours, o in pairs if ours and o and ours not in self.pairs and o not in taken})
        return True

    def _candidates(self, node: int) -> Sequence[int]:
        """Return the good nodes that are left, of the same kind, that read what this one reads; weights may differ."""
        reads = activations(self.failing, node)
        if any(name not in self.pairs for name in reads):
            return []
        wanted = (self.failing.nodes[node].op_type, tuple(self.pairs[name] for name in reads))
        used = set(self._nodes.values())
        return [other for other in self._index.get(wanted, []) if other not in used]

    def _same(self, node: int, other: int) -> bool:
        ours, theirs = self.failing.nodes[node].output[0], self.good.nodes[other].output[0]
        given = {self.pairs[n]: self.captured[n] for n in activations(self.failing, node) if n in self.captured}
        expected = ModelOracle(self.good).expected([theirs], given)
        return near(self.captured, ours, expected, theirs) < NEAR

    def _heals(self, node: int, other: int) -> bool:
        names = zip(self.failing.nodes[node].output, self.good.nodes[other].output, strict=False)
        right = {ours: self.values[theirs] for ours, theirs in names if theirs in self.values}
        rest = [name for name in self.outputs if name not in right]
        given = {**{name: self.captured[name] for name in self.failing.inputs}, **right}
        healed = {**ModelOracle(self.failing).expected(rest, given), **right}
        before, after = (
            {name: near(values, name, self.values, name) for name in self.outputs} for values in (self.captured, healed)
        )
        return any(after[name] < HEALED * before[name] for name in self.outputs)


def near(ours: Arrays, name: str, theirs: Arrays, other: str) -> float:
    """Return the rel-L2 between two values; infinite where one is not known."""
    return distance(ours[name], theirs[other]) if name in ours and other in theirs else float("inf")


def activations(graph: Graph, node: int) -> tuple[str, ...]:
    """Return what a node reads, without weights."""
    return tuple(name for name in graph.reads[node] if name not in graph.weights)


def renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Return the model with other names of values, inside its subgraphs too."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    rename(result.graph, names)
    return result


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Give the values of a graph and of the graphs inside its nodes other names."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
        for inner in subgraphs(node):
            rename(inner, names)
