"""Operations left out, done twice, exchanged with a sibling, or done in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import (
    Model,
    Mutant,
    argument,
    changed,
    instead,
    is_float,
    operands,
    output_or_place,
    place_of,
    split,
    with_argument,
)
from ditto_core.causes.slices import Edit, Slice, Values

Sibling = tuple[str, Callable[..., Any]]
MOVING = frozenset(("site", "view", "reshape", "to", "contiguous", "clone", "transpose", "__getitem__", "expand"))
"""Functions that give the numbers that they take."""

ACTIVATIONS: tuple[Sibling, ...] = (
    ("erf GELU", lambda x, *a, **k: F.gelu(x)),
    ("tanh GELU", lambda x, *a, **k: F.gelu(x, approximate="tanh")),
    ("quick GELU", lambda x, *a, **k: x * torch.sigmoid(1.702 * x)),
    ("SiLU", lambda x, *a, **k: F.silu(x)),
    ("ReLU", lambda x, *a, **k: F.relu(x)),
    ("squared ReLU", lambda x, *a, **k: F.relu(x).square()),
    ("leaky ReLU of 0.01", lambda x, *a, **k: F.leaky_relu(x)),
    ("ELU", lambda x, *a, **k: F.elu(x)),
    ("Mish", lambda x, *a, **k: F.mish(x)),
    ("hard swish", lambda x, *a, **k: F.hardswish(x)),
    ("sigmoid", lambda x, *a, **k: torch.sigmoid(x)),
    ("tanh", lambda x, *a, **k: torch.tanh(x)),
)


def of_sample(x: torch.Tensor, axes: Any, **k: Any) -> torch.Tensor:
    """Mean that divides by n - 1."""
    count = math.prod(x.shape[i] for i in ((axes,) if isinstance(axes, int) else axes))
    return x.mean(axes, **k) * count / (count - 1)


SIBLINGS: Mapping[str, tuple[Sibling, ...]] = {
    **dict.fromkeys(("gelu", "silu", "relu", "relu_", "silu_"), ACTIVATIONS),
    "mean": (
        ("the sum", lambda x, *a, **k: x.sum(*a, **k)),
        ("the mean over n - 1", of_sample),
        ("the mean over the last two axes", lambda x, *a, **k: x.mean((-2, -1), keepdim=True)),
        ("the mean over axis -2", lambda x, *a, **k: x.mean(-2, keepdim=True)),
        ("the maximum", lambda x, *a, **k: x.amax(*a, **k)),
    ),
    "pow": (("the absolute value", lambda x, *a: x.abs()), ("the cube", lambda x, *a: x**3)),
    "exp": (("2 to the power", torch.exp2),),
    "sin": (("the cosine", torch.cos),),
    "cos": (("the sine", torch.sin),),
    "sum": (
        ("the sum + 1", lambda x, *a, **k: x.sum(*a, **k) + 1),
        ("the mean", lambda x, *a, **k: x.mean(*a, **k)),
        ("the maximum", lambda x, *a, **k: x.amax(*a, **k)),
    ),
    "tanh": (("clamped at 1", lambda x: x.clamp(-1, 1)), ("x / (1 + |x|)", lambda x: x / (1 + x.abs()))),
    "sqrt": (("the square", torch.square),),
    "sigmoid": (("the sigmoid of 1.702 x", lambda x: torch.sigmoid(1.702 * x)), ("the hard sigmoid", F.hardsigmoid)),
}
"""What else an operation could be taken for."""


def operations(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield what can go wrong with each operation as a whole."""
    for i in range(len(part.nodes)):
        if is_float(part.base[i]):
            yield from left_out(part, i, model)
            yield from replaced(part, i, model)
            yield from other_sign(part, i)
        if part.nodes[i].func is not None:
            yield from other_order(part, i)
    yield from swapped_lines(part)
    yield from reductions(part)
    yield from other_activation(part, model)


def left_out(part: Slice, i: int, model: Model) -> Iterator[Mutant]:
    """The operation is missing, done twice, or gives zeros."""
    node, what = part.nodes[i], place_of(part, i)
    for k, ref in operands(part, i):
        if node.name in MOVING or getattr(part.get(part.base, ref), "shape", None) != part.base[i].shape:
            continue
        others = [place_of(part, r.node) for j, r in operands(part, i) if j != k]
        unused = f": {', '.join(others)} takes no part" if others else ""
        kind = kind_of_drop(part, i, others, model)
        yield Mutant(f"{what} is missing{unused}", 1, kind, {i: argument(k)})
        if not node.writes:
            again: Edit = lambda p, v, i, k=k: with_argument(k, p.call(i, v))(p, v, i)  # type: ignore[misc]  # noqa: E731
            yield Mutant(f"{what} is done twice", 2, "operation differs", {i: again})
    if node.func is not None and i != part.root.node:
        yield Mutant(f"{what} gives zeros", 2, "operation missing", {i: changed(torch.zeros_like)})


def kind_of_drop(part: Slice, i: int, others: Sequence[str], model: Model) -> Kind:
    """Call what is missing by what takes no part."""
    name = part.nodes[i].name.strip("_")
    if any(other in model.tensors and other.endswith("bias") for other in others):
        return "bias missing"
    shown = [r for _, r in operands(part, i) if part.nodes[r.node].origin is not None]
    return "residual missing" if name in ("add", "iadd") and len(shown) == 2 else "operation missing"


def replaced(part: Slice, i: int, model: Model) -> Iterator[Mutant]:
    """The operation is one of its siblings."""
    node, what = part.nodes[i], place_of(part, i)
    acts = SIBLINGS.get(node.name) is ACTIVATIONS
    for text, func in SIBLINGS.get(node.name, ()):
        kind: Kind = "activation kind" if acts else "operation differs"
        yield Mutant(f"{what} is {text}", 1.5, kind, {i: instead(func)})
    for block in model.sizes if node.name == "mean" else ():
        if part.get(part.base, part.nodes[i].refs[0]).shape[-1] % block == 0:
            text = f"{what} is taken in blocks of {block}"
            yield Mutant(text, 1.5, "operation differs", {i: instead(in_blocks(block))})


def other_activation(part: Slice, model: Model) -> Iterator[Mutant]:
    """A module without weights that the model's own code computes from its input, as GPT-2's GELU, is another one."""
    site, given = part.seen.site, part.seen.captured.get(f"{part.seen.site}:in")
    weights = any(node.label in model.tensors for node in part.nodes)
    if ":" in site or weights or given is None or given.shape != part.seen.actual.shape:
        return
    for text, func in ACTIVATIONS:

        def edit(s: Slice, values: Values, i: int, func: Callable[..., Any] = func) -> Any:
            return func(s.seen.captured[f"{s.seen.site}:in"].to(s.base[i].dtype))

        yield Mutant(f"{site} is {text}", 1.5, "activation kind", {part.root.node: edit})


def in_blocks(block: int) -> Callable[..., torch.Tensor]:
    """Mean of each block of the last axis, for all of its elements."""

    def mean(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        means = split(x, -1, (-1, block)).mean(-1, keepdim=True).expand(*x.shape[:-1], -1, block)
        return means.flatten(-2)

    return mean


def other_sign(part: Slice, i: int) -> Iterator[Mutant]:
    """What a node gives is negated, or counts as its absolute value."""
    what = output_or_place(part, i)
    if part.nodes[i].name not in MOVING and (part.nodes[i].func is not None or part.nodes[i].label):
        yield Mutant(f"{what} is negated", 2, "sign", {i: changed(torch.neg)})
        text = f"the absolute value of {what} takes part"
        yield Mutant(text, 2.5, "operation differs", {i: changed(torch.abs)})
        if part.base[i].ndim and part.base[i].shape[-1] > 1:
            text = f"the mean is taken off {what}"
            yield Mutant(text, 2.5, "operation differs", {i: changed(lambda x: x - x.mean(-1, keepdim=True))})


def other_order(part: Slice, i: int) -> Iterator[Mutant]:
    """Operands or parts in the wrong order."""
    node, what = part.nodes[i], place_of(part, i)
    if len(operands(part, i)) == 2 and node.name in ("sub", "__sub__", "div", "__truediv__", "matmul", "bmm"):
        func = node.func
        assert func is not None
        swap = instead(lambda a, b, func=func: func(b, a))
        yield Mutant(f"the operands of {what} are exchanged", 2, "operation differs", {i: swap})
    if len(node.args) == 2 == len(operands(part, i)):
        for k, name in enumerate(("first", "second")):
            both: Edit = lambda p, v, i, k=k: with_argument(1 - k, p.arguments(i, v)[0][k])(p, v, i)  # type: ignore[misc]  # noqa: E731
            yield Mutant(f"{what} takes its {name} operand twice", 2.5, "operation differs", {i: both})
    if node.name in ("cat", "stack", "chunk", "split"):
        taken = with_argument(0, lambda tensors: list(tensors)[::-1])
        reverse = taken if node.name in ("cat", "stack") else changed(lambda tensors: tensors[::-1])
        yield Mutant(f"the parts of {what} come in reverse", 2, "operation differs", {i: reverse})


def swapped_lines(part: Slice) -> Iterator[Mutant]:
    """Two operations on one tensor come in the other order."""
    for b, node in enumerate(part.nodes):
        if node.func is None or len(node.refs) != 1 or not is_float(part.base[b]):
            continue
        a = node.refs[0].node
        before = part.nodes[a]
        if before.func is None or len(before.refs) != 1 or getattr(part.base[a], "shape", None) != part.base[b].shape:
            continue

        def exchanged(s: Slice, values: Values, i: int, a: int = a) -> Any:
            first = list(values)
            first[a] = s.get(values, s.nodes[a].refs[0])
            first[s.nodes[a].refs[0].node] = s.call(i, first)
            return s.call(a, first)

        text = f"{place_of(part, a)} comes after {place_of(part, b)}"
        yield Mutant(text, 2, "operation differs", {b: exchanged})


def reductions(part: Slice) -> Iterator[Mutant]:
    """All reductions of a site go over another axis, as a softmax over the queries does."""
    found = [i for i, n in enumerate(part.nodes) if n.name in ("sum", "amax", "mean") and n.kwargs.get("keepdim")]
    for axis in (-2, -3) if len(found) > 1 else ():

        def along(s: Slice, values: Values, i: int, axis: int = axis) -> Any:
            return getattr(torch, s.nodes[i].name)(s.arguments(i, values)[0][0], axis, keepdim=True)

        last = part.nodes[found[-1]]
        text = f"the reductions up to `{last.code}` ({last.source}) go over axis {axis}"
        yield Mutant(text, 2, "operation differs", dict.fromkeys(found, along))
    for top, total in pairwise(found):
        if part.nodes[top].name == "amax" and part.nodes[total].name == "sum":
            text = f"{place_of(part, total)} counts one more key, of score 0"
            edits = {total: partial(one_more, top)}
            yield Mutant(text, 1.5, "softmax not normalized", edits)


def one_more(top: int, part: Slice, values: Values, i: int) -> Any:
    """Add what a score of 0 has in a softmax, relative to the largest, to the sum."""
    return part.call(i, values) + torch.exp(-values[top])
