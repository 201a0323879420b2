"""The one pass: everything that is measured, gathered block by block in float64.

Blocks are converted to float64 once; all arithmetic then runs in preallocated buffers, so that memory does not grow
with the tensors. NaN and Inf are found through the sums of squares that are needed anyway: a block whose sum is finite
holds none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ditto_core.compare._arithmetic import (
    Counts,
    Squares,
    added,
    comparable,
    dot,
    earliest,
    exact_difference,
    out_of_range,
    runs,
)
from ditto_core.compare._blocks import SHORT, Buffers, Floats, Plan
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
    single: bool = field(init=False)
    least: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.single = self.layout.count == 1
        self.least = torch.scalar_tensor(self.rules.atol, dtype=torch.float64)
        self.squares[0] = Squares.empty(self.layout.splits)

    def add(self, start: int, actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Measure one box; ``start`` is the flat position of its first element."""
        size = actual.numel()
        if size != self.buffers.size:
            self.buffers.cut(size)
        a, b, _ = self.buffers.arrays
        self.buffers.load(0, actual)
        self.buffers.load(1, expected)
        self.count += size if valid is None else self._drop(a, b, valid)
        sizes = self.buffers.dot(0, 0), self.buffers.dot(1, 1)
        early = self.single or self.rules.wide or valid is not None
        if not math.isfinite(sum(sizes)):
            self._take_nonfinite(start, a, b)
            sizes, early = (self.buffers.dot(0, 0), self.buffers.dot(1, 1)), True
        if early:
            self.max_actual = max(self.max_actual, float(a.max()), -float(a.min()))
        scaled = self.rules.wide and out_of_range(a, b)
        if scaled:
            self._sum_scaled(start, a, b)
        product = None if comparable(*sizes) else dot(a, b)
        exact = exact_difference(actual, expected, a, b)
        d = np.subtract(a, b, out=a)
        if exact is not None:
            d[:] = exact
        error = 0.0
        if not scaled:
            error = self.buffers.dot(0, 0)
            product = (sum(sizes) - error) / 2 if product is None else product
            self.squares[0].add(self.layout, start, (error, *sizes, product), d, b)
        self._magnitudes(start, different=bool(error) or bool(d.any()))
        # |a| <= |b| + |d|: most blocks cannot hold a new maximum, and a is converted again for the few that can.
        if not early and self.top_of_block > self.max_actual:
            self.buffers.load(0, actual)
            self.max_actual = max(self.max_actual, float(a.max()), -float(a.min()))

    def _drop(self, a: Floats, b: Floats, valid: torch.Tensor) -> int:
        """Zero what is not valid, so that it adds to no sum, and return how many elements count."""
        ignored = np.flatnonzero(~valid.cpu().numpy().reshape(-1))
        a[ignored] = 0
        b[ignored] = 0
        return a.size - ignored.size

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

    def _magnitudes(self, start: int, different: bool) -> None:
        """Take what depends on |d| and |b|; only the latter where nothing differs."""
        self.buffers.sides.abs_()
        d, b, t = self.buffers.arrays
        if not different:
            self.top_of_block = largest = float(b.max())
            self.max_expected = max(self.max_expected, largest)
            self.rel_count += int(np.count_nonzero(b))
            return
        np.divide(d, b, out=t)
        top, largest, relative = np.maximum.reduce(self.buffers.arrays, axis=1).tolist()
        self.max_expected = max(self.max_expected, largest)
        self.top_of_block = top + largest
        if top > self.max_abs:
            self.max_abs, self.max_abs_at = top, start + int(d.argmax())
        abs_sum, rel_sum = self.buffers.totals()
        self.abs_sum += abs_sum
        self._relative(top, relative, rel_sum)
        if top > self.rules.atol:
            self._outside(start, top)
        self._bin()

    def _relative(self, top: float, largest: float, rel_sum: float) -> None:
        """Relative error t = d / b: infinite where only b is zero; where both are, there is nothing to relate."""
        d, b, t = self.buffers.arrays
        zeros = 0
        if not math.isfinite(rel_sum):
            nothing = np.flatnonzero(b == 0)
            zeros = nothing.size
            if zeros:
                t[nothing] = np.where(d[nothing] > 0, math.inf, 0.0)
                if top > self.max_steps * self.rules.place.tiny:
                    self.max_steps = max(self.max_steps, float(d[nothing].max()) / self.rules.place.tiny)
            largest, rel_sum = float(t.max()), self.buffers.totals()[1]
        self.rel_sum += rel_sum
        self.rel_count += b.size - zeros
        self.max_rel = max(self.max_rel, largest)
        # |d| / 2^floor(log2 |b|) is below 2 |d / b|: few elements can hold a new maximum.
        if 2 * largest > self.max_steps:
            if not self.max_steps and d.size > SHORT:
                # The largest relative error first: it leaves few to look at, and so few to copy.
                self._steps(d, b, np.array([t.argmax()]))
            chosen = np.flatnonzero(t > self.max_steps / 2)
            for first in range(0, chosen.size, SHORT):
                self._steps(d, b, chosen[first : first + SHORT])

    def _steps(self, d: Floats, b: Floats, chosen: Counts) -> None:
        """Count the chosen errors in powers of two at the expected value, at least the coarser dtype's smallest."""
        power = b[chosen]
        bits = power.view(np.int64)
        np.bitwise_and(bits, EXPONENT_BITS, out=bits)
        np.maximum(power, self.rules.place.tiny, out=power)
        self.max_steps = max(self.max_steps, float(np.divide(d[chosen], power, out=power).max()))

    def _outside(self, start: int, top: float) -> None:
        """Count |d| > atol + rtol |b|, where the bound is rounded once."""
        outside, (d, _, bound) = self.buffers.mask, self.buffers.arrays
        torch.add(self.least, self.buffers.tensors[1], alpha=self.rules.rtol, out=self.buffers.tensors[2])
        np.greater(d, bound, out=outside)
        count = int(np.count_nonzero(outside))
        if not count:
            return
        self.mismatched += count
        if self.first_mismatch < 0 or self.first_mismatch >= start:
            self.first_mismatch = earliest(self.first_mismatch, start + int(outside.argmax()))
        if top - self.rules.atol > self.worst_excess:
            excess = np.subtract(d, bound, out=bound)
            at = int(excess.argmax())
            if excess[at] > self.worst_excess:
                self.worst_excess, self.worst_mismatch = float(excess[at]), start + at

    def _bin(self) -> None:
        """Count errors by their bfloat16 value, whose bits are in the order of the values."""
        keys = self.buffers.keys
        self.buffers.short.copy_(self.buffers.tensors[0])
        if self.single and keys.numel() <= SHORT:
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
