"""Cut the smallest subgraph out of an ONNX file: the nodes between known values and one result, weights included."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ditto_core.errors import SelectorError, nearest
from ditto_core.graphs.files import read_graph, value_names

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[Any]]

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Cut:
    """What lies between known values and ``value``: nodes in order, the known values they read, their weights."""

    value: str
    nodes: tuple[Any, ...]
    inputs: tuple[str, ...]
    weights: tuple[Any, ...]


def cut(model: onnx.ModelProto, value: str, known: Collection[str]) -> Cut:
    """Walk upstream from ``value`` and stop at ``known`` values and graph inputs.

    Raises :class:`SelectorError` when no node computes ``value``.
    """
    makers = {output: i for i, node in enumerate(model.graph.node) for output in node.output if output}
    if value not in makers:
        raise SelectorError(f"no node computes {value!r}{nearest(value, value_names(model))}")
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    chosen: set[int] = {makers[value]}
    reads: dict[str, None] = {}
    pending = [makers[value]]
    while pending:
        for name in names_read(model.graph.node[pending.pop()]):
            reads[name] = None
            if name in makers and name not in known and makers[name] not in chosen:
                chosen.add(makers[name])
                pending.append(makers[name])
    inside = {output for i in chosen for output in model.graph.node[i].output}
    inputs = tuple(n for n in reads if n not in weights and (n in known or n not in inside) and n != value)
    nodes = tuple(model.graph.node[i] for i in sorted(chosen))
    return Cut(value, nodes, inputs, tuple(weights[name] for name in reads if name in weights))


def names_read(node: Any) -> Iterator[str]:
    """Yield the values that a node reads, those of its inner graphs included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            made = {output for inner in graph.node for output in inner.output}
            made |= {value.name for value in (*graph.input, *graph.initializer)}
            yield from (name for inner in graph.node for name in names_read(inner) if name not in made)


def extract(path: Path, value: str, known: Arrays, result: npt.NDArray[Any]) -> onnx.ModelProto:
    """Return a model of its own that computes ``value`` from ``known`` arrays; ``result`` shows the output's type."""
    model = read_graph(path)
    part = cut(model, value, known.keys())
    graph = helper.make_graph(
        [strip(node) for node in part.nodes],
        "repro",
        [value_info(name, known[name]) for name in part.inputs],
        [value_info(value, result)],
        [with_data(tensor, path.parent) for tensor in part.weights],
    )
    return helper.make_model(
        graph, opset_imports=model.opset_import, functions=list(model.functions), ir_version=model.ir_version
    )


def strip(node: Any) -> Any:
    """Return a node without its metadata, which names source files."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.metadata_props[:]
    return copy


def value_info(name: str, array: npt.NDArray[Any]) -> Any:
    """Describe a value by an example of it; all dimensions stay free."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, [None] * array.ndim)


def with_data(tensor: Any, folder: Path) -> Any:
    """Return a weight with its data inside, read from the one place in the file where it lies."""
    copy = TensorProto()
    copy.CopyFrom(tensor)
    if copy.data_location != TensorProto.EXTERNAL:
        return copy
    facts = {entry.key: entry.value for entry in copy.external_data}
    with (folder / facts["location"]).open("rb") as file:
        file.seek(int(facts.get("offset", 0)))
        copy.raw_data = file.read(int(facts["length"]) if "length" in facts else -1)
    del copy.external_data[:]
    copy.data_location = TensorProto.DEFAULT
    return copy


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that computes in float64 throughout: weights, constants, casts, inputs and outputs."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for i, tensor in enumerate(wide.graph.initializer):
        wide.graph.initializer[i].CopyFrom(widened(tensor))
    for node in wide.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in FLOATS:
                attribute.i = TensorProto.DOUBLE
            if attribute.HasField("t"):
                attribute.t.CopyFrom(widened(attribute.t))
    for value in (*wide.graph.input, *wide.graph.output):
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return wide


def widened(tensor: Any) -> Any:
    """Return a floating tensor in float64, another as it is."""
    if tensor.data_type not in FLOATS:
        return tensor
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)


def evaluate(model: onnx.ModelProto, inputs: Arrays) -> npt.NDArray[Any]:
    """Compute a model's only output with ONNX's own reference implementation, which is plain numpy."""
    from onnx.reference import ReferenceEvaluator

    wanted: Sequence[str] = [value.name for value in model.graph.input]
    doubles = {v.name for v in model.graph.input if v.type.tensor_type.elem_type == TensorProto.DOUBLE}
    feed = {name: inputs[name].astype(np.float64) if name in doubles else inputs[name] for name in wanted}
    with np.errstate(all="ignore"):
        (result,) = ReferenceEvaluator(model).run(None, feed)
    return np.asarray(result)
