"""The parsed network: from ONNX, with its taps marked, and as readable text."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from ditto_core.backends.tensorrt.library import Library, Messages, clean
from ditto_core.errors import BuildError
from ditto_core.graphs.graph import Graph
from ditto_core.graphs.nodes import Node
from ditto_core.sites import Tap


@dataclass
class Network:
    """A TensorRT network and the tensors in it by name. The builder and the messages must outlive it."""

    library: Library
    messages: Messages
    builder: Any
    definition: Any
    graph: Graph
    tensors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, library: Library, messages: Messages, onnx_path: Path) -> Network:
        """Parse an ONNX file. Raises :class:`BuildError` that names the node, its module and its source line."""
        trt = library.module
        graph = read(onnx_path)
        builder = trt.Builder(messages.logger)
        typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # TensorRT 11 knows no other kind
        definition = builder.create_network(0 if typed is None else 1 << int(typed))
        parser = trt.OnnxParser(definition, messages.logger)
        if not parser.parse_from_file(str(onnx_path)):
            errors = [parser.get_error(i) for i in range(parser.num_errors)]
            raise BuildError(
                parse_failure(library, graph, errors) or f"{library.label} cannot parse: {messages.last()}"
            )
        network = cls(library, messages, builder, definition, graph)
        network.tensors = {tensor.name: tensor for layer in network.layers() for tensor in outputs(layer)}
        return network

    def layers(self) -> Iterator[Any]:
        """Yield the layers in topological order."""
        return (self.definition.get_layer(i) for i in range(self.definition.num_layers))

    def inputs(self) -> Iterator[Any]:
        """Yield the input tensors."""
        return (self.definition.get_input(i) for i in range(self.definition.num_inputs))

    def outputs(self) -> Iterator[Any]:
        """Yield the output tensors."""
        return (self.definition.get_output(i) for i in range(self.definition.num_outputs))

    def mark(self, taps: Iterable[Tap]) -> tuple[list[Tap], dict[str, str]]:
        """Make taps outputs of the network. Returns those that are, and a reason for each that cannot be."""
        done, refused = [], {}
        for tap in taps:
            reason = self._mark(tap.value)
            if reason:
                refused[tap.site] = reason
            else:
                done.append(tap)
        return done, refused

    def _mark(self, value: str) -> str:
        if value in self.graph.inputs:
            return "it is an input of the network"
        tensor = self.tensors.get(value)
        if tensor is None:
            known = value in self.graph.producer
            return f"the parser folded {value!r} away" if known else f"the ONNX graph has no value {value!r}"
        if tensor.is_shape_tensor and not tensor.is_execution_tensor:
            return "it is a shape tensor, which TensorRT computes on the host"
        if not tensor.is_network_output:
            self.definition.mark_output(tensor)
        return "" if tensor.is_network_output else f"TensorRT refuses it as an output ({self.messages.last(1)})"

    def mark_unfused(self) -> None:
        """Ask for every tensor that TensorRT does not fuse, without changing what it fuses."""
        mark = getattr(self.definition, "mark_unfused_tensors_as_debug_tensors", None)
        if mark is None:
            raise BuildError(
                f"{self.library.label} {self.library.version} cannot hand over unfused tensors: taps=outputs"
            )
        if not mark():
            raise BuildError(f"{self.library.label} cannot mark unfused tensors: {self.messages.last()}")

    def inner(self) -> int:
        """Return the longest inner dimension of the matrix products, 0 where there is none of fixed size."""
        kind = self.library.module.LayerType.MATRIX_MULTIPLY
        products = (layer for layer in self.layers() if layer.type == kind)
        shapes = (layer.get_input(0).shape for layer in products)
        return max((shape[-1] for shape in shapes if len(shape) and shape[-1] > 0), default=0)

    def readable(self, taps: Iterable[Tap]) -> str:
        """Return the network as Python-like text: one call a tensor, its layer and origin in the comment above."""
        sites = {tap.value: tap.site for tap in taps}
        name = Identifiers()
        lines = [f'"""Network of {self.graph_size()}, as {self.library.label} {self.library.version} parsed it."""', ""]
        for tensor in self.inputs():
            lines.append(f"{name(tensor.name)} = network_input({tensor.name!r})  # {self._type(tensor)}")
        for layer in self.layers():
            lines += ["", *self._readable_layer(layer, name, sites)]
        results = ", ".join(name(tensor.name) for tensor in self.outputs())
        return "\n".join([*lines, "", f"outputs = ({results},)", ""])

    def graph_size(self) -> str:
        """Return ``595 layers, 45 outputs``."""
        return f"{self.definition.num_layers} layers, {self.definition.num_outputs} outputs"

    def _readable_layer(self, layer: Any, name: Identifiers, sites: Mapping[str, str]) -> Iterator[str]:
        node = self.origin(layer)
        yield f"# layer: {layer.name}" + (f" | {node.operator} | {node.origin}" if node else "")
        arguments = ", ".join(name(t.name) for t in inputs(layer))
        for tensor in outputs(layer):
            kinds = ["tap " + sites[tensor.name]] if tensor.name in sites else []
            kinds += ["output"] if tensor.is_network_output else []
            kinds += ["shape tensor"] if tensor.is_shape_tensor else []
            note = "".join(f", {kind}" for kind in kinds)
            yield f"# tensor: {tensor.name}"
            yield f"{name(tensor.name)} = {layer.type.name.lower()}({arguments})  # {self._type(tensor)}{note}"

    def origin(self, layer: Any) -> Node | None:
        """Return the ONNX node that a layer came from."""
        return self.graph.mentioned(layer.metadata or "") or self.graph.described.get(layer.name)

    def _type(self, tensor: Any) -> str:
        shape = ", ".join(str(size) for size in tensor.shape)
        return f"{self.library.torch_dtype(tensor.dtype)} [{shape}]"


def read(onnx_path: Path) -> Graph:
    """Read the nodes of an ONNX file. Raises :class:`BuildError` when it cannot be read."""
    try:
        return Graph.read(onnx_path)
    except OSError as error:
        raise BuildError(f"{onnx_path} cannot be read: {error.strerror}") from error


def inputs(layer: Any) -> list[Any]:
    """Return the input tensors of a layer."""
    found = (layer.get_input(i) for i in range(layer.num_inputs))
    return [tensor for tensor in found if tensor is not None]


def outputs(layer: Any) -> list[Any]:
    """Return the output tensors of a layer."""
    found = (layer.get_output(i) for i in range(layer.num_outputs))
    return [tensor for tensor in found if tensor is not None]


class Identifiers:
    """Python identifiers for tensor names: always the same for one name and never that of another."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._taken: set[str] = {"outputs", "network_input"}

    def __call__(self, name: str) -> str:
        """Return the identifier of a tensor."""
        if name not in self._known:
            plain = re.sub(r"\W+", "_", name).strip("_") or "tensor"
            plain = f"t_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) else plain
            tries = chain([plain], (f"{plain}_{i}" for i in count(1)))
            self._known[name] = next(each for each in tries if each not in self._taken)
            self._taken.add(self._known[name])
        return self._known[name]


def parse_failure(library: Library, graph: Graph, errors: Iterable[Any]) -> str:
    """Describe the first parser error that names a node (else the first): operator, node, module, source line."""
    errors = sorted(errors, key=lambda error: error.node() < 0)
    if not errors:
        return ""
    error = errors[0]
    node = graph.described.get(error.node_name())
    what = "cannot parse the ONNX file" if node is None else f"cannot parse ONNX node {node.name} ({node.operator})"
    reason = clean(str(error.desc()))
    if reason in ("", "false"):
        reason = f"operator {error.node_operator()} is not supported"
    where = f" at {node.origin}" if node and node.origin else ""
    return f"{library.label} {library.version} {what}{where}: {reason}"
