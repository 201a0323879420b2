"""The quantized weights of a file as floating-point matrices, whatever operators hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ditto_core.align.file import OnnxFile, inference_session_of
from ditto_core.align.rounding import Blocks, Fixed, Range, Rounding
from ditto_core.align.values import Array
from ditto_core.graphs.cut import value_info
from ditto_core.graphs.files import read_initializer, with_data
from ditto_core.graphs.graph import Graph

PRODUCT, LOOKUP, DEQUANTIZED = "MatMulNBits", "GatherBlockQuantized", "DequantizeLinear"
INTEGER_PRODUCTS = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")
CONVOLUTION = "ConvInteger"
LINEAR = ("QLinearConv", "QLinearMatMul", "QGemm")
QUANTIZER = "DynamicQuantizeLinear"
INT8 = 4
"""Value of ``accuracy_level`` that asks for activations in int8."""
SMALLEST = 16
"""Fewer numbers may be near to another weight by chance."""
MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
"""Operators that quantizers pull before the dequantization of what was looked up."""


@dataclass(frozen=True)
class Stored:
    """A quantized weight: ``end`` is what is computed from the arrays ``given``. ``product``: on an identity matrix and
    a row of zeros, so that it is [inputs, outputs] and a bias; else it is the weight itself, or its transpose.
    ``inputs_first``: it is a convolution's, [inputs, outputs, …]: the scales of its outputs are those of channels.
    ``rounding``: how its operator rounds what it reads. ``array``: the weight, where nothing has to be computed."""

    node: str
    end: str
    given: Mapping[str, Array]
    product: bool = False
    inputs_first: bool = False
    rounding: Rounding | None = None
    lookup: bool = False
    array: Array | None = None


@dataclass(frozen=True)
class Weight:
    """A quantized weight [outputs, inputs, …] in each of the ``forms`` that it may have. ``rounding``: of what its
    operator reads; ``lookup``: it is a table that rows are taken from."""

    node: str
    forms: list[Array]
    rounding: Rounding | None
    lookup: bool


def stored_weights(file: OnnxFile, vocabulary: int) -> Iterator[Weight]:
    """Yield every quantized weight of a file.

    Where nothing tells which dimension is which, the transpose comes too. ``vocabulary`` is the length of lookup tables
    that are computed.
    """
    graph = Graph(file.model)
    for found in places(file, graph, vocabulary):
        array = evaluated(file, graph, found) if found.array is None else found.array
        if found.product:
            forms = [(array[:-1] - array[-1]).T]
        elif found.inputs_first:
            forms = [array.swapaxes(0, 1)]
        else:
            forms = [array, array.T] if array.ndim == 2 else [array]
        yield Weight(found.node, forms, found.rounding, found.lookup)


def places(file: OnnxFile, graph: Graph, vocabulary: int) -> Iterator[Stored]:
    """Yield where a file holds quantized weights."""
    for i, node in enumerate(graph.nodes):
        label = graph.label(i)
        if node.op_type == PRODUCT:
            options = {a.name: a.i for a in node.attribute}
            given = {node.input[0]: identity(options["K"])}
            blocks = Blocks(options["block_size"]) if options.get("accuracy_level") == INT8 else None
            yield Stored(label, node.output[0], given, product=True, rounding=blocks)
        elif node.op_type == LOOKUP:
            table = graph.weights.get(node.input[0])
            ids = np.arange(vocabulary if table is None else table.dims[0])
            yield Stored(label, node.output[0], {node.input[1]: ids}, lookup=True)
        elif node.op_type == DEQUANTIZED:
            yield from dequantized(file, graph, node, label)
        elif node.op_type in INTEGER_PRODUCTS and node.input[1] in graph.weights:
            inputs = graph.weights[node.input[1]].dims[0]
            start = quantized_from(graph, node.input[0])
            yield Stored(label, scaled(graph, node), {start: identity(inputs)}, product=True, rounding=Range())
        elif node.op_type in LINEAR and node.input[3] in graph.weights:
            rounding = fixed(file, graph, node.input[1], node.input[2])
            yield Stored(label, node.output[0], {}, rounding=rounding, array=scaled_weight(file, graph, node))
        elif node.op_type == CONVOLUTION and node.input[1] in graph.weights:
            given = {node.output[0]: centred(file, graph, node).swapaxes(0, 1)}
            maker = maker_of(graph, node.input[0])
            if maker is not None and maker.op_type == QUANTIZER:
                given[maker.output[1]] = np.ones((), np.float32)  # the activation's scale
            yield Stored(label, scaled(graph, node), given, inputs_first=True, rounding=Range())


def centred(file: OnnxFile, graph: Graph, node: Any) -> Array:
    """Return the integers [outputs, inputs, …] of a convolution's weight less their zero points, int32."""
    weight, *zero = (
        np.asarray(read_initializer(graph.weights[name], file.folder)).astype(np.int32)
        for name in (node.input[1], *node.input[3:4])
        if name
    )
    return weight - zero[0].reshape(-1, *[1] * (weight.ndim - 1)) if zero else weight


def dequantized(file: OnnxFile, graph: Graph, node: Any, label: str) -> Iterator[Stored]:
    """Yield a weight that is dequantized, or of which what was looked up is."""
    maker = maker_of(graph, node.input[0])
    while maker is not None and maker.op_type in MOVES:
        maker = maker_of(graph, maker.input[0])
    name = maker.input[0] if maker is not None and maker.op_type == "Gather" else node.input[0]
    tensor = graph.weights.get(name)
    if tensor is not None and len(tensor.dims) > 1 and np.prod(tensor.dims) >= SMALLEST:
        array = np.asarray(read_initializer(tensor, file.folder))
        given = {node.input[0]: array} if maker is not None else {}
        rounding = read_as(file, graph, node.output[0]) if maker is None else None  # ids are not rounded
        yield Stored(label, node.output[0], given, lookup=maker is not None, rounding=rounding)


def maker_of(graph: Graph, name: str) -> Any:
    """Return the node that computes a value, None for an input or a weight."""
    return graph.nodes[graph.producer[name]] if name in graph.producer else None


def read_as(file: OnnxFile, graph: Graph, weight: str) -> Rounding | None:
    """Return how the activation was rounded that is multiplied by a weight; None where it was not."""
    for reader in graph.readers.get(weight, ()):
        node = graph.nodes[reader]
        maker = maker_of(graph, node.input[0])
        if maker is not None and maker.op_type == DEQUANTIZED and maker.output[0] != weight:
            return fixed(file, graph, *maker.input[1:3])
    return None


def fixed(file: OnnxFile, graph: Graph, scale: str, zero: str = "") -> Rounding | None:
    """Return the rounding to integers with a stored scale and zero point; None where one is computed or by channel."""
    if scale not in graph.weights or zero not in graph.weights:
        return None
    step, middle = (np.asarray(read_initializer(graph.weights[name], file.folder)) for name in (scale, zero))
    if step.size != 1:
        return None
    limits = np.iinfo(middle.dtype)
    return Fixed(float(step.reshape(())), int(middle.reshape(())), int(limits.min), int(limits.max))


def scaled_weight(file: OnnxFile, graph: Graph, node: Any) -> Array:
    """Return the weight of an operator on integers: (q - zero point) x scale, along the axis of its outputs."""
    weight, scale, zero = (
        np.asarray(read_initializer(graph.weights[name], file.folder)).astype(np.float32) for name in node.input[3:6]
    )
    first = node.op_type == "QLinearConv" or any(a.name == "transB" and a.i for a in node.attribute)
    axes = (-1, *[1] * (weight.ndim - 1)) if first else (1,) * (weight.ndim - 1) + (-1,)
    return (weight - zero.reshape(axes)) * scale.reshape(axes)


def identity(size: int) -> Array:
    """Return an identity matrix and a row of zeros."""
    return np.eye(size + 1, size, dtype=np.float32)


def quantized_from(graph: Graph, name: str) -> str:
    """Return the floating value that a quantized activation is made of."""
    maker = maker_of(graph, name)
    return str(maker.input[0]) if maker is not None and maker.op_type == QUANTIZER else name


def scaled(graph: Graph, node: Any) -> str:
    """Return the floating result of an integer product: after the cast and the scales."""
    name = str(node.output[0])
    while node.op_type in ("MatMulInteger", CONVOLUTION, "Cast"):
        (reader, *_) = graph.readers[name]
        node = graph.nodes[reader]
        name = str(node.output[0])
    return name


def evaluated(file: OnnxFile, graph: Graph, found: Stored) -> Array:
    """Compute a value from what is given, without the lower accuracy that a product may ask for."""
    import onnx

    indices = graph.upstream([found.end], found.given)
    nodes = []
    for i in indices:
        node = onnx.NodeProto()
        node.CopyFrom(graph.nodes[i])
        kept = [a for a in node.attribute if a.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
        nodes.append(node)
    given = {name: array for name, array in found.given.items() if any(name in node.input for node in nodes)}
    inputs = [value_info(name, array) for name, array in given.items()]
    weights = [with_data(tensor, file.folder) for tensor in graph.weights_of(indices) if tensor.name not in given]
    part = graph.with_graph(nodes, inputs, [onnx.ValueInfoProto(name=found.end)], weights)
    (result,) = inference_session_of(part).run(None, given)
    return np.asarray(result, np.float32)
