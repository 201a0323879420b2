"""The one pass on a CUDA device: fused Triton kernels; only numbers come to the host.

Each program walks its share of the elements and reduces its sums once at its end; the few hundred partial results are
combined on the host. What differs from the CPU: quantiles come from a histogram by octave (linear inside one), because
128 bins an octave do not fit a kernel that runs at memory speed; and from a million 16- or 32-bit floats on, elements
are worked on in float32, so that sums, means, ``max_rel`` and ``max_ulp`` carry a relative error of about 1e-7. Counts,
places and the largest error are exact there too, except that of two errors that tie in float32 either may be shown.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from ditto_core.compare._accumulate import Accumulator, Rules
from ditto_core.compare._arithmetic import Counts, Squares
from ditto_core.compare._blocks import Buffers, Floats, Plan, Split
from ditto_core.compare._launch import QUICK_DTYPES, OutOfRange, launch, row_sums

__all__ = ["OutOfRange", "accumulate", "block", "usable"]

COPIED = 1 << 28
"""Elements that are made contiguous, or converted, at a time."""

PIECE = 8192
"""Elements of a row that one program takes: one of a vocabulary's width would keep the others waiting."""


def usable(tensor: torch.Tensor) -> bool:
    """Tell whether the fused kernels can run where this tensor is."""
    return tensor.is_cuda and has_triton()


@cache
def has_triton() -> bool:
    """Tell whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def block(sides: Sequence[torch.Tensor], valid: torch.Tensor | None = None) -> int:
    """Return how many elements one launch takes: all, where nothing needs to be copied first."""
    whole = all(side.is_contiguous() and side.dtype in QUICK_DTYPES for side in sides)
    whole = whole and (valid is None or valid.is_contiguous())
    return max(1, sides[0].numel()) if whole else COPIED


def accumulate(layout: Plan, rules: Rules) -> Accumulator:
    """Measure a planned pair on its device. Raises :class:`OutOfRange` when float64 squares would overflow."""
    seen = Accumulator(rules, layout, Buffers(0))
    for start, box in layout.boxes(0, layout.count):
        sides = [plain(side) for side in box]
        part = launch(sides, rules, layout)
        part.shift(start)
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


def split_rows(sums: Squares, start: int, sides: list[torch.Tensor], layout: Plan) -> None:
    """Sum the squares of each element row on the device and add them up along each axis on the host."""
    size = sides[0].numel()
    row = size if size % layout.row else layout.row
    errors, sizes = sums_of_rows(sides, np.full(size // row, row))
    index = np.arange(start // layout.row, start // layout.row + errors.size)
    for split, (error, magnitude) in zip(layout.splits, sums.by_axis, strict=True):
        at = along(split, index)
        np.add.at(error, at, errors)
        np.add.at(magnitude, at, sizes)


def sums_of_rows(sides: Sequence[torch.Tensor], widths: Counts) -> Floats:
    """Return the squared error and size of each element row of a pair on its device, float64 [2, rows]."""
    pieces, firsts = cut(widths)
    found: Floats = np.add.reduceat(row_sums([plain(side) for side in sides], pieces).cpu().numpy(), firsts, axis=1)
    return found


def cut(widths: Counts) -> tuple[Counts, Counts]:
    """Return the widths of pieces of rows, none too long for one program, and the first piece of each row."""
    counts = -(-widths // PIECE)
    ends = counts.cumsum()
    pieces = np.full(int(ends[-1]), PIECE)
    pieces[ends - 1] = widths - (counts - 1) * PIECE
    return pieces, ends - counts


def along(split: Split, rows: Any) -> Any:
    """Return the index on the split axis of each element row."""
    return rows // split.stride % split.size
