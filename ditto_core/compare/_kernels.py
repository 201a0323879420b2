"""Triton kernels behind :mod:`ditto_core.compare.cuda`; importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
NOWHERE = tl.constexpr(2**62)
NEVER = tl.constexpr(2**31 - 1)
COLUMNS = tl.constexpr(31)
"""64-bit words in a row of results, the first ``FLOATS`` float64: :data:`ditto_core.compare._launch.COLUMNS`."""
FLOATS = tl.constexpr(14)
QUICK_COLUMNS = tl.constexpr(19)
"""Float64 numbers in a row of the quick kernel: :data:`ditto_core.compare._launch.QUICK_COLUMNS`."""
TABLE = tl.constexpr(9)
"""Integers that describe a pair: :data:`ditto_core.compare._launch.TABLE`."""
EXPONENT = tl.constexpr(0x7FF0000000000000)
HIGH = tl.constexpr(2.0**500)
LOW = tl.constexpr(2.0**-500)
EXACT_INTEGERS = tl.constexpr(2.0**53)


@triton.jit
def high_part(x, split: tl.constexpr):
    """A 64-bit integer without its low 32 bits, as float64; any other number whole."""
    return ((x >> 32) << 32).to(tl.float64) if split else x.to(tl.float64)


@triton.jit
def low_part(x, split: tl.constexpr):
    """The low 32 bits of a 64-bit integer as float64; 0 for any other number."""
    return (x & 0xFFFFFFFF).to(tl.float64) if split else tl.zeros_like(x).to(tl.float64)


@triton.jit
def octave(d):
    """Bits of |d| rounded to bfloat16, nearest even; its octave is these without the 7 bits of mantissa."""
    bits = d.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def from_bits(bits):
    """The float64 of these bits: Triton passes Python floats in float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def winner(which, rows, count, lanes: tl.constexpr):
    """The tile that the quick kernel's rows name first: 0 the largest error, 1 the worst and 2 the first mismatch.

    A row has the two values in columns 7 and 12, the tiles in columns 13, 14 and 15. NEVER where there is none.
    """
    best = tl.full([], -1.0, tl.float64)
    tile = tl.full([], NEVER, tl.int64)
    for first in range(0, count, lanes):
        row = first + tl.arange(0, lanes)
        there = row < count
        value = tl.load(rows + row * QUICK_COLUMNS + tl.where(which == 0, 7, 12), mask=there, other=-1.0).to(tl.float64)
        value = tl.where(which == 2, tl.zeros_like(value), value)
        named = tl.load(rows + row * QUICK_COLUMNS + 13 + which, mask=there, other=NEVER).to(tl.int64)
        top = tl.max(value)
        candidate = tl.min(tl.where(there & (value == top), named, NEVER))
        tile = tl.where(top > best, candidate, tl.where(top == best, tl.minimum(tile, candidate), tile))
        best = tl.maximum(best, top)
    return tile


@triton.jit
def chosen_block(
    step, tiles, quick, given, size, tile_blocks: tl.constexpr, after_quick: tl.constexpr, lanes: tl.constexpr
):
    """The block of a step: its own number; or a block of a listed tile, of a winner, of what lies behind the tiles."""
    block = tl.full([], step, tl.int64)
    if tile_blocks:
        which = step // tile_blocks
        if after_quick:
            tile = tl.full([], size // (tile_blocks * lanes), tl.int64)
            if which < 3:
                tile = winner(which, quick, given, lanes)
        else:
            tile = tl.load(tiles + which)
        block = tile * tile_blocks + step % tile_blocks
    return block


@triton.jit
def count_unusual(a, b, keep, counts, equal_nan):
    """Count what is there, and NaN and Inf on either side; tell which elements are not finite, and unequal so."""
    n, bad_n, unequal_n, nan_a_n, nan_b_n, nan_n, inf_a_n, inf_b_n, inf_n = counts
    nan_a, nan_b = keep & (a != a), keep & (b != b)
    inf_a, inf_b = keep & (tl.abs(a) == INF), keep & (tl.abs(b) == INF)
    bad = nan_a | nan_b | inf_a | inf_b
    unequal = bad & (a != b) & ~(nan_a & nan_b & (equal_nan != 0))
    n += keep.to(tl.int32)
    bad_n += bad.to(tl.int32)
    unequal_n += unequal.to(tl.int32)
    nan_a_n += nan_a.to(tl.int32)
    nan_b_n += nan_b.to(tl.int32)
    nan_n += (nan_a != nan_b).to(tl.int32)
    inf_a_n += inf_a.to(tl.int32)
    inf_b_n += inf_b.to(tl.int32)
    inf_n += ((inf_a | inf_b) & ~nan_a & ~nan_b & (a != b)).to(tl.int32)
    return bad, unequal, (n, bad_n, unequal_n, nan_a_n, nan_b_n, nan_n, inf_a_n, inf_b_n, inf_n)


@triton.jit
def difference(x, y, a, b, good, split_actual: tl.constexpr, split_expected: tl.constexpr):
    """a - b, to one rounding also for 64-bit integers that float64 cannot hold."""
    d = a - b
    if split_actual or split_expected:
        halves = high_part(x, split_actual) - high_part(y, split_expected)
        halves += low_part(x, split_actual) - low_part(y, split_expected)
        d = tl.where(good & (tl.maximum(tl.abs(a), tl.abs(b)) >= EXACT_INTEGERS), halves, d)
    return d


@triton.jit
def unsquarable(size):
    """Tell which float64 numbers have squares that overflow or vanish."""
    return (size > HIGH) | ((size < LOW) & (size > 0))


@triton.jit
def raise_to(value, at, best, best_at):
    """Keep the larger value of each lane and where it is; of equals the first."""
    higher = value > best
    return tl.where(higher, value, best), tl.where(higher, at, best_at)


@triton.jit
def add_errors(a, b, d, good, tiny, sums, largest, counted_n, zeros):
    """Add the finite elements of a block to the sums, largest ratios and counts of their lanes."""
    dd, aa, bb, ab, abs_sum, rel_sum = sums
    max_rel, max_steps = largest
    size, error = tl.abs(b), tl.abs(d)
    counted = good & (size != 0)
    relative = tl.where(counted, error / tl.where(counted, size, 1.0), tl.where(good & (error > 0), INF, 0.0))
    power = (size.to(tl.int64, bitcast=True) & EXPONENT).to(tl.float64, bitcast=True)
    max_rel, max_steps = tl.maximum(max_rel, relative), tl.maximum(max_steps, error / tl.maximum(power, tiny))
    sums = (dd + d * d, aa + a * a, bb + b * b, ab + a * b, abs_sum + error, rel_sum + relative)
    zeros += (good & (octave(error) == 0)).to(tl.int32)
    return sums, (max_rel, max_steps), counted_n + counted.to(tl.int32), zeros


@triton.jit
def by_octave(error, good):
    """Count errors by octave. Lanes that do not count fall into octave 0 and are taken out of it."""
    found = tl.histogram(octave(error) >> 7, 256).to(tl.int64)
    return found - tl.where(tl.arange(0, 256) == 0, tl.sum((~good).to(tl.int64)), 0)


@triton.jit
def store_each(at, values):
    """Store the numbers of a tuple one after the other."""
    for i in tl.static_range(len(values)):
        tl.store(at + i, values[i])


@triton.jit
def store_sums(at, values):
    """Store the sum over the lanes of each of a tuple: of float64 numbers, or of 32-bit counts."""
    for i in tl.static_range(len(values)):
        value = values[i] if values[i].dtype == tl.float64 else values[i].to(tl.int64)
        tl.store(at + i, tl.sum(value))


@triton.jit
def value_at(tensor, place):
    """The element at a place as float64; 0 at NOWHERE."""
    return tl.load(tensor + place, mask=place < NOWHERE, other=0).to(tl.float64)


@triton.jit(do_not_specialize=["given", "silent"])
def measure_kernel(
    actual, expected, valid, table, owners, tiles, quick, floats, integers, bins, given, silent,
    masked: tl.constexpr, tile_blocks: tl.constexpr, after_quick: tl.constexpr, split_actual: tl.constexpr,
    split_expected: tl.constexpr, wide: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Measure blocks of ``lanes`` elements of many pairs; write one row of partial results a program.

    A program's pair is ``owners[program]``, a line of ``table``: where the pair begins in the flat sides, its size and
    number of blocks, its first program and how many it has, which take turns; the bits of rtol, atol and the smallest
    normal number; whether NaN equals NaN. Places count from the pair's start, and each pair has its own histogram.
    With ``tile_blocks`` the blocks are those of tiles, so many a tile: of those listed in ``tiles``; with
    ``after_quick``, where ``quick`` holds ``given`` rows of the quick kernel, of its three winners and of what lies
    behind the last whole tile. The first ``silent`` programs add nothing to the histogram.
    """
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    line = table + owner * TABLE
    offset, size, blocks = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    first, programs, equal_nan = tl.load(line + 3), tl.load(line + 4), tl.load(line + 8)
    rtol, atol, tiny = from_bits(tl.load(line + 5)), from_bits(tl.load(line + 6)), from_bits(tl.load(line + 7))
    actual, expected = actual + offset, expected + offset
    if masked:
        valid += offset
    zero, none = tl.zeros([lanes], tl.float64), tl.zeros([lanes], tl.int32)
    nowhere = tl.full([lanes], NOWHERE, tl.int64)
    sums, largest = (zero, zero, zero, zero, zero, zero), (zero, zero)
    unusual = (none, none, none, none, none, none, none, none, none)
    max_a, max_b, max_abs, excess = zero, zero, zero, zero
    counted_n, out_n, zeros, extreme = none, none, none, none
    abs_at, worst_at, first_out, first_bad = nowhere, nowhere, nowhere, nowhere
    octaves = tl.zeros([256], tl.int64)
    for step in range(program - first, blocks, programs):
        block = chosen_block(step, tiles, quick, given, size, tile_blocks, after_quick, lanes)
        at = block * lanes + tl.arange(0, lanes)
        keep = at < size
        x, y = tl.load(actual + at, mask=keep, other=0), tl.load(expected + at, mask=keep, other=0)
        if masked:
            keep = keep & (tl.load(valid + at, mask=keep, other=0) != 0)
        a, b = x.to(tl.float64), y.to(tl.float64)
        bad, unequal, unusual = count_unusual(a, b, keep, unusual, equal_nan)
        first_bad = tl.minimum(first_bad, tl.where(bad, at, NOWHERE))
        max_a = tl.maximum(max_a, tl.where(keep & (tl.abs(a) < INF), tl.abs(a), 0.0))
        max_b = tl.maximum(max_b, tl.where(keep & (tl.abs(b) < INF), tl.abs(b), 0.0))
        good = keep & ~bad
        a, b = tl.where(good, a, 0.0), tl.where(good, b, 0.0)
        d = difference(x, y, a, b, good, split_actual, split_expected)
        if wide:
            extreme += unsquarable(tl.maximum(tl.abs(a), tl.abs(b))).to(tl.int32)
        sums, largest, counted_n, zeros = add_errors(a, b, d, good, tiny, sums, largest, counted_n, zeros)
        error = tl.abs(d)
        max_abs, abs_at = raise_to(error, at, max_abs, abs_at)
        over = tl.where(unequal, INF, error - rtol * tl.abs(b) - atol)
        out_n += (over > 0).to(tl.int32)
        first_out = tl.minimum(first_out, tl.where(over > 0, at, NOWHERE))
        excess, worst_at = raise_to(over, at, excess, worst_at)
        octaves += by_octave(error, good)
    maxima = tl.max(max_abs), tl.max(largest[0]), tl.max(largest[1]), tl.max(max_a), tl.max(max_b), tl.max(excess)
    place = tl.min(tl.where(max_abs == maxima[0], abs_at, NOWHERE))
    worst = tl.min(tl.where(excess == maxima[5], worst_at, NOWHERE))
    row, entry = floats + program * COLUMNS, integers + program * COLUMNS + FLOATS
    store_sums(row, sums)
    store_each(row + 6, maxima)
    store_each(row + 12, (value_at(actual, place), value_at(expected, place)))
    store_sums(entry, (unusual[0], unusual[1], counted_n, out_n))
    store_sums(entry + 4, (unusual[2], unusual[3], unusual[4], unusual[5], unusual[6], unusual[7], unusual[8]))
    store_sums(entry + 11, (zeros, extreme))
    store_each(entry + 13, (place, worst, tl.min(first_out), tl.min(first_bad)))
    if program >= silent:
        tl.atomic_add(bins + owner * 256 + tl.arange(0, 256), octaves)


@triton.jit
def row_kernel(
    actual, expected, valid, starts, widths, found, rows, masked: tl.constexpr, lanes: tl.constexpr
):  # fmt: skip
    """Sum (a - b)^2 and b^2, where both are finite, over one row of elements a program, from ``starts[program]`` on."""
    program = tl.program_id(0).to(tl.int64)
    start, width = tl.load(starts + program), tl.load(widths + program)
    lane = tl.arange(0, lanes)
    dd = tl.zeros([lanes], tl.float64)
    bb = tl.zeros([lanes], tl.float64)
    for first in range(0, width, lanes):
        keep = first + lane < width
        at = start + first + lane
        a = tl.load(actual + at, mask=keep, other=0).to(tl.float64)
        b = tl.load(expected + at, mask=keep, other=0).to(tl.float64)
        if masked:
            keep = keep & (tl.load(valid + at, mask=keep, other=0) != 0)
        keep = keep & (tl.abs(a) < INF) & (tl.abs(b) < INF)
        d = tl.where(keep, a - b, 0.0)
        b = tl.where(keep, b, 0.0)
        dd += d * d
        bb += b * b
    tl.store(found + program, tl.sum(dd))
    tl.store(found + rows + program, tl.sum(bb))
