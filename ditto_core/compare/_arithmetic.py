"""Arithmetic on blocks of float64 numbers with controlled precision and threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ditto_core.compare._blocks import SHORT, Floats, Plan, Split

Counts = npt.NDArray[np.int64]

LONG_ROW = 64
"""Elements from which a row is worth a call of the BLAS."""

EXACT_INTEGERS = 2.0**53

LONG = frozenset((torch.int64, torch.uint64))
"""Dtypes of integers that float64 may not hold."""


@dataclass(slots=True)
class Squares:
    """Sums of products: difference, actual and expected squared, actual times expected; and the splits by axis."""

    difference: float = 0.0
    actual: float = 0.0
    expected: float = 0.0
    product: float = 0.0
    by_axis: list[tuple[Floats, Floats]] = field(default_factory=list)

    @classmethod
    def empty(cls, splits: Iterable[Split]) -> Squares:
        """Return zeros, with one pair of arrays for each axis."""
        return cls(by_axis=[(np.zeros(split.size), np.zeros(split.size)) for split in splits])

    def add(self, layout: Plan, start: int, sums: tuple[float, ...], d: Floats, b: Floats) -> None:
        """Add a box's sums; with split axes, the squares of each element row go to their index on each axis."""
        self.difference += sums[0]
        self.actual += sums[1]
        self.expected += sums[2]
        self.product += sums[3]
        if not layout.splits:
            return
        errors, sizes = row_squares(d, layout.row), row_squares(b, layout.row)
        first = start // layout.row
        rows = np.arange(first, first + errors.size) if errors.size > 1 else first
        for split, (error, size) in zip(layout.splits, self.by_axis, strict=True):
            index = rows // split.stride % split.size
            if errors.size == 1:
                error[index] += errors[0]
                size[index] += sizes[0]
            else:
                np.add.at(error, index, errors)
                np.add.at(size, index, sizes)

    def merge(self, other: Squares) -> None:
        """Add another part's sums."""
        self.difference += other.difference
        self.actual += other.actual
        self.expected += other.expected
        self.product += other.product
        for mine, theirs in zip(self.by_axis, other.by_axis, strict=True):
            np.add(mine[0], theirs[0], out=mine[0])
            np.add(mine[1], theirs[1], out=mine[1])


def comparable(first: float, second: float) -> bool:
    """Tell whether <a,b> = (|a|^2 + |b|^2 - |a-b|^2) / 2 keeps its digits: the sizes are of one kind."""
    return 1e-4 < first / second < 1e4 if first and second else False


def added(bins: Counts, counts: Counts) -> Counts:
    """Add two histograms of different lengths into the longer one."""
    long, short = (bins, counts) if bins.size >= counts.size else (counts, bins)
    long[: short.size] += short
    return long


def earliest(known: int, position: int) -> int:
    """Return the smaller position, where -1 is none."""
    return position if known < 0 else min(known, position)


def dot(x: Floats, y: Floats) -> float:
    """Return the inner product, by the BLAS that will not start threads of its own at this size."""
    if x.size <= SHORT:
        return float(x.dot(y))
    return float(torch.dot(torch.from_numpy(x), torch.from_numpy(y)))


def row_squares(x: Floats, row: int) -> Floats:
    """Sum the squares of each row of ``row`` elements; a part of a single row gives one sum."""
    row = x.size if x.size % row else row
    rows = x.reshape(-1, row)
    if row > SHORT or row == x.size:
        return np.array([dot(each, each) for each in rows])
    if row >= LONG_ROW:
        products: Floats = np.matmul(rows[:, None], rows[:, :, None])
        return products.reshape(-1)
    sums: Floats = torch.from_numpy(np.square(rows)).sum(1).numpy()
    return sums


def out_of_range(a: Floats, b: Floats) -> bool:
    """Tell whether squares of these float64 numbers could overflow or vanish."""
    largest = np.abs(a)
    np.maximum(largest, np.abs(b), out=largest)
    if largest.size and largest.min() >= 2.0**-500:
        return bool(largest.max() > 2.0**500)
    return bool(((largest > 2.0**500) | ((largest < 2.0**-500) & (largest > 0))).any())


def exact_difference(actual: torch.Tensor, expected: torch.Tensor, a: Floats, b: Floats) -> Floats | None:
    """Return differences right to one rounding for 64-bit integers that float64 cannot hold; None where it can."""
    if not {actual.dtype, expected.dtype} & LONG:
        return None
    if all(side.min() > -EXACT_INTEGERS and side.max() < EXACT_INTEGERS for side in (a, b)):
        return None
    large = np.maximum(np.abs(a), np.abs(b)) >= EXACT_INTEGERS
    (high_a, low_a), (high_b, low_b) = halves(actual, a), halves(expected, b)
    difference: Floats = np.where(large, (high_a - high_b) + (low_a - low_b), a - b)
    return difference


def halves(box: torch.Tensor, values: Floats) -> tuple[Floats, Floats | float]:
    """Return a box of 64-bit integers as the exact sum of two float64 parts; any other box is its own high part."""
    if box.dtype not in LONG:
        return values, 0.0
    integers = box.cpu().numpy().reshape(-1)
    low = integers & 0xFFFFFFFF
    return (integers - low).astype(np.float64), low.astype(np.float64)


def runs(values: npt.NDArray[np.int16]) -> tuple[Counts, Counts]:
    """Return the distinct values, ascending, and how often each occurs."""
    ordered = np.sort(values)
    ends = np.concatenate(([-1], (ordered[1:] != ordered[:-1]).nonzero()[0], [ordered.size - 1]))
    return ordered[ends[1:]].astype(np.int64), ends[1:] - ends[:-1]
