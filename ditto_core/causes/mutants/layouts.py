"""Layouts: the right numbers in the wrong places, and parts of a tensor that are lost or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ditto_core.causes.mutants.base import Edits, Model, Mutant, changed, is_float, output_or_place, place_of, split
from ditto_core.causes.mutants.operations import MOVING
from ditto_core.causes.slices import LARGE, Slice, Values

Move = Callable[[torch.Tensor], torch.Tensor]
WIDEST = 8192
"""Output channels up to which any order is searched: memory grows with the square."""

USEFUL = frozenset(
    ("cat", "matmul", "mm", "bmm", "__add__", "add", "__mul__", "mul", "site", "embedding", "conv1d", "conv2d", "gelu",
     "silu", "relu", "repeat_interleave", "view", "reshape", "transpose", "expand")
)  # fmt: skip
"""Operations whose result is laid out anew; that of the others is tried where it comes from or goes to."""


def layouts(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield other layouts of the site's own tensor, of what comes in, and of what is worth it between."""
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not is_float(value) or not value.ndim:
            continue
        if not (node.func is None or i == part.root.node or node.name in USEFUL):
            continue
        what, more = output_or_place(part, i), 0.0 if node.func is None or i == part.root.node else 0.5
        large = value.numel() > LARGE
        for text, price, move in moves(value.shape, model.sizes):
            if large and not text.startswith("transposed"):
                continue  # what is no view takes too long
            yield Mutant(f"{what} is {text}", price + more, "other layout", {i: changed(move)})
        # where an embedding's output is wrong at some tokens, the ids are
        looked_up = i == part.root.node and any(n.name == "embedding" for n in part.nodes)
        for text, price, move in () if looked_up or large else ranges(value.shape):
            yield Mutant(f"{what} is {text}", price + more, "part of a tensor", {i: changed(move)}, family="ranges")
    yield from pairs(part, model)
    if any(node.label in model.tensors and part.base[i].ndim == 2 for i, node in enumerate(part.nodes)):
        yield from channels(part)


def moves(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[str, float, Move]]:
    """Yield text, price and function of what keeps a shape and all numbers."""
    for axis, size in enumerate(shape):
        if size > 1:
            yield from along(axis, size, f"along axis {axis - len(shape)}", sizes)
    for a in range(len(shape)):
        for b in range(a + 1, len(shape)):
            if min(shape[a], shape[b]) > 1:
                names = f"axes {a - len(shape)} and {b - len(shape)}"
                if shape[a] == shape[b]:
                    yield f"transposed ({names})", 2, partial(torch.transpose, dim0=a, dim1=b)
                yield f"read as if {names} were exchanged", 2.5, partial(read_exchanged, a, b)


def along(axis: int, size: int, where: str, sizes: Sequence[int]) -> Iterator[tuple[str, float, Move]]:
    """Yield the moves along one axis."""
    for shift in (1, -1):
        yield f"rolled by {shift} {where}", 2.5, partial(torch.roll, shifts=shift, dims=axis)
    yield f"reversed {where}", 2.5, partial(torch.flip, dims=(axis,))
    if size % 2 == 0:
        yield f"half by half exchanged {where}", 2.5, partial(torch.roll, shifts=size // 2, dims=axis)
        yield f"exchanged in neighbouring pairs {where}", 2.5, partial(blocks_swapped, axis, 1)
    for k in range(2, size) if size <= 128 else sorted({2, 3, 4, 8, size // 2, *sizes}):
        if k < size and size % k == 0:
            usual = k in (2, size // 2) or k in sizes or size // k in sizes
            text = f"laid out as [{size // k}, {k}] in place of [{k}, {size // k}] {where}"
            yield text, 2.5 if usual else 3.5, partial(interleaved, axis, k)
            if usual and k > 2:
                yield f"in {k} blocks that are reversed {where}", 3, partial(blocks_reversed, axis, k)
            if usual and k % 2 == 0 and k > 2:
                yield f"in {k} blocks that are exchanged in pairs {where}", 3, partial(blocks_swapped, axis, size // k)
    for block in (b for b in sizes if 3 < b < size and size % b == 0 and b % 2 == 0):
        text = f"half by half exchanged in blocks of {block} {where}"
        yield text, 3, partial(within, axis, block, partial(torch.roll, shifts=block // 2, dims=axis + 1))
        for k in (2, block // 2):
            text = f"laid out as [{block // k}, {k}] in place of [{k}, {block // k}] in blocks of {block} {where}"
            yield text, 3, partial(within, axis, block, partial(interleaved, axis + 1, k))


def interleaved(axis: int, k: int, t: torch.Tensor) -> torch.Tensor:
    """Read [k, n / k] along an axis as [n / k, k]."""
    return split(t, axis, (k, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)


def blocks_reversed(axis: int, k: int, t: torch.Tensor) -> torch.Tensor:
    """Reverse the order of k blocks."""
    return split(t, axis, (k, -1)).flip(axis).flatten(axis, axis + 1)


def blocks_swapped(axis: int, size: int, t: torch.Tensor) -> torch.Tensor:
    """Exchange neighbouring blocks of a size."""
    return split(t, axis, (-1, 2, size)).flip(axis + 1).flatten(axis, axis + 2)


def within(axis: int, block: int, move: Move, t: torch.Tensor) -> torch.Tensor:
    """Move within blocks of a size."""
    return move(split(t, axis, (-1, block))).flatten(axis, axis + 1)


def read_exchanged(a: int, b: int, t: torch.Tensor) -> torch.Tensor:
    """Keep the shape and read the numbers in the order of another layout."""
    return t.transpose(a, b).reshape(t.shape)


def ranges(shape: Sequence[int]) -> Iterator[tuple[str, float, Move]]:
    """Yield text, price and function of what loses or repeats a part."""
    for axis, size in enumerate(shape):
        where = f"along axis {axis - len(shape)}"
        for k in (range(size) if size <= 64 else sorted({size // 8 * j for j in range(8)})) if size > 1 else ():
            more = 0.0 if k in (0, 1, size - 1) or 2 * k == size else 0.5
            if k:
                yield f"zero from index {k} on {where}", 3 + more, partial(masked, axis, range(k, size))
                yield f"zero before index {k} {where}", 3 + more, partial(masked, axis, range(k))
            if size <= 16 and 0 < k < size - 1:
                yield f"zero at index {k} {where}", 4, partial(masked, axis, range(k, k + 1))
            yield f"what it is at index {k} everywhere {where}", 2.5 + 1.5 * bool(k), partial(repeated, axis, k)


def masked(axis: int, lost: range, t: torch.Tensor) -> torch.Tensor:
    """Set a range of indices to zero; it ends with the axis where the model's ended with it."""
    index = torch.arange(t.shape[axis]).view([-1] + [1] * (t.ndim - 1 - axis))
    return torch.where((index >= lost.start) & (index < lost.stop), torch.zeros((), dtype=t.dtype), t)


def repeated(axis: int, k: int, t: torch.Tensor) -> torch.Tensor:
    """One index stands for all."""
    return t.narrow(axis, min(k, t.shape[axis] - 1), 1).expand_as(t)


def pairs(part: Slice, model: Model) -> Iterator[Mutant]:
    """Everything between two nodes takes the last axis in pairs of neighbours in place of halves, or vice versa."""
    for a, before in enumerate(part.nodes):
        x = part.base[a]
        if not is_float(x) or x.ndim < 2 or x.shape[-1] % 2 or before.label in model.tensors:
            continue
        readers = [node.name for node in part.nodes if any(ref.node == a for ref in node.refs)]
        if before.name in MOVING and all(name in MOVING for name in readers):
            continue  # what moves it on stands for it
        for b in range(a + 1, len(part.nodes)):
            y = part.base[b]
            if not part.below[a] >> b & 1 or not is_float(y) or y.shape != x.shape or part.nodes[b].name in MOVING:
                continue
            for text, k in (("neighbouring pairs, not in halves", 2), ("halves, not in neighbouring pairs", -2)):
                half = k if k > 0 else x.shape[-1] // 2
                words = f"from {place_of(part, a)} to {place_of(part, b)} the last axis is taken in {text}"
                yield Mutant(words, 2.5, "RoPE interleaved", conjugated(a, b, half))


def conjugated(a: int, b: int, k: int) -> Edits:
    """Lay node a out anew, go on to node b, and lay that back."""

    def edit(part: Slice, values: Values, i: int) -> Any:
        def into(p: Slice, v: Values, j: int) -> Any:
            t = p.base[j]
            return split(t, -1, (-1, k)).transpose(-1, -2).flatten(-2)

        out = part.run({a: into}, upto=b)
        return split(out, -1, (k, -1)).transpose(-1, -2).flatten(-2)

    return {b: edit}


def channels(part: Slice) -> Iterator[Mutant]:
    """The right output channels in whatever order, as a wrongly split fused weight gives them."""
    actual, expected = (part.seen.rows(side.double()) for side in (part.seen.actual, part.expected))
    size = actual.shape[1]
    if not 1 < size <= WIDEST:
        return
    order = torch.cdist(actual.T.contiguous(), expected.T.contiguous()).argmin(1)
    moved = int((order != torch.arange(size)).sum())
    if moved and len(torch.unique(order)) == size:
        text = f"{moved} of the output's {size} channels are in other places: {order[:8].tolist()} …"
        edit = changed(lambda t: t[..., order])
        yield Mutant(text, 1.9, "fused weight order", {part.root.node: edit})
