"""Faults drawn at random for any engine: one operator, constant or weight of its graph is changed.

They are made of ONNX operators, without regard to the families of causes. The first half of :data:`FAULTS` changes
numbers and operators, the second tensors and orders.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.faults import graph

Fault = Callable[[Any, random.Random], "tuple[str, str]"]
"""Changes an edit's graph; returns what was done and the value that is first wrong. LookupError: there is no place."""

NARROW = ("Mul", "Add", "Sub", "Div", "Pow")
PASSING = ("Mul", "Add", "Tanh", "Sigmoid", "Neg", "Sqrt", "Erf", "Reciprocal", "Softmax", "Gelu", "Relu")


def pick(edit: Any, draw: random.Random, fits: Callable[[Any], bool]) -> Any:
    """Return one of the nodes that fit."""
    found = [node for node in edit.graph.node if fits(node)]
    if not found:
        raise LookupError("no node")
    return draw.choice(found)


def scalars(edit: Any, node: Any) -> list[int]:
    """Return the inputs of a node that are floating constants of one element."""
    constants = [i for i, name in enumerate(node.input) if edit.is_constant(name)]
    return [i for i in constants if edit.array(node.input[i]).dtype.kind == "f" and edit.array(node.input[i]).size == 1]


def matrices(edit: Any, node: Any) -> list[int]:
    """Return the inputs of a node that are floating weights."""
    constants = [i for i, name in enumerate(node.input) if edit.is_constant(name)]
    return [i for i in constants if edit.array(node.input[i]).dtype.kind == "f" and edit.array(node.input[i]).ndim == 2]


def changed(edit: Any, node: Any, index: int, change: Callable[[Any], Any]) -> str:
    """Give a node a changed constant of its own; return what it computes."""
    old = edit.array(node.input[index])
    node.input[index] = edit.constant(np.asarray(change(old)).astype(old.dtype))
    return str(node.output[0])


def constant(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A scalar is another."""
    node = pick(edit, draw, lambda n: n.op_type in NARROW and scalars(edit, n))
    index, factor = scalars(edit, node)[0], draw.choice([0.0, 0.5, 2.0, 10.0, -1.0, 1.3])
    old = float(edit.array(node.input[index]).reshape(-1)[0])
    return f"{node.op_type} constant {old:.6g} x {factor:g}", changed(edit, node, index, lambda c: c * factor)


def missing(edit: Any, draw: random.Random) -> tuple[str, str]:
    """An operator gives its first or second input."""
    node = pick(edit, draw, lambda n: n.op_type in PASSING)
    inputs = [i for i, name in enumerate(node.input) if name and not edit.is_constant(name)]
    if not inputs:
        raise LookupError("only constants")
    value, text = str(node.output[0]), f"{node.op_type} left out"
    graph.replace(edit, node, "Identity", [node.input[draw.choice(inputs)]])
    return text, value


def sibling(edit: Any, draw: random.Random) -> tuple[str, str]:
    """An operator is another with as many inputs."""
    others = {
        "Tanh": ["Erf", "Sigmoid"], "Sigmoid": ["HardSigmoid", "Tanh"], "Erf": ["Tanh"], "Relu": ["Gelu", "Elu"],
        "Gelu": ["Relu"], "ReduceMean": ["ReduceMax", "ReduceSum"], "Sin": ["Cos"], "Cos": ["Sin"], "Add": ["Sub"],
        "Sub": ["Add"], "Mul": ["Div"], "Exp": ["Relu"],
    }  # fmt: skip
    node = pick(edit, draw, lambda n: n.op_type in others)
    other = draw.choice(others[node.op_type])
    text = f"{node.op_type} is {other}"
    node.op_type = other
    return text, str(node.output[0])


def swapped(edit: Any, draw: random.Random) -> tuple[str, str]:
    """The inputs of a subtraction, division or concatenation come in reverse."""
    node = pick(edit, draw, lambda n: n.op_type in ("Sub", "Div", "Concat") and len(n.input) == 2)
    text, (first, second) = f"{node.op_type} operands exchanged", node.input
    node.input[0], node.input[1] = second, first
    return text, str(node.output[0])


def softmax_axis(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A softmax goes over the queries."""
    node = pick(edit, draw, lambda n: n.op_type == "Softmax")
    del node.attribute[:]
    node.attribute.append(graph.helper.make_attribute("axis", -2))
    return "Softmax over axis -2", str(node.output[0])


def factor(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A tensor is multiplied."""
    return after(edit, draw, "x {}", lambda edit, number: ("Mul", [edit.scalar(number)], {}), [0.9, 1.01, 2.0])


def offset(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A number is added to a tensor."""
    return after(edit, draw, "+ {}", lambda edit, number: ("Add", [edit.scalar(number)], {}), [0.01, 0.3])


def after(
    edit: Any, draw: random.Random, text: str, made: Callable[[Any, float], Any], numbers: list[float]
) -> tuple[str, str]:
    """Change what an operator gives by another operator."""
    kinds = ("MatMul", "Gemm", "Mul", "Add", "Softmax", "Conv", "LayerNormalization")
    node = pick(edit, draw, lambda n: n.op_type in kinds and not is_whole(edit, n))
    value, number = str(node.output[0]), draw.choice(numbers)
    edit.change_value(value, made(edit, number))
    return f"{node.op_type} {text.format(number)}", value


def is_whole(edit: Any, node: Any) -> bool:
    """Tell whether a node takes a constant of whole numbers: it computes no floating tensor."""
    return any(edit.is_constant(name) and edit.array(name).dtype.kind != "f" for name in node.input)


def weight(text: str, change: Callable[[Any, random.Random], Any], square: bool = False) -> Fault:
    """Make a fault that changes a weight matrix."""

    def fault(edit: Any, draw: random.Random) -> tuple[str, str]:
        def fits(node: Any) -> bool:
            shapes = [edit.array(node.input[i]).shape for i in matrices(edit, node)]
            return node.op_type in ("MatMul", "Gemm") and any(not square or a == b for a, b in shapes)

        node = pick(edit, draw, fits)
        return f"weight {text}", changed(edit, node, matrices(edit, node)[0], lambda w: change(w, draw))

    return fault


def int8(w: Any, draw: random.Random) -> Any:
    """Round to int8 with one scale."""
    scale = np.abs(w).max() / 127
    return np.round(w / scale) * scale


def interleaved(w: Any, draw: random.Random) -> Any:
    """Lay columns out as [n / k, k] read as [k, n / k]."""
    k = draw.choice([k for k in (2, 3, 4) if w.shape[-1] % k == 0] or [1])
    return w.reshape(w.shape[0], k, -1).swapaxes(1, 2).reshape(w.shape)


def other_weight(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A weight is that of another operator."""
    node = pick(edit, draw, lambda n: n.op_type in ("MatMul", "Gemm") and matrices(edit, n))
    index = matrices(edit, node)[0]
    shape = edit.array(node.input[index]).shape
    others = [
        i.name for i in edit.graph.initializer if i.name != node.input[index] and tuple(i.dims) == shape
    ]  # fmt: skip
    if not others:
        raise LookupError("no other weight")
    node.input[index] = draw.choice(others)
    return "weight of another operator", str(node.output[0])


def bias(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A vector of an addition or product is that of ones, zeros, or in reverse."""

    def vectors(node: Any) -> list[int]:
        constants = [i for i, name in enumerate(node.input) if edit.is_constant(name)]
        arrays = {i: edit.array(node.input[i]) for i in constants}
        return [i for i, a in arrays.items() if a.dtype.kind == "f" and a.ndim == 1 and a.size > 1]

    node = pick(edit, draw, lambda n: n.op_type in ("Add", "Mul", "Gemm", "LayerNormalization") and vectors(n))
    name, change = draw.choice([("zero", np.zeros_like), ("one", np.ones_like), ("reversed", lambda v: v[::-1])])
    return f"{node.op_type} vector {name}", changed(edit, node, vectors(node)[0], change)


def cast(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A tensor goes through bfloat16."""
    node = pick(edit, draw, lambda n: n.op_type in ("MatMul", "Mul", "Softmax", "Gemm") and not is_whole(edit, n))
    value = str(node.output[0])
    edit.change_value(value, ("Cast", [], {"to": graph.BRAIN}), ("Cast", [], {"to": graph.SINGLE}))
    return f"{node.op_type} through bfloat16", value


def clip(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A tensor is cut off above."""
    make = lambda edit, number: ("Min", [edit.scalar(number)], {})  # noqa: E731
    return after(edit, draw, "cut off at {}", make, [0.1, 0.5])


def operand(edit: Any, draw: random.Random) -> tuple[str, str]:
    """An addition takes one of its terms twice."""
    node = pick(edit, draw, lambda n: n.op_type in ("Add", "Mul") and not any(map(edit.is_constant, n.input)))
    node.input[0] = node.input[1]
    return f"{node.op_type} takes its second input twice", str(node.output[0])


def noise(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A weight has noise on it: nothing may be named."""
    numbers = np.random.default_rng(draw.randrange(1 << 30))
    return weight("with noise", lambda w, _: w * (1 + 0.01 * numbers.standard_normal(w.shape)))(edit, draw)


FAULTS: Mapping[str, Fault] = {
    "constant": constant,
    "missing": missing,
    "sibling": sibling,
    "swapped": swapped,
    "softmax axis": softmax_axis,
    "factor": factor,
    "offset": offset,
    "cast": cast,
    "clip": clip,
    "transposed": weight("transposed", lambda w, _: w.T, square=True),
    "interleaved": weight("interleaved", interleaved),
    "int8": weight("int8", int8),
    "rolled": weight("rolled", lambda w, draw: np.roll(w, draw.choice([1, -1, 8]), draw.choice([0, 1]))),
    "part": weight("part zero", lambda w, _: np.where(np.arange(w.shape[1]) < w.shape[1] // 2, w, 0)),
    "other weight": other_weight,
    "vector": bias,
    "operand": operand,
    "noise": noise,
}
