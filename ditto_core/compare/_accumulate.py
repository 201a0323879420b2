"""The one pass: everything that is measured, gathered block by block in float64.

Blocks are converted to float64 once; all arithmetic then runs in preallocated buffers, so that memory does not grow
with the tensors. NaN and Inf are found through the sums of squares that are needed anyway: a block whose sum is finite
holds none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ditto_core.compare._blocks import Split
from ditto_core.compare.ulp import Spacing

Floats = npt.NDArray[np.float64]

BIN_SHIFT = 48
"""Bits of a float64 below its histogram bin: sign, 11 exponent and 4 mantissa bits remain, 16 bins an octave."""

BINS = 1 << 15
EXPONENT_BITS = np.int64(0x7FF0000000000000)
RESCALE = 600
"""Squares of float64 numbers above 2^500 or below 2^-500 are summed scaled by 2^-600 or 2^600."""

EXACT_INTEGERS = 2.0**53


@dataclass(frozen=True, slots=True)
class Rules:
    """What the pass needs to know beyond the data. ``place`` is the spacing of the coarser dtype."""

    rtol: float
    atol: float
    equal_nan: bool
    place: Spacing
    wide: bool
    row: int
    splits: tuple[Split, ...]


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

    def merge(self, other: Squares) -> None:
        """Add another part's sums."""
        self.difference += other.difference
        self.actual += other.actual
        self.expected += other.expected
        self.product += other.product
        for mine, theirs in zip(self.by_axis, other.by_axis, strict=True):
            mine[0].__iadd__(theirs[0])
            mine[1].__iadd__(theirs[1])


class Buffers:
    """Float64 scratch space for one worker: actual, expected, difference, temporary."""

    __slots__ = ("arrays", "half", "integers", "keys", "tensors")

    def __init__(self, size: int) -> None:
        self.tensors = [torch.empty(size, dtype=torch.float64) for _ in range(4)]
        self.arrays: list[Floats] = [tensor.numpy() for tensor in self.tensors]
        self.keys = self.tensors[3].view(torch.int64)
        self.integers: npt.NDArray[np.int64] = self.keys.numpy()
        self.half: torch.Tensor | None = None

    def load(self, side: int, box: torch.Tensor) -> None:
        """Convert a box to float64 in logical order."""
        size = box.numel()
        if box.dtype == torch.float16:
            # torch converts float16 to float32 in vector registers, float16 to float64 one by one.
            if self.half is None:
                self.half = torch.empty(self.tensors[0].numel())
            box = self.half[:size].view(box.shape).copy_(box)
        self.tensors[side][:size].view(box.shape).copy_(box)


@dataclass(slots=True)
class Accumulator:
    """What one worker has seen so far. Positions are flat, in row-major order; -1 stands for none."""

    rules: Rules
    buffers: Buffers
    squares: dict[int, Squares] = field(default_factory=dict)
    bins: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    count: int = 0
    nonfinite: int = 0
    abs_sum: float = 0.0
    rel_sum: float = 0.0
    rel_count: int = 0
    max_abs: float = 0.0
    max_abs_at: int = -1
    max_rel: float = 0.0
    max_steps: float = 0.0
    max_actual: float = 0.0
    max_expected: float = 0.0
    mismatched: int = 0
    first_mismatch: int = -1
    worst_excess: float = 0.0
    worst_mismatch: int = -1
    nan_actual: int = 0
    nan_expected: int = 0
    nan_mismatch: int = 0
    inf_actual: int = 0
    inf_expected: int = 0
    inf_mismatch: int = 0
    unequal_nonfinite: int = 0
    first_nonfinite: int = -1

    def __post_init__(self) -> None:
        self.squares[0] = Squares.empty(self.rules.splits)

    def add(self, start: int, actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Measure one box; ``start`` is the flat position of its first element."""
        size = actual.numel()
        a, b, d, t = (array[:size] for array in self.buffers.arrays)
        self.buffers.load(0, actual)
        self.buffers.load(1, expected)
        self.count += size if valid is None else self._drop(a, b, valid)
        sizes = float(a.dot(a)), float(b.dot(b))
        if not math.isfinite(sum(sizes)):
            self._take_nonfinite(start, a, b)
            sizes = float(a.dot(a)), float(b.dot(b))
        np.subtract(a, b, out=d)
        if torch.int64 in (actual.dtype, expected.dtype):
            exact_difference(actual, expected, a, b, d)
        if self.rules.wide and out_of_range(a, b):
            self._sum_squares_scaled(start, a, b, d, t)
        else:
            self._sum_squares(self.squares[0], sizes, start, a, b, d, t)
        self._magnitudes(start, a, b, d, t)

    def _drop(self, a: Floats, b: Floats, valid: torch.Tensor) -> int:
        """Zero what is not valid, so that it adds to no sum, and return how many elements count."""
        ignored = ~valid.numpy().reshape(-1)
        a[ignored] = 0
        b[ignored] = 0
        return ignored.size - int(np.count_nonzero(ignored))

    def _take_nonfinite(self, start: int, a: Floats, b: Floats) -> None:
        """Count NaN and Inf by position and zero them on both sides. Overflowing squares of finite numbers pass."""
        places = np.flatnonzero(~(np.isfinite(a) & np.isfinite(b)))
        if not places.size:
            return
        x, y = a[places], b[places]
        a[places] = 0
        b[places] = 0
        nan_x, nan_y, same = np.isnan(x), np.isnan(y), x == y
        either, both = nan_x | nan_y, nan_x & nan_y
        self.nan_actual += int(nan_x.sum())
        self.nan_expected += int(nan_y.sum())
        self.nan_mismatch += int((nan_x ^ nan_y).sum())
        self.inf_actual += int(np.isinf(x).sum())
        self.inf_expected += int(np.isinf(y).sum())
        self.inf_mismatch += int((~either & ~same).sum())
        self.nonfinite += places.size
        if self.first_nonfinite < 0:
            self.first_nonfinite = start + int(places[0])
        unequal = places[~(same | both) if self.rules.equal_nan else ~same]
        if unequal.size:
            self.unequal_nonfinite += unequal.size
            self._mismatch(start, unequal.size, int(unequal[0]), int(unequal[0]), math.inf)

    def _mismatch(self, start: int, count: int, first: int, worst: int, excess: float) -> None:
        """Record elements outside the tolerance: how many, the first, and the one that is furthest outside."""
        self.mismatched += count
        if self.first_mismatch < 0 or start + first < self.first_mismatch:
            self.first_mismatch = start + first
        if excess > self.worst_excess:
            self.worst_excess, self.worst_mismatch = excess, start + worst

    def _sum_squares(
        self, sums: Squares, sizes: tuple[float, float], start: int, a: Floats, b: Floats, d: Floats, t: Floats
    ) -> None:
        sums.difference += float(d.dot(d))
        sums.actual += sizes[0]
        sums.expected += sizes[1]
        sums.product += float(a.dot(b))
        if not self.rules.splits:
            return
        errors, sizes = (row_sums(np.multiply(x, x, out=t), self.rules.row) for x in (d, b))
        rows = np.arange(start // self.rules.row, start // self.rules.row + errors.size)
        for split, (error, size) in zip(self.rules.splits, sums.by_axis, strict=True):
            index = rows // split.stride % split.size
            np.add.at(error, index, errors)
            np.add.at(size, index, sizes)

    def _sum_squares_scaled(self, start: int, a: Floats, b: Floats, d: Floats, t: Floats) -> None:
        """Sum float64 numbers whose squares leave float64's range, each kind at its own scale."""
        largest = np.maximum(np.abs(a), np.abs(b))
        huge, small = largest > 2.0**500, largest < 2.0**-500
        for power, chosen in ((-RESCALE, huge), (0, ~(huge | small)), (RESCALE, small)):
            x = np.where(chosen, np.ldexp(a, power), 0.0)
            y = np.where(chosen, np.ldexp(b, power), 0.0)
            z = x - y if power else np.where(chosen, d, 0.0)
            sums = self.squares.setdefault(power, Squares.empty(self.rules.splits))
            self._sum_squares(sums, (float(x.dot(x)), float(y.dot(y))), start, x, y, z, t)

    def _magnitudes(self, start: int, a: Floats, b: Floats, d: Floats, t: Floats) -> None:
        for array in (a, b, d):
            np.abs(array, out=array)
        self.max_actual = max(self.max_actual, float(a.max()))
        self.max_expected = max(self.max_expected, float(b.max()))
        top = float(d.max())
        if top == 0.0:
            self.rel_count += int(np.count_nonzero(b))
            return
        self.abs_sum += float(d.sum())
        if top > self.max_abs:
            self.max_abs, self.max_abs_at = top, start + int(d.argmax())
        self._relative(b, d, t)
        if top > self.rules.atol:
            self._outside(start, b, d, t)
        self._bin(d)

    def _relative(self, b: Floats, d: Floats, t: Floats) -> None:
        """Relative error where the expected value is not zero."""
        np.divide(d, b, out=t)
        total, zeros = float(t.sum()), 0
        if not math.isfinite(total):
            nothing = b == 0
            t[nothing] = 0
            total, zeros = float(t.sum()), int(np.count_nonzero(nothing))
        largest = float(t.max())
        self.rel_sum += total
        self.rel_count += b.size - zeros
        self.max_rel = max(self.max_rel, largest)
        # |d| / 2^floor(log2 |b|) is below 2 |d / b|: most blocks cannot hold a new maximum.
        if zeros or 2 * largest > self.max_steps:
            np.bitwise_and(b.view(np.int64), EXPONENT_BITS, out=t.view(np.int64))
            np.maximum(t, self.rules.place.tiny, out=t)
            self.max_steps = max(self.max_steps, float(np.divide(d, t, out=t).max()))

    def _outside(self, start: int, b: Floats, d: Floats, t: Floats) -> None:
        np.multiply(b, self.rules.rtol, out=t)
        np.add(t, self.rules.atol, out=t)
        np.subtract(d, t, out=t)
        excess = float(t.max())
        if excess > 0:
            outside = t > 0
            self._mismatch(start, int(np.count_nonzero(outside)), int(outside.argmax()), int(t.argmax()), excess)

    def _bin(self, d: Floats) -> None:
        np.right_shift(d.view(np.int64), BIN_SHIFT, out=self.buffers.integers[: d.size])
        counts = torch.bincount(self.buffers.keys[: d.size]).numpy()
        self.bins[: counts.size] += counts

    def merge(self, other: Accumulator) -> None:
        """Add what another worker saw behind this one's part."""
        for power, sums in other.squares.items():
            self.squares.setdefault(power, Squares.empty(self.rules.splits)).merge(sums)
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in LARGEST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        if other.max_abs > self.max_abs:
            self.max_abs, self.max_abs_at = other.max_abs, other.max_abs_at
        if other.worst_excess > self.worst_excess:
            self.worst_excess, self.worst_mismatch = other.worst_excess, other.worst_mismatch
        for name in FIRST:
            if getattr(self, name) < 0:
                setattr(self, name, getattr(other, name))

    def total(self, name: str) -> Any:
        """Return a sum of products: a float, or numpy's long double when numbers left float64's range."""
        if len(self.squares) == 1:
            return getattr(self.squares[0], name)
        return sum(np.ldexp(np.longdouble(getattr(s, name)), -2 * power) for power, s in self.squares.items())

    def split(self, axis: int) -> tuple[Any, Any]:
        """Return the squared error and the squared size along one split axis."""
        if len(self.squares) == 1:
            return self.squares[0].by_axis[axis]
        parts = [(p, *s.by_axis[axis]) for p, s in self.squares.items()]
        error = sum(np.ldexp(e.astype(np.longdouble), -2 * p) for p, e, _ in parts)
        size = sum(np.ldexp(s.astype(np.longdouble), -2 * p) for p, _, s in parts)
        return error, size


SUMMED = (
    *("bins", "count", "nonfinite", "abs_sum", "rel_sum", "rel_count", "mismatched", "unequal_nonfinite"),
    *("nan_actual", "nan_expected", "nan_mismatch", "inf_actual", "inf_expected", "inf_mismatch"),
)
LARGEST = ("max_rel", "max_steps", "max_actual", "max_expected")
FIRST = ("first_mismatch", "first_nonfinite")


def row_sums(squares: Floats, row: int) -> Floats:
    """Sum each row of ``row`` elements; a part of a single row gives one sum."""
    if squares.size % row:
        return squares.sum(keepdims=True)
    return squares.reshape(-1, row).sum(axis=1)


def out_of_range(a: Floats, b: Floats) -> bool:
    """Tell whether squares of these float64 numbers could overflow or vanish."""
    largest = np.maximum(np.abs(a), np.abs(b))
    return bool(((largest > 2.0**500) | ((largest < 2.0**-500) & (largest > 0))).any())


def exact_difference(actual: torch.Tensor, expected: torch.Tensor, a: Floats, b: Floats, d: Floats) -> None:
    """Put differences into ``d`` that are right to one rounding for 64-bit integers, which float64 cannot hold."""
    if max(float(a.max()), -float(a.min()), float(b.max()), -float(b.min())) < EXACT_INTEGERS:
        return
    (high_a, low_a), (high_b, low_b) = (halves(box, x) for box, x in ((actual, a), (expected, b)))
    ignored = (a == 0) & (b == 0)
    np.add(high_a - high_b, low_a - low_b, out=d)
    d[ignored] = 0


def halves(box: torch.Tensor, values: Floats) -> tuple[Any, Any]:
    """Return an int64 box as the exact sum of two float64 parts; any other box is its own high part."""
    if box.dtype != torch.int64:
        return values, 0.0
    integers = box.numpy().reshape(-1)
    low = integers & 0xFFFFFFFF
    return (integers - low).astype(np.float64), low.astype(np.float64)
