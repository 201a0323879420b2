"""Mixed precision written into the graph, as strongly typed engines need it: operators between casts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ditto_core.errors import UsageError
from ditto_core.graphs.constants import without_large_weights
from ditto_core.graphs.files import subgraphs
from ditto_core.graphs.graph import Graph
from ditto_core.graphs.precision import FLOATS, is_floating, set_float_type, widened_tensor

LOW = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
HIGH = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16}
"""The dtypes that operators can be kept in."""


@dataclass(frozen=True)
class Mixer:
    """Makes variants of a graph in which some operators of dtype ``low`` run in ``high`` (ONNX's numbers of dtypes)."""

    graph: Graph
    low: int
    high: int

    @classmethod
    def of(cls, graph: Graph, low: str, high: str) -> Mixer:
        """Check that the graph is in ``low``. Raises :class:`UsageError` when it is not, or a dtype is unknown."""
        if high not in HIGH or low not in LOW or high == low:
            raise UsageError(
                f"cannot keep operators of a {low} graph in {high}, expected float32, or bfloat16 for float16"
            )
        mixer = cls(graph, LOW[low], HIGH[high])
        if not mixer.candidates():
            raise UsageError(f"no operator of the graph computes in {low}, so none can be kept in {high}")
        return mixer

    def is_low(self, name: str) -> bool:
        """Tell whether a value or a weight is in the low dtype."""
        if name in self.graph.weights:
            return bool(self.graph.weights[name].data_type == self.low)
        value = self.graph.types.get(name)
        return value is not None and value.type.tensor_type.elem_type == self.low

    def candidates(self) -> list[int]:
        """Return the nodes that read or write the low dtype; those with subgraphs stay as they are."""
        return [
            i
            for i, node in enumerate(self.graph.nodes)
            if any(self.is_low(n) for n in (*node.input, *node.output) if n)
            and not any(a.HasField("g") or a.graphs for a in node.attribute)
        ]

    def mixed(self, kept: Collection[int]) -> onnx.ModelProto:
        """Return the graph with the nodes ``kept`` in the high dtype. Inputs, outputs and weights keep their dtypes."""
        nodes: list[Any] = []
        raised: set[str] = set()
        for i, node in enumerate(self.graph.nodes):
            if i not in kept:
                nodes.append(node)
                continue
            for name in node.input:
                if name and self.is_low(name) and self.high_name(name) not in raised:
                    nodes.append(self._cast(name, self.high_name(name), self.high))
                    raised.add(self.high_name(name))
            nodes.append(self._kept(node))
            for name in node.output:
                if name and self.is_low(name):
                    raised.add(self.high_name(name))
                    if self._wanted_low(name, kept):
                        nodes.append(self._cast(self.high_name(name), name, self.low))
        graph = self.graph.model.graph
        produced = {name for node in nodes for name in node.output}
        result = self.graph.with_graph(nodes, graph.input, graph.output, graph.initializer)
        result.graph.value_info.extend(value for value in graph.value_info if value.name in produced)
        result.graph.value_info.extend(self._typed_high(name) for name in produced if name in raised)
        return result

    def high_name(self, name: str) -> str:
        """Return the name of a value's form in the high dtype."""
        return f"{name}__{onnx.TensorProto.DataType.Name(self.high).lower()}"

    def emulated(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a float32 graph that rounds every value where the engine would store it in a smaller dtype.

        It is what a strongly typed engine computes that accumulates in float32: the CPU provider of ONNX Runtime
        instead runs many float16 operators in float32 without rounding in between, and has no bfloat16.
        """
        graph, typed = Graph(model), Graph(with_inner_types(model))
        nodes = self._rounding(typed.nodes, typed.types)
        weights = [widened_tensor(tensor, TensorProto.FLOAT) for tensor in graph.weights.values()]
        inputs, outputs = ([typed_float32(v) for v in side] for side in (graph.inputs.values(), model.graph.output))
        return graph.with_graph(nodes, inputs, outputs, weights)

    def rounded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return float32 arrays as they are after a round trip through the dtype that the graph stores each in."""
        result = {}
        for name, array in values.items():
            low = is_floating(np.asarray(array)) and self.is_low(name)
            with np.errstate(over="ignore"):
                small = array.astype(helper.tensor_dtype_to_np_dtype(self.low)) if low else array
            result[name] = small.astype(np.float32) if low else array
        return result

    def _rounding(self, nodes: Iterable[Any], types: Mapping[str, onnx.ValueInfoProto]) -> list[Any]:
        result: list[Any] = []
        for node in nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            set_float_type(copy, TensorProto.FLOAT)
            for inner, plain in zip(subgraphs(copy), subgraphs(node), strict=True):
                known = {v.name: v for v in (*plain.value_info, *plain.input, *plain.output)}
                del inner.node[:]
                inner.node.extend(self._rounding(plain.node, known))
            result.append(copy)
            for j, name in enumerate(node.output):
                stored = self._stored(types.get(name))
                if stored:
                    copy.output[j] = f"{name}__unrounded"
                    result.append(helper.make_node("Cast", [copy.output[j]], [f"{name}__rounded"], to=stored))
                    result.append(helper.make_node("Cast", [f"{name}__rounded"], [name], to=TensorProto.FLOAT))
        return result

    def _stored(self, value: onnx.ValueInfoProto | None) -> int:
        kind = value.type.tensor_type.elem_type if value is not None else 0
        return kind if kind in (self.low, self.high) and kind != TensorProto.FLOAT else 0

    def _kept(self, node: Any) -> Any:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if self.low in {a.i for a in node.attribute if a.name in ("to", "dtype")} | {
            a.t.data_type for a in node.attribute if a.name == "value"
        }:
            set_float_type(copy, self.high)
        for side in (copy.input, copy.output):
            side[:] = [self.high_name(name) if name and self.is_low(name) else name for name in side]
        return copy

    def _wanted_low(self, name: str, kept: Collection[int]) -> bool:
        readers = self.graph.readers.get(name, ())
        return name in self.graph.outputs or any(reader not in kept for reader in readers)

    def _cast(self, source: str, target: str, elem_type: int) -> Any:
        return helper.make_node("Cast", [source], [target], name=f"ditto_cast_{target}", to=elem_type)

    def _typed_high(self, high_name: str) -> onnx.ValueInfoProto:
        value = onnx.ValueInfoProto()
        name = high_name.rpartition("__")[0]
        if name in self.graph.types:
            value.CopyFrom(self.graph.types[name])
        else:
            value.type.tensor_type.shape.dim.extend(
                onnx.TensorShapeProto.Dimension(dim_value=d) for d in self.graph.weights[name].dims
            )
        value.name = high_name
        value.type.tensor_type.elem_type = self.high
        return value


def with_inner_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the types of the values inside its nodes, where it has such nodes; weights may be gone."""
    if not any(True for node in model.graph.node for _ in subgraphs(node)):
        return model
    return onnx.shape_inference.infer_shapes(without_large_weights(model))


def typed_float32(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Return the type of a value with float32 for any other floating-point dtype."""
    result = onnx.ValueInfoProto()
    result.CopyFrom(value)
    if result.type.tensor_type.elem_type in FLOATS:
        result.type.tensor_type.elem_type = TensorProto.FLOAT
    return result
