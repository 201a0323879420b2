"""The one ONNX graph: who computes and who reads each value, what its exporter wrote, and parts of it.

Nodes are known by their position in topological order, values by their name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import helper, numpy_helper

from ditto_core.errors import SelectorError, UsageError, first_line, nearest
from ditto_core.graphs.constants import constants_as_initializers, without_large_weights
from ditto_core.graphs.files import load_weights, read_graph
from ditto_core.graphs.nodes import Node, Segment, data_of, described, read_by, shape_of, unshare_names
from ditto_core.graphs.outputs import axes_of

Arrays = Mapping[str, np.ndarray[Any, Any]]
DTYPES = {"float": "float32", "double": "float64"}


class NoTensorError(UsageError):
    """A part would begin or end at a sequence or an optional value."""


@dataclass(frozen=True)
class Graph:
    """An ONNX model, and what can be asked of it. Whether the weights have their data is up to how it was read."""

    model: onnx.ModelProto

    @classmethod
    def read(cls, path: Path) -> Graph:
        """Read an ONNX file as it is, without its weights."""
        return cls(read_graph(path))

    @classmethod
    def load(cls, path: Path) -> Graph:
        """Read a model to be cut and run: with its weights.

        Constants are initializers, so that every node computes something; local functions are the operators they hold.
        Raises :class:`UsageError` when the file is no ONNX model.
        """
        try:
            model = read_graph(path)
            if model.functions:  # before the weights are in memory: the inliner takes no more than 2 GB
                model = onnx.inliner.inline_local_functions(model)
            unshare_names(model.graph)
            model = constants_as_initializers(model)
            load_weights(model, path.parent)
        except FileNotFoundError as error:
            raise UsageError(f"{path} is not there, or its weights are not") from error
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{path} is not an ONNX model: {first_line(error)}") from error
        if not model.graph.node:
            raise UsageError(f"{path} has no nodes")
        return cls(model)

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
    def written(self) -> Sequence[Node]:
        """What the exporter wrote about each node."""
        return [described(node, i) for i, node in enumerate(self.nodes)]

    @cached_property
    def positions(self) -> Mapping[str, Sequence[int]]:
        """The positions of the nodes of each name: several, where they share it."""
        found: dict[str, list[int]] = {}
        for i, node in enumerate(self.written):
            found.setdefault(node.name, []).append(i)
        return found

    @cached_property
    def described(self) -> Mapping[str, Node]:
        """What the exporter wrote about a node, by its name; a name that several share is none's."""
        return {name: self.written[found[0]] for name, found in self.positions.items() if len(found) == 1}

    @cached_property
    def declared(self) -> Mapping[str, onnx.ValueInfoProto]:
        """The values that the file gives a type, by name."""
        graph = self.model.graph
        return {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int | str, ...]]:
        """The dimensions of each value of :attr:`declared`: a size, a name, or ``?``."""
        return {name: shape_of(value) for name, value in self.declared.items()}

    @cached_property
    def types(self) -> Mapping[str, onnx.ValueInfoProto]:
        """Types of values by name, as far as the file tells or shape inference finds them."""
        known = {name: v for name, v in self.declared.items() if v.type.HasField("tensor_type")}
        if all(name in known for name in self.producer):
            return known
        inferred = onnx.shape_inference.infer_shapes(without_large_weights(self.model)).graph
        return {v.name: v for v in inferred.value_info if v.type.HasField("tensor_type")} | known

    def dtype(self, name: str) -> str:
        """Return the dtype that the file gives a value."""
        text = str(onnx.TensorProto.DataType.Name(self.declared[name].type.tensor_type.elem_type)).lower()
        return DTYPES.get(text, text)

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the names of a value's dimensions, "" for a constant one; empty when its shape is not known."""
        return axes_of(self.declared[name]) if name in self.declared else ()

    def origin(self, value: str) -> Node | None:
        """Return what the exporter wrote about the node that computes a value."""
        index = self.producer.get(value)
        return None if index is None else described(self.nodes[index], index)

    def mentioned(self, text: str) -> Node | None:
        """Return the last node whose name stands in a message."""
        words = (word.strip(".:") for word in reversed(re.findall(r"[\w./:]+", text)))
        return next((self.described[word] for word in words if word in self.described), None)

    def save_outline(self, path: Path) -> None:
        """Write the graph without any weight's data: what :meth:`read` tells of it, but a cut."""
        outline = onnx.ModelProto()
        outline.CopyFrom(self.model)
        for tensor in outline.graph.initializer:
            kept = {"name": tensor.name, "data_type": tensor.data_type, "dims": tensor.dims}
            tensor.CopyFrom(onnx.TensorProto(**kept, data_location=onnx.TensorProto.EXTERNAL))
        onnx.save(outline, str(path))

    def label(self, index: int) -> str:
        """Return a node's name for people: its own, else its operator and first output."""
        node = self.nodes[index]
        return str(node.name or f"{node.op_type}:{node.output[0]}")

    def upstream(
        self, values: Iterable[str], known: Collection[str], reads: Sequence[Sequence[str]] | None = None
    ) -> list[int]:
        """Return the nodes that compute ``values`` from ``known`` values and graph inputs, in topological order.

        A known value is taken as it is, even where it is upstream of another; one of ``values`` is always computed.
        ``reads``: what each node reads, where that is not :attr:`reads`. Raises :class:`SelectorError` for a value that
        no node computes.
        """
        nodes: set[int] = set()
        waiting = [self._maker(name) for name in values]
        while waiting:
            node = waiting.pop()
            if node not in nodes:
                nodes.add(node)
                read = (reads or self.reads)[node]
                waiting.extend(self.producer[n] for n in read if n not in known and n in self.producer)
        return sorted(nodes)

    def _maker(self, value: str) -> int:
        if value not in self.producer:
            raise SelectorError(f"no node computes {value!r}{nearest(value, self.producer)}")
        return self.producer[value]

    def segment(self, value: str, known: Collection[str]) -> Segment:
        """Return what computes a value from known ones, as far as numbers go: shapes and constants do not count."""
        nodes = self.upstream([value], known, self._data) if value in self.producer else []
        read = dict.fromkeys(name for i in nodes for name in self._data[i])
        ends = tuple(name for name in read if name != value and (name in known or name in self.inputs))
        return Segment(value, ends, tuple(described(self.nodes[i], i) for i in nodes))

    @cached_property
    def _data(self) -> Sequence[Sequence[str]]:
        return [data_of(node) for node in self.nodes]

    def weights_of(self, chosen: Iterable[int]) -> list[onnx.TensorProto]:
        """Return the weights that some nodes read."""
        names = dict.fromkeys(name for i in chosen for name in self.reads[i] if name in self.weights)
        return [self.weights[name] for name in names]

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
        order = sorted(chosen)
        made = {name for i in order for name in self.nodes[i].output if name}
        taken = dict.fromkeys(n for i in order for n in self.reads[i] if n not in made and n not in self.weights)
        given = self.leaving(order) or [n for i in order for n in self.nodes[i].output if n and n not in self.readers]
        return list(taken), given

    def leaving(self, chosen: Collection[int]) -> list[str]:
        """Return the values of a set of nodes that another node reads or that are outputs of the graph."""
        made = [name for i in sorted(chosen) for name in self.nodes[i].output if name]
        inside = set(chosen)
        return [n for n in made if n in self.outputs or not inside.issuperset(self.readers.get(n, ()))]

    def cut(self, chosen: Collection[int], captured: Arrays) -> onnx.ModelProto:
        """Return the chosen nodes as a model of their own.

        Its inputs are the values at the cut, with dtype and shape of what was ``captured`` there, or with the type of
        shape inference. Small integer vectors that were captured (shapes, axes, indices) become constants, as a
        compiler needs them. Raises as :meth:`typed` does.
        """
        taken, given = self.boundary(chosen)
        frozen = {name: captured[name] for name in taken if self._is_structure(name, captured)}
        constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in frozen.items()]
        inputs = [self.typed(name, captured) for name in taken if name not in frozen]
        outputs = [self.typed(name, captured) for name in given]
        nodes = [self.nodes[i] for i in sorted(chosen)]
        return self.with_graph(nodes, inputs, outputs, [*self.weights_of(sorted(chosen)), *constants])

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
