"""What lies between two captured tensors: the exported ONNX graph, cut at the taps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto_core.sites import source_line

RESHAPING = ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Slice", "Split", "Tile", "Transpose")
METADATA = "pkg.torch.onnx."


@dataclass(frozen=True)
class Operator:
    """One node of the exported graph: its operator, the FX node and the source line that it came from."""

    kind: str
    value: str
    fx_node: str
    source: str
    node: Any

    def __str__(self) -> str:
        return f"{self.kind} {self.fx_node or self.value}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Segment:
    """The operators that compute a value from the nearest values upstream that are known, in topological order."""

    value: str
    inputs: tuple[str, ...]
    operators: tuple[Operator, ...]


class Graph:
    """The exported graph of a model, before any backend touched it."""

    def __init__(self, path: Path) -> None:
        from ditto_core.graphs.files import read_graph

        self.path = path
        self.model = read_graph(path)
        self._nodes = {output: node for node in self.model.graph.node for output in node.output if output}
        self._order = {id(node): i for i, node in enumerate(self.model.graph.node)}
        self.constants = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self.inputs = {value.name for value in self.model.graph.input}

    def producer(self, value: str) -> Any:
        """Return the node that computes a value, or None."""
        return self._nodes.get(value)

    def segment(self, value: str, known: Collection[str]) -> Segment:
        """Walk upstream from ``value`` to ``known`` values and graph inputs. Constants are part of the operators."""
        nodes: dict[int, Any] = {}
        ends: dict[str, None] = {}
        waiting = [value]
        while waiting:
            name = waiting.pop()
            node = self._nodes.get(name)
            if node is None or (name in known and name != value):
                if name in known or name in self.inputs:
                    ends.setdefault(name)
                continue
            if id(node) not in nodes:
                nodes[id(node)] = node
                waiting += [source for source in data_inputs(node) if source]
        ordered = sorted(nodes.values(), key=lambda node: self._order[id(node)])
        return Segment(value, tuple(ends), tuple(describe(node) for node in ordered))


def data_inputs(node: Any) -> list[str]:
    """Return the inputs that a node's values come from, without those that only say in what shape."""
    return [] if node.op_type == "Shape" else list(node.input[:1] if node.op_type in RESHAPING else node.input)


def describe(node: Any) -> Operator:
    """Return what the exporter wrote about a node."""
    notes: Mapping[str, str] = {entry.key: entry.value for entry in node.metadata_props}
    fx_node = notes.get(f"{METADATA}fx_node", "").split(":")[0].strip(" %")
    return Operator(node.op_type, node.output[0], fx_node, source_line(notes.get(f"{METADATA}stack_trace", "")), node)
