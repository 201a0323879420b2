"""The one pass on a CUDA device: a fused Triton kernel; only numbers come to the host.

Each program walks its share of the elements with one accumulator a lane, all sums in float64, and reduces them once at
its end; the few hundred partial results are combined on the host. What differs from the CPU: quantiles come from a
histogram by octave (linear inside one), because 128 bins an octave do not fit a kernel that runs at memory speed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from ditto_core.compare._accumulate import Accumulator, Rules
from ditto_core.compare._arithmetic import Squares
from ditto_core.compare._blocks import Buffers, Plan, Split

OCTAVE = 128
BLOCK = 1 << 28
"""Elements in one launch; a strided pair is made contiguous box by box."""

LANES = 1024
PROGRAMS_PER_CORE = 8
INTERPRETED_CORES = 2
"""Cores that the Triton interpreter pretends to have, on the CPU."""

PRODUCTS = ("difference", "actual", "expected", "product")
SUMS = (*PRODUCTS, "abs_sum", "rel_sum")
LARGEST = ("max_abs", "max_rel", "max_steps", "max_actual", "max_expected", "worst_excess")
COUNTS = (
    *("count", "nonfinite", "rel_count", "mismatched", "unequal_nonfinite"),
    *("nan_actual", "nan_expected", "nan_mismatch", "inf_actual", "inf_expected", "inf_mismatch", "zeros", "extreme"),
)
PLACES = ("max_abs_at", "worst_mismatch", "first_mismatch", "first_nonfinite")
NOWHERE = 2**62


class OutOfRange(Exception):
    """Float64 numbers whose squares leave float64's range: the CPU path has the scaled sums for them."""


def usable(tensor: torch.Tensor) -> bool:
    """Tell whether the fused kernel can run where this tensor is."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None


def accumulate(layout: Plan, rules: Rules) -> Accumulator:
    """Measure a planned pair on its device. Raises :class:`OutOfRange` when float64 squares would overflow."""
    seen = Accumulator(rules, layout, Buffers(0))
    for start, box in layout.boxes(0, layout.count):
        sides = [plain(side) for side in box]
        part = run(start, sides, rules, layout)
        if layout.splits:
            split_rows(part.squares[0], start, sides, layout)
        seen.merge(part)
    return seen


def plain(box: torch.Tensor) -> torch.Tensor:
    """Return a box as a flat contiguous tensor of a dtype that the kernel loads."""
    flat = box.contiguous().view(-1)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    return flat.float() if flat.dtype.itemsize == 1 and flat.dtype.is_floating_point else flat


def run(start: int, sides: list[torch.Tensor], rules: Rules, layout: Plan) -> Accumulator:
    """Launch the kernel over one contiguous range and gather its partial results."""
    from ditto_core.compare._kernels import measure_kernel

    actual, expected = sides[:2]
    programs = min(-(-actual.numel() // LANES), cores(actual) * PROGRAMS_PER_CORE)
    sums = actual.new_empty((programs, len(SUMS) + len(LARGEST)), dtype=torch.float64)
    counts = actual.new_empty((programs, len(COUNTS) + len(PLACES)), dtype=torch.int64)
    bins = actual.new_zeros((programs, 256), dtype=torch.int64)
    measure_kernel[(programs,)](
        *(actual, expected, sides[2] if len(sides) > 2 else actual, sums, counts, bins, actual.numel()),
        *(float64(actual, x) for x in (rules.rtol, rules.atol, rules.place.tiny)),
        masked=len(sides) > 2,
        split_actual=actual.dtype == torch.int64,
        split_expected=expected.dtype == torch.int64,
        equal_nan=rules.equal_nan,
        wide=rules.wide,
        lanes=LANES,
        num_warps=8,
    )
    seen = Accumulator(rules, layout, Buffers(0), fine=False)
    gather(seen, start, sums.cpu().numpy(), counts.cpu().numpy())
    seen.bins = spread(bins.sum(0).cpu().numpy(), int(counts[:, COUNTS.index("zeros")].sum()))
    return seen


def float64(like: torch.Tensor, value: float) -> torch.Tensor:
    """Put a number on the device: Triton passes Python floats in float32."""
    return torch.tensor([value], dtype=torch.float64, device=like.device)


def cores(tensor: torch.Tensor) -> int:
    """Return the number of multiprocessors of the tensor's device."""
    if not tensor.is_cuda:
        return INTERPRETED_CORES
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def gather(seen: Accumulator, start: int, numbers: Any, integers: Any) -> None:
    """Combine the partial results of all programs, one row each."""
    sums = dict(zip(SUMS, numbers[:, : len(SUMS)].sum(0).tolist(), strict=True))
    tops = dict(zip(LARGEST, numbers[:, len(SUMS) :].max(0).tolist(), strict=True))
    counts = dict(zip(COUNTS, integers[:, : len(COUNTS)].sum(0).tolist(), strict=True))
    places = dict(zip(PLACES, integers[:, len(COUNTS) :].T, strict=True))
    if counts["extreme"]:
        raise OutOfRange
    for name in PRODUCTS:
        setattr(seen.squares[0], name, sums[name])
    seen.abs_sum, seen.rel_sum = sums["abs_sum"], sums["rel_sum"]
    for name, value in (*tops.items(), *counts.items()):
        if hasattr(seen, name):
            setattr(seen, name, value)
    for name, key in (("max_abs_at", "max_abs"), ("worst_mismatch", "worst_excess")):
        best = numbers[:, len(SUMS) + LARGEST.index(key)] == tops[key]
        setattr(seen, name, position(start, places[name][best].min()) if tops[key] > 0 else -1)
    for name in ("first_mismatch", "first_nonfinite"):
        setattr(seen, name, position(start, places[name].min()))


def position(start: int, place: int) -> int:
    """Return a place in the range as a place in the tensor, -1 for nowhere."""
    return -1 if place >= NOWHERE else start + int(place)


def spread(octaves: Any, zeros: int) -> Any:
    """Put the counts of the octaves into the CPU's bins, each at its octave's first, zeros in bin 0."""
    bins = np.zeros(256 * OCTAVE, np.int64)
    bins[::OCTAVE] = octaves
    bins[0] = zeros
    bins[1] = octaves[0] - zeros
    return bins


def split_rows(sums: Squares, start: int, sides: list[torch.Tensor], layout: Plan) -> None:
    """Sum the squares of each element row on the device and add them up along each axis on the host."""
    from ditto_core.compare._kernels import row_kernel

    size = sides[0].numel()
    row = size if size % layout.row else layout.row
    rows = size // row
    found = sides[0].new_empty((2, rows), dtype=torch.float64)
    mask = sides[2] if len(sides) > 2 else sides[0]
    row_kernel[(rows,)](*sides[:2], mask, found, rows, row, masked=len(sides) > 2, lanes=LANES, num_warps=4)
    errors, sizes = found.cpu().numpy()
    index = np.arange(start // layout.row, start // layout.row + rows)
    for split, (error, magnitude) in zip(layout.splits, sums.by_axis, strict=True):
        at = along(split, index)
        np.add.at(error, at, errors)
        np.add.at(magnitude, at, sizes)


def along(split: Split, rows: Any) -> Any:
    """Return the index on the split axis of each element row."""
    return rows // split.stride % split.size
