"""Launching the Triton kernels, and their partial results as one :class:`Accumulator`.

A pair of 16- or 32-bit floats of a million elements and more goes through the quick kernel in tiles. Behind it, without
waiting, the exact kernel measures the rest behind the last whole tile, and the tiles that hold the largest error, the
worst and the first mismatch once more, for the places. Tiles that the quick kernel declined are measured exactly in the
end. Every other pair goes through the exact kernel whole. Results come to the host together, in a fixed order:
twice the same pair gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ditto_core.compare._accumulate import Accumulator, Rules
from ditto_core.compare._arithmetic import Counts, earliest
from ditto_core.compare._blocks import Buffers, Plan

OCTAVES = 256
LANES = 512
PROGRAMS_PER_CORE = 8
INTERPRETED_CORES = 2
"""Cores that the Triton interpreter pretends to have, on the CPU."""

PRODUCTS = ("difference", "actual", "expected", "product")
SUMS = (*PRODUCTS, "abs_sum", "rel_sum")
LARGEST = ("max_abs", "max_rel", "max_steps", "max_actual", "max_expected", "worst_excess")
VALUES = ("actual_there", "expected_there")
COUNTS = (
    *("count", "nonfinite", "rel_count", "mismatched", "unequal_nonfinite"),
    *("nan_actual", "nan_expected", "nan_mismatch", "inf_actual", "inf_expected", "inf_mismatch", "zeros", "extreme"),
)
PLACES = ("max_abs_at", "worst_mismatch", "first_mismatch", "first_nonfinite")
FLOATS = (*SUMS, *LARGEST, *VALUES)
COLUMNS = (*FLOATS, *COUNTS, *PLACES)
TABLE = 9
"""Integers that describe a pair to the exact kernel: :func:`lines`."""
KEPT = ("abs_sum", "rel_sum", *LARGEST, *COUNTS[:-2])
NOWHERE = 2**62

QUICK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUICK = 1 << 20
"""Elements from which the quick kernel pays for what is measured twice."""
THREADS = 64
ELEMENTS = 56
"""Elements of a tile that one thread measures: they fit the kernel's counters of six bits."""
TILE = THREADS * ELEMENTS
TILES_A_PROGRAM = 73
"""Tiles whose counts fit the kernel's counters of twelve bits: 4095 / 56."""
QUICK_PROGRAMS_PER_CORE = 8
QUICK_COLUMNS = (
    *("difference", "actual", "expected", "product", "error_product", "abs_sum", "rel_sum"),
    *("max_abs", "max_actual", "max_expected", "max_rel", "max_steps", "worst_excess"),
    *("max_abs_tile", "worst_tile", "first_tile", "mismatched", "uncounted", "tiles"),
)
WINNERS = 3 * (TILE // LANES)
"""Programs that look for places; those behind them measure the rest."""


class OutOfRange(Exception):
    """Float64 numbers whose squares leave float64's range: the CPU path has the scaled sums for them."""


@dataclass(frozen=True, slots=True)
class Job:
    """A flat contiguous pair on one device (and its mask), what to measure by, and where positions belong."""

    sides: Sequence[torch.Tensor]
    rules: Rules
    layout: Plan
    buffers: Buffers

    def nothing(self) -> Accumulator:
        """Return what was seen before anything was."""
        return Accumulator(self.rules, self.layout, self.buffers, fine=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.sides[0].numel()

    @property
    def mask(self) -> torch.Tensor:
        """The mask; the first side where there is none."""
        return self.sides[-1] if len(self.sides) > 2 else self.sides[0]

    def line(self, blocks: int, programs: int) -> Counts:
        """Return the table of this pair alone: what :func:`lines` gives, for large pairs with less ado."""
        table = np.zeros(TABLE + programs, np.int64)
        table[1], table[2], table[4], table[8] = self.size, blocks, programs, self.rules.equal_nan
        table[5:8] = np.array((self.rules.rtol, self.rules.atol, self.rules.place.tiny)).view(np.int64)
        return table

    @property
    def quick(self) -> bool:
        """Tell whether the quick kernel takes this pair."""
        return {side.dtype for side in self.sides[:2]} <= set(QUICK_DTYPES) and self.size >= max(QUICK, TILE)

    def zeros(self, words: int) -> torch.Tensor:
        """Return ``words`` 64-bit zeros on the device."""
        return self.sides[0].new_zeros(words, dtype=torch.int64)


def launch(sides: Sequence[torch.Tensor], rules: Rules, layout: Plan) -> Accumulator:
    """Measure a flat contiguous pair (and its mask) with the kernels that fit it; positions count from its start."""
    job = Job(sides, rules, layout, Buffers(0))
    return quick(job) if job.quick else exact(job)


def exact(job: Job, tiles: torch.Tensor | None = None) -> Accumulator:
    """Run the exact kernel over a pair, or over the tiles whose numbers are listed."""
    blocks = -(-job.size // LANES) if tiles is None else tiles.numel() * (TILE // LANES)
    programs = min(blocks, cores(job.sides[0]) * PROGRAMS_PER_CORE)
    out = job.zeros(OCTAVES + programs * len(COLUMNS))
    run_exact(job.sides, out, job.line(blocks, programs), 1, tiles=tiles)
    found = out.cpu().numpy()
    return gather(job, found[:OCTAVES], found[OCTAVES:].reshape(programs, len(COLUMNS)))


def lines(sizes: Counts, blocks: Counts, programs: Counts, rules: Sequence[Rules]) -> Counts:
    """Return the kernel's table of pairs that lie one behind the other, then the number of each program's pair."""
    table = np.empty((sizes.size, TABLE), np.int64)
    table[:, 0], table[:, 1], table[:, 2] = sizes.cumsum() - sizes, sizes, blocks
    table[:, 3], table[:, 4] = programs.cumsum() - programs, programs
    table[:, 5:8] = np.array([(each.rtol, each.atol, each.place.tiny) for each in rules]).view(np.int64)
    table[:, 8] = [each.equal_nan for each in rules]
    return np.concatenate([table.reshape(-1), np.repeat(np.arange(sizes.size), programs)])


def run_exact(
    sides: Sequence[torch.Tensor],
    out: torch.Tensor,
    table: Counts,
    pairs: int,
    *,
    tiles: torch.Tensor | None = None,
    quick_rows: torch.Tensor | None = None,
    silent: int = 0,
) -> None:
    """Launch the exact kernel over the ``pairs`` of a table.

    ``out`` takes the octaves of each, then a row of ``COLUMNS`` a program.
    """
    from ditto_core.compare._kernels import measure_kernel

    actual, expected = sides[:2]
    nothing = actual
    where = torch.from_numpy(table).to(actual.device, non_blocking=True)
    owners, rows = where[pairs * TABLE :], out[pairs * OCTAVES :]
    measure_kernel[(owners.numel(),)](
        *(actual, expected, sides[-1] if len(sides) > 2 else nothing, where, owners),
        *(nothing if tiles is None else tiles, nothing if quick_rows is None else quick_rows),
        *(rows.view(torch.float64), rows, out),
        *(0 if quick_rows is None else quick_rows.numel() // len(QUICK_COLUMNS), silent),
        masked=len(sides) > 2,
        tile_blocks=0 if tiles is None and quick_rows is None else TILE // LANES,
        after_quick=quick_rows is not None,
        split_actual=actual.dtype == torch.int64,
        split_expected=expected.dtype == torch.int64,
        wide=torch.float64 in (actual.dtype, expected.dtype),
        lanes=LANES,
        num_warps=LANES // 128,
    )


def row_sums(sides: Sequence[torch.Tensor], widths: Counts, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the squared error and size of each element row, float64 [2, rows]; ``out`` may be given to take them."""
    from ditto_core.compare._kernels import row_kernel

    rows = widths.size
    where = torch.from_numpy(np.concatenate([widths.cumsum() - widths, widths])).to(sides[0].device, non_blocking=True)
    found = sides[0].new_empty(2 * rows, dtype=torch.float64) if out is None else out
    row_kernel[(rows,)](
        *(*sides[:2], sides[-1] if len(sides) > 2 else sides[0], where[:rows], where[rows:], found, rows),
        masked=len(sides) > 2,
        lanes=LANES,
        num_warps=LANES // 128,
    )
    return found.view(2, rows)


def quick(job: Job) -> Accumulator:
    """Run the quick kernel over the whole tiles, and the exact one over the best, the rest and the declined."""
    tiles, rest = divmod(job.size, TILE)
    programs = min(tiles, max(cores(job.sides[0]) * QUICK_PROGRAMS_PER_CORE, -(-tiles // TILES_A_PROGRAM)))
    behind = WINNERS + -(-rest // LANES)
    cut = OCTAVES + programs * len(QUICK_COLUMNS)
    out, declined = job.zeros(cut + OCTAVES + behind * len(COLUMNS)), job.zeros(-(-tiles // 8)).view(torch.int8)
    run_quick(job, out[:cut], declined, tiles, programs)
    sums = out[OCTAVES:cut].view(torch.float64)
    run_exact(job.sides, out[cut:], job.line(behind, behind), 1, quick_rows=sums, silent=WINNERS)
    found = out.cpu().numpy()
    seen = collect(job, found[:OCTAVES], found[OCTAVES:cut].view(np.float64).reshape(programs, -1))
    exact_octaves, rows = found[cut : cut + OCTAVES], found[cut + OCTAVES :].reshape(behind, -1)
    if seen.count < tiles * TILE:
        seen.merge(exact(job, declined.nonzero().view(-1)))
    if rest:
        seen.merge(gather(job, exact_octaves, rows[WINNERS:]))
    take_places(seen, gather(job, exact_octaves, rows[:WINNERS]))
    return seen


def run_quick(job: Job, out: torch.Tensor, declined: torch.Tensor, tiles: int, programs: int) -> None:
    """Launch the quick kernel; ``out`` takes the octaves and one row of ``QUICK_COLUMNS`` a program."""
    from ditto_core.compare._quick import quick_kernel

    dtypes = [side.dtype for side in job.sides[:2]]
    width = 16 // max(dtype.itemsize for dtype in dtypes)
    quick_kernel[(programs,)](
        *(*job.sides[:2], job.mask, out[OCTAVES:].view(torch.float64), out, declined, tiles),
        *(job.rules.rtol, job.rules.atol, int(np.float32(job.rules.place.tiny).view(np.int32))),
        masked=len(job.sides) > 2,
        windows=3 if dtypes == [torch.float16] * 2 else 4,
        threads=THREADS,
        width=width,
        fold=ELEMENTS // width,
        approximate=job.sides[0].is_cuda,
        num_warps=THREADS // 32,
    )


def collect(job: Job, octaves: Any, rows: Any) -> Accumulator:
    """Add up the quick kernel's rows. Largest values come with their places, from :func:`take_places`."""
    seen = job.nothing()
    total = dict(zip(QUICK_COLUMNS, rows.sum(0).tolist(), strict=True))
    largest = dict(zip(QUICK_COLUMNS, rows.max(0).tolist(), strict=True))
    if total["actual"] > total["expected"] / 16:
        # With a = b + d all four are of one kind, so that what cancels in the cosine cancels exactly.
        total["product"] = total["expected"] + total["error_product"]
        total["actual"] = total["product"] + total["error_product"] + total["difference"]
    for name in PRODUCTS:
        setattr(seen.squares[0], name, total[name])
    seen.abs_sum, seen.rel_sum, seen.mismatched = total["abs_sum"], total["rel_sum"], int(total["mismatched"])
    for name in ("max_rel", "max_steps", "max_actual", "max_expected"):
        setattr(seen, name, largest[name])
    seen.count = int(total["tiles"]) * TILE
    seen.rel_count = seen.count - int(total["uncounted"])
    seen.bins = octaves
    return seen


def take_places(seen: Accumulator, best: Accumulator) -> None:
    """Take the largest error, the worst and the first mismatch from tiles that were measured again, in float64."""
    if (best.max_abs, -best.max_abs_at) > (seen.max_abs, -seen.max_abs_at):
        seen.max_abs, seen.max_abs_at, seen.values = best.max_abs, best.max_abs_at, best.values
    if (best.worst_excess, -best.worst_mismatch) > (seen.worst_excess, -seen.worst_mismatch):
        seen.worst_excess, seen.worst_mismatch = best.worst_excess, best.worst_mismatch
    if best.first_mismatch >= 0:
        seen.first_mismatch = earliest(seen.first_mismatch, best.first_mismatch)


def cores(tensor: torch.Tensor) -> int:
    """Return the number of multiprocessors of the tensor's device."""
    if not tensor.is_cuda:
        return INTERPRETED_CORES
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def gather(job: Job, octaves: Any, rows: Any) -> Accumulator:
    """Combine the exact kernel's partial results, one row of 64-bit words a program. Raises :class:`OutOfRange`."""
    found = {name: column.item() for name, column in combine(rows, np.zeros(1, np.int64)).items()}
    if found["extreme"]:
        raise OutOfRange
    seen = job.nothing()
    for name in PRODUCTS:
        setattr(seen.squares[0], name, found[name])
    for name in (*KEPT, *PLACES):
        setattr(seen, name, found[name])
    if job.sides[0].is_floating_point() and job.sides[1].is_floating_point():
        seen.values = found["actual_there"], found["expected_there"]
    octaves[0] -= found["zeros"]
    seen.bins = octaves
    return seen


def combine(rows: Any, firsts: Counts) -> dict[str, Any]:
    """Return each pair's sums, largest values and first places (-1: none), by name: an array with a number for each.

    ``firsts``: each pair's first row of ``rows``, which are in order.
    """
    owners = np.repeat(np.arange(firsts.size), np.diff(firsts, append=len(rows)))
    numbers, integers = rows[:, : len(FLOATS)].view(np.float64), rows[:, len(FLOATS) :]
    sums = np.add.reduceat(numbers[:, : len(SUMS)], firsts)
    largest = np.maximum.reduceat(numbers[:, len(SUMS) : -len(VALUES)], firsts)
    counts = np.add.reduceat(integers[:, : len(COUNTS)], firsts)
    places = integers[:, len(COUNTS) :].copy()
    for name, key in (("max_abs_at", "max_abs"), ("worst_mismatch", "worst_excess")):
        known = largest[owners, LARGEST.index(key)]
        places[numbers[:, FLOATS.index(key)] != known, PLACES.index(name)] = NOWHERE
    earliest_places = np.minimum.reduceat(places, firsts)
    winners = np.flatnonzero(places[:, 0] == earliest_places[owners, 0])
    best = np.empty_like(firsts)
    best[owners[winners]] = winners
    found = np.where(earliest_places >= NOWHERE, -1, earliest_places)
    columns = (*sums.T, *largest.T, *numbers[best, -len(VALUES) :].T, *counts.T, *found.T)
    return dict(zip(COLUMNS, columns, strict=True))
