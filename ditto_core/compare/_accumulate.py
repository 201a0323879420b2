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
import torch

from ditto_core.compare._arithmetic import (
    SHORT,
    Counts,
    Floats,
    added,
    comparable,
    dot,
    earliest,
    exact_difference,
    out_of_range,
    row_squares,
    runs,
    total,
)
from ditto_core.compare._blocks import Plan, Split
from ditto_core.compare.ulp import Spacing

EXPONENT_BITS = np.int64(0x7FF0000000000000)
OCTAVE = 128
"""Bfloat16 values in an octave."""
RESCALE = 600
"""Squares of float64 numbers above 2^500 or below 2^-500 are summed scaled by 2^-600 or 2^600."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the pass needs to know beyond the data. ``place`` is the spacing of the coarser dtype."""

    rtol: float
    atol: float
    equal_nan: bool
    place: Spacing
    wide: bool


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


class Buffers:
    """Float64 scratch space for one worker: actual (then the difference), expected, temporary."""

    __slots__ = ("arrays", "half", "short", "tensors")

    def __init__(self, size: int) -> None:
        whole = torch.empty((3, size), dtype=torch.float64)
        self.tensors = whole.unbind()
        self.arrays: list[Floats] = list(whole.numpy())
        self.half = self.tensors[2].view(torch.float32)[:size]
        self.short = self.tensors[2].view(torch.bfloat16)[2 * size : 3 * size]

    def load(self, side: int, box: torch.Tensor) -> None:
        """Convert a box to float64 in logical order."""
        size = box.numel()
        if box.dtype == torch.float16:
            # torch converts float16 to float32 in vector registers, float16 to float64 one by one.
            box = self.half[:size].view(box.shape).copy_(box)
        target = self.tensors[side][:size]
        (target if box.dim() == 1 else target.view(box.shape)).copy_(box)


@dataclass(slots=True)
class Accumulator:
    """What one worker has seen so far. Positions are flat, in row-major order; -1 stands for none.

    ``values``: both sides at the largest error, where the worker had them at hand. ``fine``: a bin is a bfloat16 value;
    otherwise it is an octave.
    """

    rules: Rules
    layout: Plan
    buffers: Buffers
    squares: dict[int, Squares] = field(default_factory=dict)
    bins: Counts = field(default_factory=lambda: np.zeros(1, np.int64))
    few: tuple[Counts, Counts] | None = None
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
    top_of_block: float = 0.0
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
    fine: bool = True
    values: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self.squares[0] = Squares.empty(self.layout.splits)

    def add(self, start: int, actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Measure one box; ``start`` is the flat position of its first element."""
        size = actual.numel()
        a, b, t = (array[:size] for array in self.buffers.arrays)
        self.buffers.load(0, actual)
        self.buffers.load(1, expected)
        self.count += size if valid is None else self._drop(a, b, valid)
        sizes = dot(a, a), dot(b, b)
        dropped = valid is not None
        if not math.isfinite(sum(sizes)):
            self._take_nonfinite(start, a, b)
            sizes, dropped = (dot(a, a), dot(b, b)), True
        if dropped or self.rules.wide:
            self.max_actual = max(self.max_actual, float(a.max()), -float(a.min()))
        scaled = self.rules.wide and out_of_range(a, b)
        if scaled:
            self._sum_scaled(start, a, b)
        product = None if comparable(*sizes) else dot(a, b)
        exact = exact_difference(actual, expected, a, b)
        d = np.subtract(a, b, out=a)
        if exact is not None:
            d[:] = exact
        if not scaled:
            error = dot(d, d)
            product = (sum(sizes) - error) / 2 if product is None else product
            self.squares[0].add(self.layout, start, (error, *sizes, product), d, b)
        self._magnitudes(start, b, d, t)
        # |a| <= |b| + |d|: most blocks cannot hold a new maximum, and a is converted again for the few that can.
        if not (dropped or self.rules.wide) and self.top_of_block > self.max_actual:
            self.buffers.load(0, actual)
            self.max_actual = max(self.max_actual, float(a.max()), -float(a.min()))

    def _drop(self, a: Floats, b: Floats, valid: torch.Tensor) -> int:
        """Zero what is not valid, so that it adds to no sum, and return how many elements count."""
        ignored = ~valid.cpu().numpy().reshape(-1)
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
        self.max_actual = max(self.max_actual, float(np.abs(x[np.isfinite(x)]).max(initial=0.0)))
        self.max_expected = max(self.max_expected, float(np.abs(y[np.isfinite(y)]).max(initial=0.0)))
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
            self.mismatched += unequal.size
            self.first_mismatch = earliest(self.first_mismatch, start + int(unequal[0]))
            if self.worst_excess < math.inf:
                self.worst_excess, self.worst_mismatch = math.inf, start + int(unequal[0])

    def _sum_scaled(self, start: int, a: Floats, b: Floats) -> None:
        """Sum float64 numbers whose squares leave float64's range, each kind at its own scale."""
        largest = np.maximum(np.abs(a), np.abs(b))
        huge, small = largest > 2.0**500, largest < 2.0**-500
        for power, chosen in ((-RESCALE, huge), (0, ~(huge | small)), (RESCALE, small)):
            x, y = (np.where(chosen, np.ldexp(side, power), 0.0) for side in (a, b))
            z = x - y
            sums = self.squares.setdefault(power, Squares.empty(self.layout.splits))
            sums.add(self.layout, start, (dot(z, z), dot(x, x), dot(y, y), dot(x, y)), z, y)

    def _magnitudes(self, start: int, b: Floats, d: Floats, t: Floats) -> None:
        np.abs(d, out=d)
        np.abs(b, out=b)
        top, largest = float(d.max()), float(b.max())
        self.max_expected = max(self.max_expected, largest)
        self.top_of_block = top + largest
        if top == 0.0:
            self.rel_count += int(np.count_nonzero(b))
            return
        self.abs_sum += total(d)
        if top > self.max_abs:
            self.max_abs, self.max_abs_at = top, start + int(d.argmax())
        self._relative(b, d, t)
        if top > self.rules.atol:
            self._outside(start, b, d, t, top)
        self._bin(d)

    def _relative(self, b: Floats, d: Floats, t: Floats) -> None:
        """Relative error where the expected value is not zero."""
        np.divide(d, b, out=t)
        sum_, zeros = total(t), 0
        if not math.isfinite(sum_):
            nothing = np.flatnonzero(b == 0)
            zeros = nothing.size
            if zeros:
                t[nothing] = 0
                self.max_steps = max(self.max_steps, float(d[nothing].max()) / self.rules.place.tiny)
            sum_ = total(t)
        largest = float(t.max())
        self.rel_sum += sum_
        self.rel_count += b.size - zeros
        self.max_rel = max(self.max_rel, largest)
        # |d| / 2^floor(log2 |b|) is below 2 |d / b|: few elements can hold a new maximum.
        if 2 * largest > self.max_steps:
            # The largest relative error first: it leaves few to look at, and so few to copy.
            for at in (np.array([t.argmax()]), None):
                chosen = np.flatnonzero(t > self.max_steps / 2) if at is None else at
                if chosen.size:
                    self.max_steps = max(self.max_steps, float((d[chosen] / self._power(b[chosen])).max()))

    def _power(self, b: Floats) -> Floats:
        """Return 2^floor(log2 b), at least the smallest normal number of the coarser dtype."""
        power = np.bitwise_and(b.view(np.int64), EXPONENT_BITS).view(np.float64)
        raised: Floats = np.maximum(power, self.rules.place.tiny)
        return raised

    def _outside(self, start: int, b: Floats, d: Floats, t: Floats, top: float) -> None:
        atol = self.rules.atol
        np.subtract(d, np.multiply(b, self.rules.rtol, out=t), out=t)
        if top - atol > self.worst_excess:
            excess = float(t.max()) - atol
            if excess <= 0:
                return
            if excess > self.worst_excess:
                self.worst_excess, self.worst_mismatch = excess, start + int(t.argmax())
        outside = t > atol
        count = int(np.count_nonzero(outside))
        self.mismatched += count
        if count and (self.first_mismatch < 0 or self.first_mismatch >= start):
            self.first_mismatch = earliest(self.first_mismatch, start + int(outside.argmax()))

    def _bin(self, d: Floats) -> None:
        """Count errors by their bfloat16 value, whose bits are in the order of the values."""
        half, short = self.buffers.half[: d.size], self.buffers.short[: d.size]
        keys = short.copy_(half.copy_(torch.from_numpy(d))).view(torch.int16)
        if self.layout.count == 1 and d.size <= SHORT:
            # A dense histogram would cost a small tensor more in page faults than all the rest.
            self.few = runs(keys.numpy())
        else:
            self.bins = added(self.bins, torch.bincount(keys).numpy())

    def histogram(self) -> tuple[Counts, Counts]:
        """Return the bins of |d| that hold elements, ascending, and how many; bin 0 holds the zeros that count."""
        if self.few is None:
            bins = (self.bins != 0).nonzero()[0]
            numbers = self.bins[bins]
            if not self.fine:
                bins = np.maximum(bins * OCTAVE, 1)
        else:
            bins, numbers = self.few
        if bins.size and bins[0] == 0:
            bins, numbers = bins[1:], numbers[1:]
        zeros = self.count - self.nonfinite - int(numbers.sum())
        if not zeros:
            return bins, numbers
        return np.concatenate([[0], bins]), np.concatenate([[zeros], numbers])

    def shift(self, start: int) -> None:
        """Move the places of a part that starts at position ``start``."""
        for name in PLACES:
            if getattr(self, name) >= 0:
                setattr(self, name, getattr(self, name) + start)

    def merge(self, other: Accumulator) -> None:
        """Add what another worker saw behind this one's part."""
        for power, sums in other.squares.items():
            self.squares.setdefault(power, Squares.empty(self.layout.splits)).merge(sums)
        self.bins = added(self.bins, other.bins)
        self.fine = self.fine and other.fine
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in LARGEST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        if other.max_abs > self.max_abs:
            self.max_abs, self.max_abs_at, self.values = other.max_abs, other.max_abs_at, other.values
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
    *("count", "nonfinite", "abs_sum", "rel_sum", "rel_count", "mismatched", "unequal_nonfinite"),
    *("nan_actual", "nan_expected", "nan_mismatch", "inf_actual", "inf_expected", "inf_mismatch"),
)
LARGEST = ("max_rel", "max_steps", "max_actual", "max_expected")
FIRST = ("first_mismatch", "first_nonfinite")
PLACES = (*FIRST, "max_abs_at", "worst_mismatch")
