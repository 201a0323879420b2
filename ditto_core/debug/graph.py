"""Cut, type and store ONNX graphs. Nodes are known by their position in topological order, values by their name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import helper, numpy_helper

from ditto_core.errors import UsageError
from ditto_core.graphs.files import read_model

Arrays = Mapping[str, np.ndarray[Any, Any]]

LARGEST = 1_500_000_000
"""Bytes of weights from which a file keeps them beside the graph: protobuf ends at 2 GB."""


class NoTensorError(UsageError):
    """A part would begin or end at a sequence or an optional value."""


@dataclass(frozen=True)
class Graph:
    """A model with its weights in memory.

    Constants are initializers, so that every node computes something; local functions are the operators they hold.
    """

    model: onnx.ModelProto

    @classmethod
    def load(cls, path: Path) -> Graph:
        """Read a model. Raises :class:`UsageError` when it is none."""
        try:
            model = read_model(path)
        except FileNotFoundError as error:
            raise UsageError(f"{path} is not there, or its weights are not") from error
        except Exception as error:
            raise UsageError(f"{path} is no ONNX model: {next(iter(str(error).splitlines()), '')}") from error
        if not model.graph.node:
            raise UsageError(f"{path} has no nodes")
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        return cls(constants_as_initializers(model))

    @property
    def nodes(self) -> Sequence[Any]:
        """The nodes, in topological order."""
        return self.model.graph.node  # type: ignore[no-any-return]

    @cached_property
    def weights(self) -> Mapping[str, onnx.TensorProto]:
        """The initializers by name."""
        return {tensor.name: tensor for tensor in self.model.graph.initializer}

    @cached_property
    def inputs(self) -> Mapping[str, onnx.ValueInfoProto]:
        """The graph's inputs by name, without initializers."""
        return {value.name: value for value in self.model.graph.input if value.name not in self.weights}

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the graph's outputs."""
        return tuple(value.name for value in self.model.graph.output)

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """The node that computes each value."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.output if name}

    @cached_property
    def reads(self) -> Sequence[tuple[str, ...]]:
        """The values that each node reads: its inputs, and what its subgraphs take from around them."""
        return [tuple(dict.fromkeys(read_by(node))) for node in self.nodes]

    @cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """The nodes that read each value."""
        found: dict[str, list[int]] = {}
        for i, names in enumerate(self.reads):
            for name in names:
                found.setdefault(name, []).append(i)
        return {name: tuple(indices) for name, indices in found.items()}

    @cached_property
    def types(self) -> Mapping[str, onnx.ValueInfoProto]:
        """Types of values by name, as far as the file tells or shape inference finds them."""
        graph = self.model.graph
        known = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output) if v.type.HasField("tensor_type")}
        if all(name in known for name in self.producer):
            return known
        inferred = onnx.shape_inference.infer_shapes(without_large_weights(self.model)).graph
        return {v.name: v for v in inferred.value_info if v.type.HasField("tensor_type")} | known

    def label(self, index: int) -> str:
        """Return a node's name for people: its own, else its operator and first output."""
        node = self.nodes[index]
        return str(node.name or f"{node.op_type}:{node.output[0]}")

    def closure(self, chosen: Iterable[int]) -> list[int]:
        """Return the chosen nodes and all that lie on a path between two of them, in topological order."""
        inside = set(chosen)
        below, above = self._reach(inside, forward=True), self._reach(inside, forward=False)
        return sorted(inside | (below & above))

    def _reach(self, start: Collection[int], *, forward: bool) -> set[int]:
        seen, stack = set(start), list(start)
        while stack:
            node = stack.pop()
            if forward:
                near = {r for name in self.nodes[node].output for r in self.readers.get(name, ())}
            else:
                near = {self.producer[name] for name in self.reads[node] if name in self.producer}
            stack.extend(near - seen)
            seen |= near
        return seen

    def boundary(self, chosen: Collection[int]) -> tuple[list[str], list[str]]:
        """Return the values that a set of nodes takes in and those that it gives out.

        It gives out what another node reads and what is an output of the graph; else, what none of its own reads.
        """
        made = {name for i in chosen for name in self.nodes[i].output if name}
        order = sorted(chosen)
        taken = dict.fromkeys(n for i in order for n in self.reads[i] if n not in made and n not in self.weights)
        given = [
            name
            for i in order
            for name in self.nodes[i].output
            if name and (name in self.outputs or any(reader not in chosen for reader in self.readers.get(name, ())))
        ]
        return list(taken), given or [n for i in order for n in self.nodes[i].output if n and n not in self.readers]

    def cut(self, chosen: Collection[int], captured: Arrays) -> onnx.ModelProto:
        """Return the chosen nodes as a model of their own.

        Its inputs are the values at the cut, with dtype and shape of what was ``captured`` there, or with the type of
        shape inference. Small integer vectors that were captured (shapes, axes, indices) become constants, as a
        compiler needs them. Raises as :meth:`typed` does.
        """
        taken, given = self.boundary(chosen)
        frozen = {name: captured[name] for name in taken if self._is_structure(name, captured)}
        weights = {n: self.weights[n] for i in sorted(chosen) for n in self.reads[i] if n in self.weights}
        constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in frozen.items()]
        inputs = [self.typed(name, captured) for name in taken if name not in frozen]
        outputs = [self.typed(name, captured) for name in given]
        nodes = [self.nodes[i] for i in sorted(chosen)]
        return self.with_graph(nodes, inputs, outputs, [*weights.values(), *constants])

    def with_graph(
        self, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], weights: Sequence[Any]
    ) -> onnx.ModelProto:
        """Return a model with another graph and this one's opsets and functions."""
        graph = helper.make_graph(nodes, self.model.graph.name or "graph", inputs, outputs, weights)
        return helper.make_model(
            graph,
            opset_imports=self.model.opset_import,
            functions=self.model.functions,
            ir_version=self.model.ir_version,
        )

    def typed(self, name: str, captured: Arrays) -> onnx.ValueInfoProto:
        """Return name and type of a value: as captured, else as the file or shape inference tell.

        Raises :class:`NoTensorError` where a run showed no tensor, :class:`UsageError` where nothing tells the type.
        """
        if name in captured:
            array = captured[name]
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        if captured and name in self.producer:
            raise NoTensorError(f"{name!r} is no tensor, so no part can begin or end there")
        if name not in self.types:
            raise UsageError(f"nothing tells the type of {name!r} at a cut: give --inputs, so that it can be captured")
        return self.types[name]

    def _is_structure(self, name: str, captured: Arrays) -> bool:
        array = captured.get(name)
        small = array is not None and array.ndim <= 1 and array.dtype.kind in "iub"
        return small and name not in self.inputs


def read_by(node: Any) -> Iterable[str]:
    """Yield the outer values that a node reads, those of its subgraphs included."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        own = {v.name for v in (*graph.input, *graph.initializer)} | {n for m in graph.node for n in m.output}
        yield from (name for inner in graph.node for name in read_by(inner) if name not in own)


def subgraphs(node: Any) -> Iterable[Any]:
    """Yield the graphs inside a node: branches of an ``If``, the body of a ``Loop`` or ``Scan``."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def constants_as_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its ``Constant`` nodes as initializers, where they hold a tensor or plain numbers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    kept = []
    for node in graph.node:
        tensor = constant_tensor(node) if node.op_type == "Constant" and node.domain in ("", "ai.onnx") else None
        if tensor is None or node.output[0] in {v.name for v in graph.output}:
            kept.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(kept)
    return result


def constant_tensor(node: Any) -> onnx.TensorProto | None:
    """Return what a ``Constant`` node holds, or None for strings and sparse tensors."""
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor = onnx.TensorProto()
        tensor.CopyFrom(attribute.t)
        return tensor
    dtypes = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
    if attribute.name not in dtypes:
        return None
    return numpy_helper.from_array(np.asarray(helper.get_attribute_value(attribute), dtypes[attribute.name]))


def without_large_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which weights of more than 1 KiB have a type but no bytes: enough for shape inference."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    small = []
    for tensor in result.graph.initializer:
        if tensor.ByteSize() <= 1024:
            small.append(tensor)
        elif tensor.name not in {v.name for v in result.graph.input}:
            result.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del result.graph.initializer[:]
    result.graph.initializer.extend(small)
    return result


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; weights beyond what protobuf takes go to ``NAME.data`` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    large = model.ByteSize() > LARGEST
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)  # onnx appends to a file that is there
    onnx.save_model(model, str(path), save_as_external_data=large, location=data.name if large else None)
