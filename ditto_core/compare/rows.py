"""The row [batch, position] of a tensor: the smallest unit that is judged.

The relative L2 error of a whole tensor hides one wrong row of many: one row of zeros among 300 equal ones gives 0.06.
So each row has an error of its own and a noise floor of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ditto_core.compare._blocks import Floats, unravel
from ditto_core.compare.row_error import RowError

POSITIONS = ("length", "total", "past")
"""Axes that count positions; a tensor's rows are numbered by the first of them that it has."""

BLOCK = 1 << 20
"""Elements that are widened to float64 at a time."""

NARROW = 32
"""Rows of fewer elements are measured against the usual row: one number near 0 has a large relative error."""

SMALL = 2.0**-10
"""A row's error is measured against at least this share of the root mean square row, so that rows of zeros have one."""


def row_dimensions(axes: Sequence[str]) -> tuple[int, ...]:
    """Return the dimensions that number the rows of a tensor with these ``axes``: batch and position."""
    position = next((axes.index(name) for name in POSITIONS if name in axes), None)
    batch = axes.index("batch") if "batch" in axes else None
    return tuple(sorted(dim for dim in (batch, position) if dim is not None))


def row_errors(
    actual: torch.Tensor,
    expected: torch.Tensor,
    axes: Sequence[str],
    valid: torch.Tensor | None = None,
    *,
    least: float = SMALL,
) -> Floats | None:
    """Return the relative L2 error ||a - b|| / ||b|| of each row, float64 [rows] in row-major order.

    ``valid`` broadcasts to the shape; elements where it is False do not count. ||b|| is taken as at least the share
    ``least`` of the root mean square row. A NaN or Inf that the other side does
    not have makes the row's error infinite. None for a tensor of fewer than two rows, for one without a batch or
    position, and for integers.
    """
    kept = row_dimensions(axes)
    count = math.prod(expected.shape[dim] for dim in kept)
    if not kept or count < 2 or not expected.numel() or not expected.is_floating_point():
        return None
    order = (*kept, *(dim for dim in range(expected.dim()) if dim not in kept))
    sides = [side.detach().to(expected.device) for side in (actual, expected)]
    if valid is not None:
        sides.append(valid.to(expected.device).expand(expected.shape))
    flat = [side.permute(order).reshape(count, -1) for side in sides]
    parts = zip(*(torch.split(side, max(1, BLOCK // flat[0].shape[1])) for side in flat), strict=True)
    error, size = torch.cat([norms(*part) for part in parts], 1).cpu().numpy()
    return relative_rows(error, size, flat[0].shape[1], least)


def relative_rows(error: Floats, size: Floats, width: int, least: float) -> Floats:
    """Return ||a - b|| / ||b|| of rows [..., rows] of ``width`` elements from both norms; see :func:`row_errors`."""
    least = 1.0 if width < NARROW else least
    usual = np.sqrt(np.square(size).mean(-1, keepdims=True))
    with np.errstate(all="ignore"):
        found: Floats = np.where(error == 0, 0, error / np.maximum(size, least * usual))
    found[np.isnan(found)] = math.inf
    return found


def norms(a: torch.Tensor, b: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Return ||a - b|| and ||b|| of each row of [rows, width], float64 [2, rows]; what is alike is no error."""
    a, b = a.double(), b.double()  # torch knows no NaN of 8-bit floats
    same, there = (a == b) | (a.isnan() & b.isnan()), b.isfinite()
    if valid is not None:
        same, there = same | ~valid, there & valid
    return torch.stack([torch.where(same, 0, a - b).norm(dim=1), torch.where(there, b, 0).norm(dim=1)])


def worst_row(errors: Floats, floors: Floats | None, shape: Sequence[int], axes: Sequence[str]) -> RowError:
    """Return the row whose error is the largest multiple of its floor, which is at least the median row's.

    ``errors`` and ``floors`` are what :func:`row_errors` returns. Without ``floors``: the row of the largest error.
    """
    usable = None if floors is None else np.maximum(floors, usual(floors))
    with np.errstate(all="ignore"):
        ratios = errors if usable is None else np.where(errors == 0, 0, errors / usable)
    at = int(ratios.argmax())
    index = unravel(at, [shape[dim] for dim in row_dimensions(axes)])
    floor = None if usable is None else float(usable[at])
    return RowError(index, float(errors[at]), floor, len(errors), math.prod(shape) // len(errors))


def usual(floors: Floats) -> float:
    """Return the median floor of the rows that have any: rows of padding have none."""
    there = np.sort(floors[floors > 0])
    return float(there[(there.size - 1) // 2]) if there.size else 0.0
