"""Every number about a pair of tensors, in one pass over them.

:func:`measure` walks the pair in cache-sized blocks, sums in float64, and returns a :class:`Metrics`: plain numbers,
JSON-ready. Nothing is broadcast, nothing is converted whole, and only numbers leave the device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ditto_core.compare._accumulate import Accumulator, Buffers, Rules
from ditto_core.compare._blocks import BLOCK, Plan, plan, unravel
from ditto_core.compare.ulp import coarser, spacing, tolerance
from ditto_core.errors import DittoError, UsageError

Index = tuple[int, ...]
Number = float | int | bool

THREADED = 1 << 20
"""Elements from which a second thread pays for its start."""

MAX_THREADS = 3
"""Each worker holds 4.5 MB of scratch space; together they stay below 16 MB."""

OCTAVE = 128
"""Bins in an octave: bfloat16 has 7 bits of mantissa."""

QUANTILES = (0.5, 0.9, 0.99, 0.999)


class ShapeMismatch(DittoError):
    """The two tensors have different shapes: nothing is broadcast."""

    def __init__(self, actual: Sequence[int], expected: Sequence[int]) -> None:
        self.actual, self.expected = tuple(actual), tuple(expected)
        super().__init__(f"shapes differ: actual {list(self.actual)}, expected {list(self.expected)}")


@dataclass(frozen=True, slots=True)
class Metrics:
    """What :func:`measure` found. ``actual`` is the engine's tensor a, ``expected`` the reference's b, d = a - b.

    Positions that are not valid count nowhere. NaN and Inf are counted by position and left out of every sum, mean and
    maximum. Indices are tuples, None where there is nothing to point at.

    - ``count``: elements compared. ``rel_l2``: ||d|| / ||b||, 0 for 0/0, inf for x/0, inf when a NaN or Inf stands
      where the other side has something else (a NaN equals a NaN only with ``equal_nan``).
    - ``max_abs``, ``max_abs_index``, ``max_abs_actual``, ``max_abs_expected``; ``mean_abs``; ``mse``, ``rms`` of d.
    - ``snr_db``: -20 log10 rel_l2. ``cosine``: <a,b> / (||a|| ||b||), 1 for two zero tensors, 0 for one.
    - ``max_rel``, ``mean_rel``: |d| / |b| over the elements whose expected value is not 0.
    - ``max_ulp``: largest |d| in units in the last place of the coarser dtype at b (1 for integers).
    - ``mismatched``: elements with |d| > atol + rtol |b|, and unequal NaN and Inf; ``mismatch_ratio`` = its share;
      ``first_mismatch``; ``worst_mismatch``: the one furthest beyond what is allowed.
    - ``p50``, ``p90``, ``p99``, ``p999``: quantiles of |d| over the finite elements, from a one-pass histogram of
      |d| rounded to bfloat16: within 2^-8 (0.4 %) of the element at rank ceil(q n); 0 is exact, ``max_abs`` the limit.
    - ``histogram``: ``(lower edge, count)`` of the non-empty octaves of |d|, ``[edge, 2 edge)``; edge 0 holds the zeros
      (rounded to bfloat16 as above).
    - ``nan_*``, ``inf_*``: how many on each side; ``nan_mismatch``: NaN on one side only; ``inf_mismatch``: Inf against
      anything but the same Inf or a NaN; ``first_nonfinite``: index and ``actual``, ``expected`` or ``both``.
    - ``max_actual``, ``max_expected``: largest finite |x|; ``headroom``: max_actual / the dtype's largest number.
    - ``scale``: least-squares factor <a,b> / <b,b> that maps expected onto actual; ``scale_residual``: rel_l2 that
      is left after it (not resolved below about 1e-8).
    - ``by_row``, ``by_position``, ``by_head``: rel_l2 along the axes ``batch``, ``length`` (else ``total``, else
      ``past``) and ``head``; empty where there is no such axis.
    """

    count: int
    rel_l2: float
    max_abs: float
    max_abs_index: Index | None
    max_abs_actual: Number | None
    max_abs_expected: Number | None
    mean_abs: float
    rms: float
    mse: float
    snr_db: float
    cosine: float
    max_rel: float
    mean_rel: float
    max_ulp: float
    mismatched: int
    mismatch_ratio: float
    first_mismatch: Index | None
    worst_mismatch: Index | None
    rtol: float
    atol: float
    p50: float
    p90: float
    p99: float
    p999: float
    histogram: tuple[tuple[float, int], ...]
    nan_actual: int
    nan_expected: int
    nan_mismatch: int
    inf_actual: int
    inf_expected: int
    inf_mismatch: int
    first_nonfinite: tuple[Index, str] | None
    all_zero_actual: bool
    all_zero_expected: bool
    max_actual: float
    max_expected: float
    headroom: float
    scale: float
    scale_residual: float
    by_row: tuple[float, ...] = ()
    by_position: tuple[float, ...] = ()
    by_head: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON: NaN and Inf become ``"nan"``, ``"inf"``, ``"-inf"``."""
        return {item.name: encode(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metrics:
        """Inverse of :meth:`to_json`."""
        return cls(**{name: decode(value) for name, value in data.items()})


def encode(value: Any) -> Any:
    """Make a number, or nested tuples of them, fit for strict JSON."""
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(value: Any) -> Any:
    """Inverse of :func:`encode`."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    return float(value) if value in ("nan", "inf", "-inf") else value


def measure(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    axes: Sequence[str] = (),
    valid: torch.Tensor | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    threads: int | None = None,
) -> Metrics:
    """Compare two tensors of one shape, of any strides and of any real dtypes, in one pass.

    ``axes`` names every dimension (``batch``, ``head``, ``length`` …, or an empty string). ``valid`` is a bool tensor
    that broadcasts to the shape; elements where it is False do not count. ``rtol`` and ``atol`` default to the table
    of :func:`~ditto_core.compare.ulp.tolerance` for the coarser dtype. On the CPU, tensors of a million elements and
    more are measured by ``threads`` workers (default: one a core, at most 3). Tensors on two devices: the smaller is
    moved. Raises :class:`ShapeMismatch`, and :class:`UsageError` for complex dtypes and for axes that do not fit.
    """
    if actual.shape != expected.shape:
        raise ShapeMismatch(actual.shape, expected.shape)
    if actual.is_complex() or expected.is_complex():
        raise UsageError("complex tensors have no ULP and no order: compare torch.view_as_real of both")
    if axes and len(axes) != actual.dim():
        raise UsageError(f"{len(axes)} axes for {actual.dim()} dimensions: {', '.join(map(repr, axes))}")
    actual, expected, valid = together(actual.detach(), expected.detach(), valid)
    coarse = coarser(actual.dtype, expected.dtype)
    default = tolerance(coarse)
    layout = plan([t for t in (actual, expected, valid) if t is not None], split_axes(axes))
    rules = Rules(
        rtol=default[0] if rtol is None else rtol,
        atol=default[1] if atol is None else atol,
        equal_nan=equal_nan,
        place=spacing(coarse),
        wide=torch.float64 in (actual.dtype, expected.dtype),
        row=layout.row,
        splits=layout.splits,
    )
    return assemble(walk(layout, rules, threads), actual, expected)


def together(
    actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Bring the tensors to one device, moving the smaller, and expand the mask to their shape."""
    if actual.device != expected.device:
        if actual.nbytes < expected.nbytes:
            actual = actual.to(expected.device)
        else:
            expected = expected.to(actual.device)
    if valid is not None:
        try:
            valid = valid.to(device=actual.device, dtype=torch.bool).expand(actual.shape)
        except RuntimeError as error:
            raise ShapeMismatch(valid.shape, actual.shape) from error
    return actual, expected, valid


def split_axes(axes: Sequence[str]) -> list[tuple[str, int]]:
    """Return ``(field of Metrics, dimension)`` for each axis that the error is split along."""
    named = {name: dim for dim, name in enumerate(axes) if name}
    position = next((named[name] for name in ("length", "total", "past") if name in named), None)
    found = (("by_row", named.get("batch")), ("by_position", position), ("by_head", named.get("head")))
    return [(name, dim) for name, dim in found if dim is not None]


def walk(layout: Plan, rules: Rules, threads: int | None) -> Accumulator:
    """Run the pass, in the calling thread or in several over equal parts."""
    size = layout.views[0].numel()
    if size < BLOCK // 4:
        return run_part(layout, rules, 0, layout.count)
    workers = min(worker_count(size) if threads is None else threads, max(1, layout.count))
    with single_threaded_torch():
        if workers <= 1:
            return run_part(layout, rules, 0, layout.count)
        cuts = [layout.count * i // workers for i in range(workers + 1)]
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            parts = list(pool.map(lambda i: run_part(layout, rules, cuts[i], cuts[i + 1]), range(workers)))
    for part in parts[1:]:
        parts[0].merge(part)
    return parts[0]


def worker_count(size: int) -> int:
    """Return how many workers pay for a tensor of ``size`` elements on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS) if size >= THREADED else 1


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Keep torch from starting threads of its own for a block: they would fight with the workers for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_part(layout: Plan, rules: Rules, first: int, last: int) -> Accumulator:
    """Measure the boxes number ``first`` up to ``last``."""
    seen = Accumulator(rules, Buffers(min(layout.block, layout.views[0].numel())))
    with np.errstate(all="ignore"):
        for start, (actual, expected, *valid) in layout.boxes(first, last):
            seen.add(start, actual, expected, valid[0] if valid else None)
    return seen


def assemble(seen: Accumulator, actual: torch.Tensor, expected: torch.Tensor) -> Metrics:
    """Turn sums into metrics; the few single values that are shown are read from the tensors."""
    rules, finite, shape = seen.rules, seen.count - seen.nonfinite, actual.shape
    counts = seen.bins
    counts[0] = finite - int(counts[1:].sum())
    at = place(seen.max_abs_at, shape)
    first = place(seen.first_nonfinite, shape)
    p50, p90, p99, p999 = quantiles(counts, finite, seen.max_abs)
    return Metrics(
        count=seen.count,
        max_abs=seen.max_abs,
        max_abs_index=at,
        max_abs_actual=None if at is None else actual[at].item(),
        max_abs_expected=None if at is None else expected[at].item(),
        mean_abs=seen.abs_sum / max(1, finite),
        max_rel=seen.max_rel,
        mean_rel=seen.rel_sum / max(1, seen.rel_count),
        max_ulp=seen.max_steps / rules.place.eps if rules.place.eps else seen.max_abs,
        mismatched=seen.mismatched,
        mismatch_ratio=seen.mismatched / max(1, seen.count),
        first_mismatch=place(seen.first_mismatch, shape),
        worst_mismatch=place(seen.worst_mismatch, shape),
        rtol=rules.rtol,
        atol=rules.atol,
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
        histogram=octaves(counts),
        first_nonfinite=None if first is None else (first, nonfinite_side(actual[first], expected[first])),
        all_zero_actual=seen.count > 0 and seen.max_actual == 0 and not seen.nan_actual + seen.inf_actual,
        all_zero_expected=seen.count > 0 and seen.max_expected == 0 and not seen.nan_expected + seen.inf_expected,
        max_actual=seen.max_actual,
        max_expected=seen.max_expected,
        headroom=seen.max_actual / spacing(actual.dtype).largest,
        nan_actual=seen.nan_actual,
        nan_expected=seen.nan_expected,
        nan_mismatch=seen.nan_mismatch,
        inf_actual=seen.inf_actual,
        inf_expected=seen.inf_expected,
        inf_mismatch=seen.inf_mismatch,
        **norms(seen, finite),
        **axis_errors(seen),
    )


def axis_errors(seen: Accumulator) -> dict[str, Any]:
    """Return ``by_row``, ``by_position`` and ``by_head``, as far as there are such axes."""
    return {split.name: by_axis(*seen.split(i)) for i, split in enumerate(seen.rules.splits)}


def norms(seen: Accumulator, finite: int) -> dict[str, Any]:
    """Return the metrics that are made of sums of squares. Long doubles carry what float64 cannot square."""
    dd, aa, bb, ab = (seen.total(name) for name in ("difference", "actual", "expected", "product"))
    norm_a, norm_b = np.sqrt(aa), np.sqrt(bb)
    rel = math.inf if seen.unequal_nonfinite else ratio(np.sqrt(dd), norm_b)
    scale = float(ab / bb) if bb else 1.0 if not aa else math.inf
    cosine = float(ab / (norm_a * norm_b)) if aa and bb else float(not aa and not bb)
    left = math.sqrt(max(0.0, 1 - cosine * cosine))
    return {
        "rel_l2": rel,
        "mse": float(dd / max(1, finite)),
        "rms": float(np.sqrt(dd / max(1, finite))),
        "snr_db": -20 * math.log10(rel) if rel else math.inf,
        "cosine": min(1.0, max(-1.0, cosine)),
        "scale": scale,
        "scale_residual": ratio(left, abs(cosine)) if aa and bb else rel,
    }


def ratio(error: Any, size: Any) -> float:
    """Return error / size, with 0 for 0/0 and inf for x/0."""
    if not error:
        return 0.0
    return float(error / size) if size else math.inf


def by_axis(errors: Any, sizes: Any) -> tuple[float, ...]:
    """Return the relative L2 error of each index of an axis, from squared errors and sizes."""
    with np.errstate(all="ignore"):
        found = np.where(errors == 0, 0.0, np.sqrt(errors) / np.sqrt(sizes)).astype(np.float64)
    return tuple(found.tolist())


def place(flat: int, shape: Sequence[int]) -> Index | None:
    """Return the index of a flat position, None for -1."""
    return None if flat < 0 else unravel(flat, shape)


def nonfinite_side(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Tell on which side one element is NaN or Inf."""
    a, b = (not math.isfinite(x.item()) for x in (actual, expected))
    return "both" if a and b else "actual" if a else "expected"


def bin_values(bins: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the bfloat16 value that each bin stands for."""
    return (bins << 16).astype(np.int32).view(np.float32)


def quantiles(counts: npt.NDArray[np.int64], count: int, largest: float) -> list[float]:
    """Return the values at each of the ranks ``QUANTILES`` of the elements."""
    bins = np.flatnonzero(counts)
    if not bins.size:
        return [0.0] * len(QUANTILES)
    at = np.searchsorted(np.cumsum(counts[bins]), np.array(QUANTILES) * count)
    return [min(float(x), largest) for x in bin_values(bins[at])]


def octaves(counts: npt.NDArray[np.int64]) -> tuple[tuple[float, int], ...]:
    """Sum the bins by octave and return the non-empty ones, zeros first."""
    zeros = int(counts[0])
    starts = np.arange(0, counts.size, OCTAVE)
    sums = np.add.reduceat(counts, starts)
    sums[0] -= zeros
    found = np.flatnonzero(sums)
    edges = bin_values(starts[found]).tolist()
    return (*(((0.0, zeros),) if zeros else ()), *zip(edges, sums[found].tolist(), strict=True))
