"""Many small pairs on CUDA in one kernel, whatever their shapes: columns of sums as on the CPU (`_together`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ditto_core.compare._accumulate import Rules
from ditto_core.compare._arithmetic import Counts
from ditto_core.compare._blocks import Floats
from ditto_core.compare._launch import (
    COLUMNS,
    LANES,
    OCTAVES,
    PROGRAMS_PER_CORE,
    combine,
    cores,
    lines,
    row_sums,
    run_exact,
)
from ditto_core.compare._together import Sums
from ditto_core.compare.cuda import cut, plain, sums_of_rows

Sides = Sequence[Sequence[torch.Tensor]]
"""The engine's tensors, the reference's and, where some elements do not count, the masks: a stack of each shape."""


def on_cuda(sides: Sides, widths: Counts, rules: Sequence[Rules]) -> Sums:
    """Measure pairs of one dtype a side on their device; ``widths``: of the element rows of all pairs, in order."""
    sizes = np.repeat(*np.array([(side[0].numel(), len(side)) for side in sides[0]]).T)
    flat = [plain(side[0] if len(side) == 1 else torch.cat([part.view(-1) for part in side])) for side in sides]
    blocks = -(-sizes // LANES)
    most = max(1, blocks.sum() // (cores(flat[0]) * PROGRAMS_PER_CORE))  # blocks of a program
    programs = -(-blocks // most)
    pieces, firsts = cut(widths)
    cuts = np.cumsum([sizes.size * OCTAVES, programs.sum() * len(COLUMNS)])
    out = flat[0].new_zeros(int(cuts[1]) + 2 * pieces.size, dtype=torch.int64)
    run_exact(flat, out[: cuts[1]], lines(sizes, blocks, programs, rules), sizes.size)
    row_sums(flat, pieces, out[cuts[1] :].view(torch.float64))
    octaves, rows, by_row = np.split(out.cpu().numpy(), cuts)
    found = combine(rows.reshape(-1, len(COLUMNS)), programs.cumsum() - programs)
    octaves = octaves.reshape(-1, OCTAVES)
    octaves[:, 0] -= found["zeros"]
    unusual = (found["nonfinite"] > 0) | (found["extreme"] > 0)
    row_squares = np.add.reduceat(by_row.view(np.float64).reshape(2, -1), firsts, axis=1)
    return Sums(found, octaves, None, row_squares, ~unusual)


def rows_on_cuda(sides: Sequence[torch.Tensor], lead: Sequence[int], row: int) -> Floats:
    """Return the squared errors and sizes of a pair's element rows of ``row`` finite numbers, float64 [2, 1, *lead]."""
    with torch.no_grad(), torch.cuda.device(sides[0].device):
        return sums_of_rows(sides, np.full(math.prod(lead), row)).reshape(2, 1, *lead)
