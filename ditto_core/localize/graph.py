"""What lies between two captured tensors: the exported ONNX graph, cut at the taps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto_core.export import source_line

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
        from ditto_core.onnx_graph import read_graph

        self.path = path
        self.model = read_graph(path)
        self._nodes = {output: node for node in self.model.graph.node for output in node.output if output}
        self._order = {id(node): i for i, node in enumerate(self.model.graph.node)}
        self.inputs = {value.name for value in self.model.graph.input}

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
                # What a shape is taken from has no part in the values.
                waiting += [source for source in node.input if source and node.op_type != "Shape"]
        ordered = sorted(nodes.values(), key=lambda node: self._order[id(node)])
        return Segment(value, tuple(ends), tuple(describe(node) for node in ordered))


def describe(node: Any) -> Operator:
    """Return what the exporter wrote about a node."""
    notes: Mapping[str, str] = {entry.key: entry.value for entry in node.metadata_props}
    fx_node = notes.get(f"{METADATA}fx_node", "").split(":")[0].strip(" %")
    return Operator(node.op_type, node.output[0], fx_node, source_line(notes.get(f"{METADATA}stack_trace", "")), node)
