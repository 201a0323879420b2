"""What an ONNX file says of a node (module, class and source line, for messages and naming kernels) and of a value."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

from ditto_core.graphs.files import subgraphs
from ditto_core.sites import source_line

METADATA = "pkg.torch.onnx."
WRAPPER = "module."
STRING = re.compile(r"""'([^']*)'|"([^"]*)\"""")
RESHAPING = ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Slice", "Split", "Tile", "Transpose")


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
    fx_node: str = ""

    @property
    def origin(self) -> str:
        """``module (class), source``, as far as known."""
        short = self.module_class.rpartition(".")[2]
        where = f"{self.module} ({short})" if self.module and short else self.module
        return ", ".join(part for part in (where, self.source) if part)

    def __str__(self) -> str:
        return f"{self.operator} {self.fx_node or self.outputs[0]}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Segment:
    """The operators that compute a value from the nearest values upstream that are known, in topological order."""

    value: str
    inputs: tuple[str, ...]
    operators: tuple[Node, ...]


def described(node: onnx.NodeProto, index: int) -> Node:
    """Return what the exporter wrote about the node at a position."""
    meta = {p.key.removeprefix(METADATA): p.value for p in node.metadata_props if p.key.startswith(METADATA)}
    scopes, classes = _strings(meta.get("name_scopes", "")), _strings(meta.get("class_hierarchy", ""))
    inside = len(scopes) > 1 and scopes[-2].startswith(WRAPPER)
    return Node(
        node.name or f"{node.op_type}_{index}",
        node.op_type,
        tuple(i for i in node.input if i),
        tuple(o for o in node.output if o),
        scopes[-2].removeprefix(WRAPPER) if inside else "",
        classes[-2] if inside and len(classes) > 1 else "",
        source_line(meta.get("stack_trace", "")).removesuffix(": "),
        meta.get("fx_node", "").split(":")[0].strip(" %"),
    )


def unshare_names(graph: onnx.GraphProto) -> None:
    """Take away the names that several nodes of a graph have: they name none, and ONNX Runtime refuses the file."""
    count = Counter(node.name for node in graph.node)
    for node in graph.node:
        node.name = node.name if count[node.name] == 1 else ""
        for inner in subgraphs(node):
            unshare_names(inner)


def _strings(text: str) -> list[str]:
    """Read a list of strings as Python prints it; ``ast`` takes most of the time of reading a file."""
    return [a or b for a, b in STRING.findall(text)] if text.startswith("[") and text.endswith("]") else []


def read_by(node: onnx.NodeProto) -> Iterable[str]:
    """Yield the outer values that a node reads, those of its subgraphs included."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        own = {v.name for v in (*graph.input, *graph.initializer)} | {n for m in graph.node for n in m.output}
        outer = (name for inner in graph.node for name in read_by(inner))
        yield from (name for name in (*outer, *(v.name for v in graph.output)) if name not in own)


def data_of(node: onnx.NodeProto) -> Sequence[str]:
    """Return the values that a node's numbers come from, without those that only say in what shape."""
    if node.op_type == "Shape":
        return ()
    return node.input[:1] if node.op_type in RESHAPING else tuple(dict.fromkeys(read_by(node)))


def shape_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Return the dimensions; one that has neither a size nor a name is ``?``."""
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in dims)
