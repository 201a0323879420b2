"""Arithmetic on blocks of float64 numbers that keeps its digits and its threads in hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

SHORT = 8192
"""Elements that numpy's BLAS takes in one thread; OpenBLAS starts threads above 10000, torch where it was told to."""

EXACT_INTEGERS = 2.0**53


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


def total(x: Floats) -> float:
    """Return the sum: by numpy where the call dominates, by torch's vectorized cascade where the data do."""
    if x.size <= SHORT:
        return float(np.add.reduce(x))
    return float(torch.from_numpy(x).sum())


def row_squares(x: Floats, row: int) -> Floats:
    """Sum the squares of each row of ``row`` elements; a part of a single row gives one sum."""
    row = x.size if x.size % row else row
    if row == x.size <= SHORT:
        return np.array([x.dot(x)])
    sums: Floats = torch.from_numpy(np.square(x)).view(-1, row).sum(1).numpy()
    return sums


def out_of_range(a: Floats, b: Floats) -> bool:
    """Tell whether squares of these float64 numbers could overflow or vanish."""
    largest = np.maximum(np.abs(a), np.abs(b))
    return bool(((largest > 2.0**500) | ((largest < 2.0**-500) & (largest > 0))).any())


def exact_difference(actual: torch.Tensor, expected: torch.Tensor, a: Floats, b: Floats) -> Floats | None:
    """Return differences right to one rounding for 64-bit integers that float64 cannot hold; None where it can."""
    if torch.int64 not in (actual.dtype, expected.dtype):
        return None
    large = np.maximum(np.abs(a), np.abs(b)) >= EXACT_INTEGERS
    if not large.any():
        return None
    (high_a, low_a), (high_b, low_b) = halves(actual, a), halves(expected, b)
    difference: Floats = np.where(large, (high_a - high_b) + (low_a - low_b), a - b)
    return difference


def halves(box: torch.Tensor, values: Floats) -> tuple[Floats, Floats | float]:
    """Return an int64 box as the exact sum of two float64 parts; any other box is its own high part."""
    if box.dtype != torch.int64:
        return values, 0.0
    integers = box.cpu().numpy().reshape(-1)
    low = integers & 0xFFFFFFFF
    return (integers - low).astype(np.float64), low.astype(np.float64)


def runs(values: npt.NDArray[np.int16]) -> tuple[Counts, Counts]:
    """Return the distinct values, ascending, and how often each occurs."""
    ordered = np.sort(values)
    ends = np.append((ordered[1:] != ordered[:-1]).nonzero()[0], ordered.size - 1)
    return ordered[ends].astype(np.int64), np.diff(ends, prepend=-1)
