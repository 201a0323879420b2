"""Cut a pair of tensors into blocks that fit a cache, and hold one of them in float64: no more is ever copied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]

BLOCK = 3 << 16
"""Elements in a block: with fewer, threads spend their time handing the interpreter lock to each other."""

GROUP = 32
"""Boxes that are cut at once: each call into torch may hand the interpreter lock to another thread."""

SHORT = 8192
"""Elements that numpy's BLAS takes in one thread; OpenBLAS starts threads above 10000, torch where it was told to."""


@dataclass(frozen=True, slots=True)
class Split:
    """One axis along which the error is split: element row ``r`` belongs to index ``r // stride % size``."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How a pair is walked: ``row`` elements lie behind the last split axis; ``boxes`` are cut from ``views``."""

    views: tuple[torch.Tensor, ...]
    row: int
    splits: tuple[Split, ...]
    block: int

    def boxes(self, first: int, last: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield ``(flat start, one view for each tensor)`` for the boxes number ``first`` up to ``last``.

        A box is a contiguous range in logical (row-major) order, whatever the strides are.
        """
        shape = self.views[0].shape
        if self.views[0].numel() <= self.block:
            yield from [(0, list(self.views))][first:last]
            return
        cut, rows, chunks = self._cut()
        trail = math.prod(shape[cut + 1 :])
        for number in range(first, last):
            outer, chunk = divmod(number, chunks)
            if number == first or not chunk % GROUP:
                index, begin = unravel(outer, shape[:cut]), chunk
                group = [torch.split(view[index][begin * rows : (begin + GROUP) * rows], rows) for view in self.views]
            yield (outer * shape[cut] + chunk * rows) * trail, [part[chunk - begin] for part in group]

    @property
    def count(self) -> int:
        """Number of boxes."""
        shape = self.views[0].shape
        if self.views[0].numel() <= self.block:
            return min(1, self.views[0].numel())
        cut, _, chunks = self._cut()
        return math.prod(shape[:cut]) * chunks

    def _cut(self) -> tuple[int, int, int]:
        """Return the dimension that is cut, the indices of it in a box, and the boxes along it."""
        shape = self.views[0].shape
        cut, trail = len(shape) - 1, 1
        while cut > 0 and trail * shape[cut] <= self.block:
            trail *= shape[cut]
            cut -= 1
        rows = max(1, min(shape[cut], self.block // trail))
        return cut, rows, -(-shape[cut] // rows)


class Buffers:
    """Float64 scratch space for one worker: a row for actual (then the difference), expected, temporary.

    Every call into torch gives up the interpreter lock, which two workers then hand to each other. So views are cut
    once for all boxes of a size, and sums are read through numpy.
    """

    __slots__ = (
        *("arrays", "ends", "half", "keys", "mask", "numbers", "short", "sides", "size", "sum", "sums", "tensors"),
        "whole",
    )

    def __init__(self, size: int) -> None:
        self.whole = torch.empty((3, size), dtype=torch.float64)
        self.sums = torch.empty(2, dtype=torch.float64)
        self.sum = self.sums[0]
        self.numbers = self.sums.numpy()
        self.cut(size)

    def cut(self, size: int) -> None:
        """Cut the views to boxes of ``size`` elements.

        ``mask`` reuses the row of expected, ``half``, ``short`` and ``keys`` the temporary one, when their values are
        not needed.
        """
        rows = self.whole[:, :size]
        self.size = size
        self.half: torch.Tensor | None = None
        self.tensors = rows.unbind()
        self.sides, self.ends = rows[:2], rows[::2]
        self.arrays: Floats = rows.numpy()
        self.mask = self.arrays[1].view(np.bool_)[:size]
        self.short = self.tensors[2].view(torch.bfloat16)[:size]
        self.keys = self.short.view(torch.int16)

    def load(self, side: int, box: torch.Tensor) -> None:
        """Convert a box to float64 in logical order."""
        if box.dtype == torch.float16:
            # torch converts float16 to float32 in vector registers, float16 to float64 one by one.
            if self.half is None:
                self.half = self.tensors[2].view(torch.float32)[: self.size]
            box = (self.half if box.dim() == 1 else self.half.view(box.shape)).copy_(box)
        target = self.tensors[side]
        (target if box.dim() == 1 else target.view(box.shape)).copy_(box)

    def dot(self, first: int, second: int) -> float:
        """Return the inner product of two rows, by the BLAS that will not start threads of its own at this size."""
        if self.size <= SHORT:
            return float(self.arrays[first].dot(self.arrays[second]))
        torch.dot(self.tensors[first], self.tensors[second], out=self.sum)
        return float(self.numbers[0])

    def totals(self) -> list[float]:
        """Return the sums of the difference and the temporary row."""
        if self.size <= SHORT:
            return np.add.reduce(self.arrays[::2], axis=1).tolist()  # type: ignore[no-any-return]
        torch.sum(self.ends, 1, out=self.sums)
        return self.numbers.tolist()  # type: ignore[no-any-return]


def plan(tensors: Sequence[torch.Tensor], axes: Sequence[tuple[str, int]], block: int = BLOCK) -> Plan:
    """Plan the walk over tensors of one shape; ``axes`` are the ``(name, dimension)`` pairs to split the error by."""
    shape = tensors[0].shape
    row = math.prod(shape[max((dim for _, dim in axes), default=-1) + 1 :]) if axes else 1
    splits = tuple(Split(name, shape[dim], max(1, math.prod(shape[dim + 1 :]) // max(1, row))) for name, dim in axes)
    if all(tensor.is_contiguous() for tensor in tensors):
        views = tuple(tensor.view(-1, row) if splits and row else tensor.view(-1) for tensor in tensors)
    else:
        views = tuple(tensors)
    return Plan(views, row, splits, block)


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of element number ``flat`` of a tensor of ``shape``, in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))
