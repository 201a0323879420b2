"""Every number about a pair of tensors, in one pass over them.

:func:`measure` walks the pair in cache-sized blocks, sums in float64, and returns a :class:`Metrics`: plain numbers,
JSON-ready. Nothing is broadcast, nothing is converted whole, and only numbers leave the device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from ditto_core.compare import cuda
from ditto_core.compare._accumulate import Accumulator, Rules
from ditto_core.compare._assemble import assemble
from ditto_core.compare._blocks import BLOCK, Buffers, Plan, plan
from ditto_core.compare._record import Metrics
from ditto_core.compare.ulp import coarser, spacing, tolerance
from ditto_core.errors import DittoError, UsageError
from ditto_core.system.threads import torch_threads

THREADED = 1 << 20
"""Elements from which a second thread pays for its start."""

MAX_THREADS = 4
"""More workers get smaller blocks, so that together they need about 10 MB; below these blocks threads stop paying."""

__all__ = ["Metrics", "ShapeMismatch", "measure"]


class ShapeMismatch(DittoError):
    """The two tensors have different shapes: nothing is broadcast."""

    def __init__(self, actual: Sequence[int], expected: Sequence[int]) -> None:
        self.actual, self.expected = tuple(actual), tuple(expected)
        super().__init__(f"shapes differ: actual {list(self.actual)}, expected {list(self.expected)}")


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
    """Compare two tensors of one shape, of any strides and dtypes, in one pass.

    ``axes`` names every dimension (``batch``, ``head``, ``length`` …, or an empty string). ``valid`` is a bool tensor
    that broadcasts to the shape; elements where it is False do not count. ``rtol`` and ``atol`` default to the table
    of :func:`~ditto_core.compare.ulp.tolerance` for the coarser dtype. On the CPU, tensors of a million elements and
    more are measured by ``threads`` workers (default: one a core, at most 4). Tensors on two devices: the smaller is
    moved. Complex numbers are compared by the magnitudes |a - b| and |b|, as numpy does. Raises
    :class:`ShapeMismatch`, and :class:`UsageError` for packed dtypes and for axes that do not fit.
    """
    if actual.is_complex() or expected.is_complex():
        return measure_complex(actual, expected, axes, valid, (rtol, atol, equal_nan), threads)
    pair = prepare(actual, expected, valid, axes)
    rules = make_rules(pair, rtol, atol, equal_nan)
    return assemble(walk(pair, rules, threads), pair.actual, pair.expected)


@dataclass(frozen=True, slots=True)
class Tensors:
    """Two tensors of one shape on one device, an optional mask of that shape, and the dimensions to split by."""

    actual: torch.Tensor
    expected: torch.Tensor
    valid: torch.Tensor | None
    axes: list[tuple[str, int]]

    def plan(self, block: int) -> Plan:
        """Cut the pair into boxes of at most ``block`` elements."""
        return plan([t for t in (self.actual, self.expected, self.valid) if t is not None], self.axes, block)


def prepare(actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None, axes: Sequence[str]) -> Tensors:
    """Check that two tensors can be compared, and bring them together. Raises as :func:`measure` does."""
    if actual.shape != expected.shape:
        raise ShapeMismatch(actual.shape, expected.shape)
    if axes and len(axes) != actual.dim():
        raise UsageError(f"{len(axes)} axes for {actual.dim()} dimensions: {', '.join(map(repr, axes))}")
    return Tensors(*together(actual.detach(), expected.detach(), valid), split_axes(axes))


def measure_complex(
    actual: torch.Tensor,
    expected: torch.Tensor,
    axes: Sequence[str],
    valid: torch.Tensor | None,
    bounds: tuple[float | None, float | None, bool],
    threads: int | None,
) -> Metrics:
    """Compare complex numbers: errors and sizes are magnitudes; cosine, scale and sizes of parts are those of
    ``view_as_real``. A copy of both in complex128 is made.
    """
    if actual.shape != expected.shape:
        raise ShapeMismatch(actual.shape, expected.shape)
    coarse = coarser(actual.dtype.to_real(), expected.dtype.to_real())
    actual, expected, valid = together(actual.detach(), expected.detach(), valid)
    a, b = (side.to(torch.complex128).resolve_conj() for side in (actual, expected))
    pair = prepare(*magnitudes(a, b), valid, axes)
    found = assemble(walk(pair, make_rules(pair, *bounds, coarse), threads), pair.actual, pair.expected)
    parts = measure(
        torch.view_as_real(a),
        torch.view_as_real(b),
        valid=None if valid is None else valid.unsqueeze(-1),
        threads=threads,
    )
    at = found.max_abs_index
    return replace(
        found,
        max_abs_actual=None if at is None else float(a[at].abs()),
        **{name: getattr(parts, name) for name in OF_PARTS},
    )


OF_PARTS = ("cosine", "scale", "scale_residual", "all_zero_actual", "all_zero_expected", "max_actual", "max_expected")
"""Metrics of complex numbers that are those of their real and imaginary parts."""


def magnitudes(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |b| + |a - b| and |b|, real numbers that are as far apart as the complex ones.

    NaN and Inf are equal where those of ``a`` and ``b`` are: NaN is either part NaN, and another Inf becomes 0.
    """
    size = torch.where(b.isnan(), math.nan, b.abs())
    other = torch.where(a.isnan(), math.nan, 0.0)
    moved = torch.where(b.isfinite(), size + (a - b).abs(), other)
    return torch.where(a == b, size, moved), size


def make_rules(
    pair: Tensors, rtol: float | None, atol: float | None, equal_nan: bool, coarse: torch.dtype | None = None
) -> Rules:
    """Fill in the tolerances that were not given; ``coarse``: the dtype that they are of, if it is not the pair's."""
    coarse = coarse or coarser(pair.actual.dtype, pair.expected.dtype)
    default = tolerance(coarse)
    return Rules(
        rtol=default[0] if rtol is None else rtol,
        atol=default[1] if atol is None else atol,
        equal_nan=equal_nan,
        place=spacing(coarse),
        wide=torch.float64 in (pair.actual.dtype, pair.expected.dtype),
    )


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


def walk(pair: Tensors, rules: Rules, threads: int | None) -> Accumulator:
    """Run the pass on the device that holds the pair: in one kernel, in this thread, or in several over equal parts."""
    if cuda.usable(pair.actual) and torch.uint64 not in (pair.actual.dtype, pair.expected.dtype):
        # Float64 numbers beyond the range of their squares are rare; the CPU has the scaled sums for them.
        with suppress(cuda.OutOfRange), torch.cuda.device(pair.actual.device):
            return cuda.accumulate(pair.plan(cuda.block((pair.actual, pair.expected), pair.valid)), rules)
    size = pair.actual.numel()
    workers = worker_count(size) if threads is None else threads
    layout = pair.plan(BLOCK * 2 // max(2, workers))
    workers = min(workers, max(1, layout.count))
    if size < BLOCK // 4:
        return run_part(layout, rules, 0, layout.count)
    with torch_threads(1):  # torch's own for a block would fight with the workers for the cores
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
    if size < THREADED:
        return 1
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def run_part(layout: Plan, rules: Rules, first: int, last: int) -> Accumulator:
    """Measure the boxes number ``first`` up to ``last``."""
    seen = Accumulator(rules, layout, Buffers(min(layout.block, layout.views[0].numel())))
    with np.errstate(all="ignore"):
        for start, (actual, expected, *valid) in layout.boxes(first, last):
            seen.add(start, actual, expected, valid[0] if valid else None)
    return seen
