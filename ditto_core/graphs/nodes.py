"""What the ONNX file says of its nodes: module, class and source line, for messages and for naming kernels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ditto_core.graphs.files import read_graph
from ditto_core.sites import source_line

METADATA = "pkg.torch.onnx."
DTYPES = {"float": "float32", "double": "float64"}
WRAPPER = "module."


@dataclass(frozen=True)
class Node:
    """One ONNX node. ``module`` is the Hugging Face module path, ``source`` the eager line that it came from."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str = ""
    module_class: str = ""
    source: str = ""

    @property
    def origin(self) -> str:
        """``module (class), source``, as far as known."""
        short = self.module_class.rpartition(".")[2]
        where = f"{self.module} ({short})" if self.module and short else self.module
        return ", ".join(part for part in (where, self.source) if part)


@dataclass(frozen=True)
class Graph:
    """The nodes of an ONNX file by name, its inputs with their dimensions, and the shapes of its values."""

    nodes: Mapping[str, Node]
    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int | str, ...]]
    dtypes: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Graph:
        """Read an ONNX file without its weights."""
        model = read_graph(path)
        graph = model.graph
        constants = {tensor.name for tensor in graph.initializer}
        nodes = [_node(node, i) for i, node in enumerate(graph.node)]
        values = (*graph.input, *graph.output, *graph.value_info)
        return cls(
            {node.name: node for node in nodes},
            {value.name: _shape(value) for value in graph.input if value.name not in constants},
            tuple(value.name for value in graph.output),
            {value.name: _shape(value) for value in values},
            {value.name: _dtype(value) for value in values},
        )

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that computes each value."""
        return {output: node for node in self.nodes.values() for output in node.outputs}

    def frontier(self, names: Iterable[str]) -> list[str]:
        """Return the values that a set of nodes computes and that something outside the set uses."""
        inside = set(names)
        made = {value for name in inside if name in self.nodes for value in self.nodes[name].outputs}
        used = {value for node in self.nodes.values() if node.name not in inside for value in node.inputs}
        return sorted(made & (used | set(self.outputs)))

    def mentioned(self, text: str) -> Node | None:
        """Return the last node whose name stands in a message."""
        words = re.findall(r"[\w./:]+", text)
        return next((self.nodes[word.strip(".:")] for word in reversed(words) if word.strip(".:") in self.nodes), None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**asdict(self), "nodes": [asdict(node) for node in self.nodes.values()]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        """Inverse of :meth:`to_json`."""
        lists = ("inputs", "outputs")
        nodes = [Node(**{**node, **{name: tuple(node[name]) for name in lists}}) for node in data["nodes"]]
        shapes = {name: {k: tuple(v) for k, v in data[name].items()} for name in ("inputs", "shapes")}
        nodes_by_name = {node.name: node for node in nodes}
        return cls(nodes_by_name, outputs=tuple(data["outputs"]), dtypes=data["dtypes"], **shapes)


def _node(node: Any, index: int) -> Node:
    meta = {p.key.removeprefix(METADATA): p.value for p in node.metadata_props if p.key.startswith(METADATA)}
    scopes, classes = _strings(meta.get("name_scopes")), _strings(meta.get("class_hierarchy"))
    inside = len(scopes) > 1 and scopes[-2].startswith(WRAPPER)
    return Node(
        node.name or f"{node.op_type}_{index}",
        node.op_type,
        tuple(i for i in node.input if i),
        tuple(o for o in node.output if o),
        scopes[-2].removeprefix(WRAPPER) if inside else "",
        classes[-2] if inside and len(classes) > 1 else "",
        source_line(meta.get("stack_trace", "")).removesuffix(": "),
    )


def _strings(text: str | None) -> list[str]:
    try:
        value = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError):
        return []
    return [str(item) for item in value] if isinstance(value, list) else []


def _shape(value: Any) -> tuple[int | str, ...]:
    """Return the dimensions; one that has neither a size nor a name is ``?``."""
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in dims)


def _dtype(value: Any) -> str:
    import onnx

    name = str(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)).lower()
    return DTYPES.get(name, name)
