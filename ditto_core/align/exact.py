"""A quantized graph without the rounding of its activations: the same operators on floats, with the same weights.

Values keep their names: what holds integers of an activation holds, exactly, the numbers that they stand for. Formulas:
ONNX's QuantizeLinear, DynamicQuantizeLinear, QLinearConv, QLinearMatMul, MatMulInteger and ConvInteger; ONNX Runtime's
contrib operators of the domain com.microsoft.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

ACCURACY, FLOAT32 = "accuracy_level", 1
"""Attribute of ``MatMulNBits`` that says in what it computes, and its value for float32."""
PLAIN = {
    "QLinearAdd": "Add",
    "QLinearMul": "Mul",
    "QLinearMatMul": "MatMul",
    "QLinearSigmoid": "Sigmoid",
    "QLinearLeakyRelu": "LeakyRelu",
    "QLinearAveragePool": "AveragePool",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "QLinearSoftmax": "Softmax",
}
"""Operators on (integers, scale, zero point) triples, with scale and zero point of the output at the end."""
MOVING = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Gather", "Slice", "Identity")
"""Operators that take integers as they are."""
LAYOUT = ("channels_last", "opset")
"""Attributes that the operators of floats do not have."""
ONE = "ditto::one"
SCALED = "::scaled"
FLOATS = "::floats"
INTEGERS = "::integers"
"""Suffixes of what is added."""


def exact_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a graph that rounds no activation, as far as its operators are known."""
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    integers = integers_of(model)
    del made.graph.node[:], made.graph.value_info[:]  # these say which values are integers
    lowest = {""} | {tensor.name for tensor in model.graph.initializer if is_lowest(tensor)}
    for node in model.graph.node:
        nodes = list(exact_nodes(node, integers))
        pair = scale_of(node, {}) if node.output[0] in integers else None
        if pair is not None and pair[1] in lowest:  # what is below cannot be said: an activation was fused into it
            nodes += [rectified(nodes[-1])]
        made.graph.node.extend(nodes)
    one = onnx.helper.make_tensor(ONE, onnx.TensorProto.FLOAT, [], [1.0])
    made.graph.initializer.append(one)
    return made


def is_lowest(tensor: onnx.TensorProto) -> bool:
    """Tell whether a zero point is the smallest integer of its type."""
    import numpy as np
    import onnx

    if tensor.dims and list(tensor.dims) != [1]:
        return False
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return dtype.kind in "iu" and bool(onnx.numpy_helper.to_array(tensor).reshape(()) == np.iinfo(dtype).min)


def rectified(node: onnx.NodeProto) -> onnx.NodeProto:
    """Rename what a node gives, and return what makes zeros of negative numbers of it, under the name that it had."""
    import onnx

    output, name = node.output[0], node.name
    node.output[0], node.name = f"{output}{FLOATS}", f"{name}{FLOATS}" if name else ""
    return onnx.helper.make_node("Relu", [node.output[0]], [output], name=name)


def exact_nodes(node: onnx.NodeProto, integers: Container[str]) -> Iterator[onnx.NodeProto]:
    """Yield what takes the place of a node; ``integers`` are the names of those of activations."""
    kind = node.op_type
    if kind == "MatMulNBits":
        yield with_accuracy(node)
    elif (kind == "QuantizeLinear" and node.output[0] in integers) or (
        kind == "DequantizeLinear" and node.input[0] in integers
    ):
        yield like(node, "Identity", node.input[:1])
    elif kind == "DynamicQuantizeLinear":
        yield like(node, "Identity", node.input[:1])
        yield new("Identity", [ONE], [node.output[1]])
    elif kind in ("MatMulInteger", "ConvInteger"):
        yield from integer_product(node)
    elif kind in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul"):
        yield from scaled_product(node)
    elif kind in ("QLinearConv", "QGemm"):
        yield from with_bias(node, integers)
    elif kind == "QLinearConcat":
        yield like(node, "Concat", node.input[2::3])
    elif kind in PLAIN:
        count = (len(node.input) - 2) // 3
        yield from floating(node, PLAIN[kind], [node.input[3 * i : 3 * i + 3] for i in range(count)], integers)
    else:
        yield node


def readable_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a graph in which names of integers of activations are those of the numbers that they stand for.

    What it computes is the same: a value that was integers is dequantized as well.
    """
    import onnx

    scales = {name: pair for name, pair in integers_of(model).items() if pair[0]}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    if scales:
        del made.graph.value_info[:]
    for node in model.graph.node:
        copied = made.graph.node.add()
        copied.CopyFrom(node)
        for names in (copied.input, copied.output):
            for place, name in enumerate(names):
                names[place] = name + INTEGERS if name in scales else name
        if node.output[0] in scales:
            made.graph.node.append(
                new("DequantizeLinear", [copied.output[0], *filter(None, scales[node.output[0]])], node.output[:1])
            )
    return made


def integers_of(model: onnx.ModelProto) -> dict[str, tuple[str, str]]:
    """Return the integers of activations by name: their scale and zero point, empty where these are computed."""
    stored = {tensor.name for tensor in model.graph.initializer}
    found: dict[str, tuple[str, str]] = {}
    for node in model.graph.node:
        if node.op_type == "Constant":
            stored.add(node.output[0])
        elif node.op_type == "DynamicQuantizeLinear":
            found[node.output[0]] = ("", "")
        elif node.op_type == "QuantizeLinear" and node.input[0] in stored:
            continue  # a weight that is stored as floats
        elif (pair := scale_of(node, found)) is not None:
            found[node.output[0]] = pair
    return found


def scale_of(node: onnx.NodeProto, known: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """Return scale and zero point of the integers that an operator makes of an activation; None where it makes none."""
    places = {"QuantizeLinear": (1, 2), "QLinearConv": (6, 7), "QGemm": (7, 8), "QLinearConcat": (0, 1)}
    if node.op_type in places:
        first, second = places[node.op_type]
        return node.input[first], node.input[second] if second < len(node.input) else ""
    if node.op_type in PLAIN:
        return node.input[len(node.input) - 2], node.input[len(node.input) - 1]
    return known.get(node.input[0]) if node.op_type in MOVING and node.input else None


def added(name: str) -> bool:
    """Tell whether a value is none of the original graph's."""
    return FLOATS in name or SCALED in name or name.endswith(INTEGERS)


def with_accuracy(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a product of 4-bit weights that computes in float32."""
    made = like(node, node.op_type, node.input)
    for attribute in made.attribute:
        if attribute.name == ACCURACY:
            attribute.i = FLOAT32
    made.domain = node.domain
    return made


def like(node: onnx.NodeProto, kind: str, inputs: Sequence[str], **more: Any) -> onnx.NodeProto:
    """Return a node of another kind with the name, first output and attributes of one; an Identity has none."""
    import onnx

    made = onnx.helper.make_node(kind, list(inputs), [node.output[0]], name=node.name, **more)
    if kind != "Identity":
        kept = [a for a in node.attribute if a.name not in (*LAYOUT, *more)]
        made.attribute.extend(kept)
    return made


def new(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    """Return a node that the graph did not have."""
    import onnx

    return onnx.helper.make_node(kind, list(inputs), list(outputs), name=f"making {outputs[0]}", **attributes)


def integer_product(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield a product of floats by the integers of a weight less their zero points."""
    weight, out = node.input[1], node.output[0]
    zero = node.input[3] if len(node.input) > 3 else ""
    yield new("Cast", [weight], [f"{out}{FLOATS}::weight"], to=1)
    centred = f"{out}{FLOATS}::weight"
    if zero:
        yield new("Cast", [zero], [f"{out}{FLOATS}::zero"], to=1)
        shift = f"{out}{FLOATS}::zero"
        if node.op_type == "ConvInteger":
            yield new("Constant", [], [f"{out}{FLOATS}::shape"], value_ints=[-1, 1, 1, 1])
            yield new("Reshape", [shift, f"{out}{FLOATS}::shape"], [f"{shift}::channels"])
            shift = f"{shift}::channels"
        yield new("Sub", [centred, shift], [f"{out}{FLOATS}::centred"])
        centred = f"{out}{FLOATS}::centred"
    yield like(node, node.op_type.removesuffix("Integer"), [node.input[0], centred])


def scaled_product(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield a product of floats by a dequantized weight, and its bias."""
    dynamic = node.op_type == "DynamicQuantizeMatMul"
    places = (2, 3, 4) if dynamic else (3, 5, 6)
    scale, zero, bias = (node.input[i] if i < len(node.input) else "" for i in places)
    out = node.output[0]
    yield new("DequantizeLinear", [node.input[1], scale, *([zero] if zero else [])], [f"{out}{FLOATS}"], axis=1)
    if not bias:
        yield like(node, "MatMul", [node.input[0], f"{out}{FLOATS}"])
        return
    yield new("MatMul", [node.input[0], f"{out}{FLOATS}"], [f"{out}{FLOATS}::product"])
    yield like(node, "Add", [f"{out}{FLOATS}::product", bias])


def floating(
    node: onnx.NodeProto, kind: str, triples: Sequence[Sequence[str]], integers: Container[str], axis: int = 1
) -> Iterator[onnx.NodeProto]:
    """Yield an operator on floats; those of its operands that are weights are dequantized, along ``axis``."""
    operands: list[str] = []
    for name, scale, zero in triples:
        if name not in integers:
            result = f"{node.output[0]}{FLOATS}::{len(operands)}"
            yield new("DequantizeLinear", [name, scale, *([zero] if zero else [])], [result], axis=axis)
            name = result  # noqa: PLW2901
        operands.append(name)
    yield like(node, kind, operands)


def with_bias(node: onnx.NodeProto, integers: Container[str]) -> Iterator[onnx.NodeProto]:
    """Yield a convolution or Gemm with its bias, whose scale is that of the input times that of the weight."""
    convolution = node.op_type == "QLinearConv"
    data, weight = node.input[0:3], node.input[3:6]
    bias = (node.input[8] if len(node.input) > 8 else "") if convolution else node.input[6]
    options: Mapping[str, Any] = {a.name: a.i for a in node.attribute}
    axis = 0 if convolution or options.get("transB") else 1
    made = list(floating(node, "Conv" if convolution else "Gemm", [data, weight], integers, axis))
    yield from made[:-1]
    last = made[-1]
    if bias:
        out = node.output[0]
        yield new("Mul", [data[1], weight[1]], [f"{out}{SCALED}"])
        yield new("Cast", [bias], [f"{out}{SCALED}::bias"], to=1)
        yield new("Mul", [f"{out}{SCALED}::bias", f"{out}{SCALED}"], [f"{out}{SCALED}::floats"])
        last.input.append(f"{out}{SCALED}::floats")
    yield last
