"""Triton kernels behind :mod:`ditto_core.compare.cuda`; importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
NOWHERE = tl.constexpr(2**62)
NEVER = tl.constexpr(2**31 - 1)
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
        value = tl.load(rows + row * 19 + tl.where(which == 0, 7, 12), mask=there, other=-1.0).to(tl.float64)
        value = tl.where(which == 2, tl.zeros_like(value), value)
        named = tl.load(rows + row * 19 + 13 + which, mask=there, other=NEVER).to(tl.int64)
        top = tl.max(value)
        candidate = tl.min(tl.where(there & (value == top), named, NEVER))
        tile = tl.where(top > best, candidate, tl.where(top == best, tl.minimum(tile, candidate), tile))
        best = tl.maximum(best, top)
    return tile


@triton.jit(do_not_specialize=["blocks", "given", "silent", "rtol_bits", "atol_bits", "tiny_bits"])
def measure_kernel(
    actual,
    expected,
    valid,
    tiles,
    quick,
    floats,
    integers,
    bins,
    size,
    blocks,
    given,
    silent,
    rtol_bits,
    atol_bits,
    tiny_bits,
    masked: tl.constexpr,
    tile_blocks: tl.constexpr,
    after_quick: tl.constexpr,
    split_actual: tl.constexpr,
    split_expected: tl.constexpr,
    equal_nan: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
):
    """Measure every ``programs``-th block of ``lanes`` elements; write one row of partial results a program.

    With ``tile_blocks`` the blocks are those of tiles, so many a tile: of those listed in ``tiles``; with
    ``after_quick``, where ``quick`` holds ``given`` rows of the quick kernel, of its three winners and of what lies
    behind the last whole tile. The first ``silent`` programs add nothing to the histogram.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rtol, atol, tiny = from_bits(rtol_bits), from_bits(atol_bits), from_bits(tiny_bits)
    lane = tl.arange(0, lanes)
    zero = tl.zeros([lanes], tl.float64)
    none = tl.zeros([lanes], tl.int32)
    nowhere = tl.full([lanes], NOWHERE, tl.int64)
    dd, aa, bb, ab, abs_sum, rel_sum = zero, zero, zero, zero, zero, zero
    max_abs, max_rel, max_steps, max_a, max_b, excess = zero, zero, zero, zero, zero, zero
    n, bad_n, rel_n, out_n, unequal_n, zeros, extreme = none, none, none, none, none, none, none
    nan_a_n, nan_b_n, nan_n, inf_a_n, inf_b_n, inf_n = none, none, none, none, none, none
    abs_at, worst_at, first_out, first_bad = nowhere, nowhere, nowhere, nowhere
    octaves = tl.zeros([256], tl.int64)
    for step in range(program, blocks, programs):
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
        at = block * lanes + lane
        keep = at < size
        x = tl.load(actual + at, mask=keep, other=0)
        y = tl.load(expected + at, mask=keep, other=0)
        if masked:
            keep = keep & (tl.load(valid + at, mask=keep, other=0) != 0)
        a, b = x.to(tl.float64), y.to(tl.float64)
        nan_a, nan_b = keep & (a != a), keep & (b != b)
        inf_a, inf_b = keep & (tl.abs(a) == INF), keep & (tl.abs(b) == INF)
        max_a = tl.maximum(max_a, tl.where(keep & ~nan_a & ~inf_a, tl.abs(a), 0.0))
        max_b = tl.maximum(max_b, tl.where(keep & ~nan_b & ~inf_b, tl.abs(b), 0.0))
        bad = nan_a | nan_b | inf_a | inf_b
        unequal = bad & (a != b)
        if equal_nan:
            unequal = unequal & ~(nan_a & nan_b)
        n += keep.to(tl.int32)
        bad_n += bad.to(tl.int32)
        unequal_n += unequal.to(tl.int32)
        nan_a_n += nan_a.to(tl.int32)
        nan_b_n += nan_b.to(tl.int32)
        nan_n += (nan_a != nan_b).to(tl.int32)
        inf_a_n += inf_a.to(tl.int32)
        inf_b_n += inf_b.to(tl.int32)
        inf_n += ((inf_a | inf_b) & ~nan_a & ~nan_b & (a != b)).to(tl.int32)
        first_bad = tl.minimum(first_bad, tl.where(bad, at, NOWHERE))
        good = keep & ~bad
        a, b = tl.where(good, a, 0.0), tl.where(good, b, 0.0)
        d = a - b
        if split_actual or split_expected:
            halves = high_part(x, split_actual) - high_part(y, split_expected)
            halves += low_part(x, split_actual) - low_part(y, split_expected)
            d = tl.where(good & (tl.maximum(tl.abs(a), tl.abs(b)) >= EXACT_INTEGERS), halves, d)
        if wide:
            top = tl.maximum(tl.abs(a), tl.abs(b))
            extreme += ((top > HIGH) | ((top < LOW) & (top > 0))).to(tl.int32)
        dd += d * d
        aa += a * a
        bb += b * b
        ab += a * b
        d, b = tl.abs(d), tl.abs(b)
        abs_sum += d
        higher = d > max_abs
        max_abs = tl.where(higher, d, max_abs)
        abs_at = tl.where(higher, at, abs_at)
        counted = good & (b != 0)
        relative = tl.where(counted, d / tl.where(counted, b, 1.0), 0.0)
        rel_sum += relative
        rel_n += counted.to(tl.int32)
        max_rel = tl.maximum(max_rel, relative)
        power = (b.to(tl.int64, bitcast=True) & EXPONENT).to(tl.float64, bitcast=True)
        max_steps = tl.maximum(max_steps, d / tl.maximum(power, tiny))
        over = tl.where(unequal, INF, d - rtol * b - atol)
        outside = over > 0
        out_n += outside.to(tl.int32)
        first_out = tl.minimum(first_out, tl.where(outside, at, NOWHERE))
        higher = over > excess
        excess = tl.where(higher, over, excess)
        worst_at = tl.where(higher, at, worst_at)
        key = octave(d)
        zeros += (good & (key == 0)).to(tl.int32)
        # Lanes that do not count fall into octave 0 and are taken out of it below.
        octaves += tl.histogram(key >> 7, 256).to(tl.int64)
        octaves -= tl.where(tl.arange(0, 256) == 0, tl.sum((~good).to(tl.int64)), 0)
    row = floats + program * 31
    tl.store(row, tl.sum(dd))
    tl.store(row + 1, tl.sum(aa))
    tl.store(row + 2, tl.sum(bb))
    tl.store(row + 3, tl.sum(ab))
    tl.store(row + 4, tl.sum(abs_sum))
    tl.store(row + 5, tl.sum(rel_sum))
    largest, worst = tl.max(max_abs), tl.max(excess)
    tl.store(row + 6, largest)
    tl.store(row + 7, tl.max(max_rel))
    tl.store(row + 8, tl.max(max_steps))
    tl.store(row + 9, tl.max(max_a))
    tl.store(row + 10, tl.max(max_b))
    tl.store(row + 11, worst)
    place = tl.min(tl.where(max_abs == largest, abs_at, NOWHERE))
    there = place < NOWHERE
    tl.store(row + 12, tl.load(actual + place, mask=there, other=0).to(tl.float64))
    tl.store(row + 13, tl.load(expected + place, mask=there, other=0).to(tl.float64))
    entry = integers + program * 31 + 14
    tl.store(entry, tl.sum(n.to(tl.int64)))
    tl.store(entry + 1, tl.sum(bad_n.to(tl.int64)))
    tl.store(entry + 2, tl.sum(rel_n.to(tl.int64)))
    tl.store(entry + 3, tl.sum(out_n.to(tl.int64)))
    tl.store(entry + 4, tl.sum(unequal_n.to(tl.int64)))
    tl.store(entry + 5, tl.sum(nan_a_n.to(tl.int64)))
    tl.store(entry + 6, tl.sum(nan_b_n.to(tl.int64)))
    tl.store(entry + 7, tl.sum(nan_n.to(tl.int64)))
    tl.store(entry + 8, tl.sum(inf_a_n.to(tl.int64)))
    tl.store(entry + 9, tl.sum(inf_b_n.to(tl.int64)))
    tl.store(entry + 10, tl.sum(inf_n.to(tl.int64)))
    tl.store(entry + 11, tl.sum(zeros.to(tl.int64)))
    tl.store(entry + 12, tl.sum(extreme.to(tl.int64)))
    tl.store(entry + 13, place)
    tl.store(entry + 14, tl.min(tl.where(excess == worst, worst_at, NOWHERE)))
    tl.store(entry + 15, tl.min(first_out))
    tl.store(entry + 16, tl.min(first_bad))
    if program >= silent:
        tl.atomic_add(bins + tl.arange(0, 256), octaves)


@triton.jit
def row_kernel(
    actual,
    expected,
    valid,
    found,
    rows,
    row,
    masked: tl.constexpr,
    lanes: tl.constexpr,
):
    """Sum (a - b)^2 and b^2 over one row of elements a program, where both are finite."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    dd = tl.zeros([lanes], tl.float64)
    bb = tl.zeros([lanes], tl.float64)
    for first in range(0, row, lanes):
        keep = first + lane < row
        at = program * row + first + lane
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
