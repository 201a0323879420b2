"""The kernel at memory speed: what 16- and 32-bit floats have in common almost everywhere, in float32.

A tile is ``threads * width * fold`` elements, ``width * fold`` of them a thread. Sums run in float32 inside a tile and
in float64 over tiles. A tile that holds anything else (NaN, Inf, an element that is not valid, numbers whose squares
leave float32's range, an error within rounding of its bound, an error outside the histogram's window) is declined: it
adds nothing here, and :mod:`ditto_core.compare._kernels` measures it in float64.

The histogram costs four instructions for eight octaves: an octave e is counted by adding the double 2^(6 (e - base)),
so that the 52 bits of mantissa hold eight counters of six bits. Importing this needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
NEVER = tl.constexpr(2**31 - 1)
FIELD = tl.constexpr(6)
COUNTERS = tl.constexpr(8)
EVEN_FIELDS = tl.constexpr(0x03F03F03F03F)
WHOLE = tl.constexpr(2.0**52)
"""From here on float64 holds whole numbers only: what is added below 1/2 rounds away."""
HUGE = tl.constexpr(2.0**60)
SMALL = tl.constexpr(2.0**-50)
EXPONENT = tl.constexpr(0x7F800000)
TWICE_ONE = tl.constexpr(0x7F000000)
"""The bits of 1.0 twice: these less the bits of a power of two are the bits of its reciprocal."""
ROUNDING = tl.constexpr(3 * 2.0**-24)
"""Rounding of |d| - rtol |b| - atol in float32 in units of |d|, where it is near 0: one unit each for d, for the two
tolerances and products, and for the sums."""
MARGIN = tl.constexpr(3)
"""Octaves that the window of the histogram leaves above the largest error seen."""


@triton.jit
def reciprocal(x, approximate: tl.constexpr):
    """1 / x within one unit in the last place, inf for 0 and subnormal numbers."""
    if approximate:
        code: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        inverse = tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def rounded_octave(d):
    """Biased exponent of |d| rounded to bfloat16."""
    return (d.to(tl.int32, bitcast=True) + 0x8000) >> 23


@triton.jit
def counted(octave, base):
    """The double that counts an octave in the field number ``octave - base``; below the first field less than 1/2."""
    high = octave * (FIELD << 20) + ((1023 - FIELD * base) << 20)
    return tl.sum((high.to(tl.int64) << 32).to(tl.float64, bitcast=True), 1)


@triton.jit
def window_top(largest, windows: tl.constexpr):
    """The octave above the window for errors up to this one; low enough a window keeps its lowest field for zeros."""
    return tl.maximum(rounded_octave(largest) + 1 + MARGIN, 7 * windows + 1)


@triton.jit
def steps(d, b, tiny):
    """|d| / 2^floor(log2 |b|), where the power is at least ``tiny`` (its bits)."""
    power = tl.maximum(b.to(tl.int32, bitcast=True) & EXPONENT, tiny)
    return tl.abs(d) * (-power + TWICE_ONE).to(tl.float32, bitcast=True)


@triton.jit
def in_range(largest):
    """Tell whether squares of numbers up to this one keep float32's precision."""
    return (largest == 0) | ((largest > SMALL) & (largest < HUGE))


@triton.jit
def flush(bins, packed, base, first: tl.constexpr, last: tl.constexpr):
    """Add one window's fields ``first`` to ``last`` of all threads to the octaves from ``base`` on."""
    field = tl.arange(0, COUNTERS)
    even, odd = packed
    chosen = tl.where((field % 2 == 0)[None, :], even[:, None], odd[:, None])
    counts = tl.sum((chosen >> (field // 2 * 2 * FIELD).to(tl.int64)[None, :]) & 0xFFF, 0)
    octave = base + field
    tl.atomic_add(bins + octave, counts, mask=(field >= first) & (field <= last) & (octave >= 0) & (octave < 256))


@triton.jit
def flush_all(bins, w0, w1, w2, w3, top, windows: tl.constexpr):
    """Add what the windows below octave ``top`` have counted; the lowest field of the last holds what lies below."""
    flush(bins, w0, top - 8, 0, 7)
    flush(bins, w1, top - 15, 0, 6)
    flush(bins, w2, top - 22, 0 if windows > 3 else 1, 6)
    if windows > 3:
        flush(bins, w3, top - 29, 1, 6)


@triton.jit
def add_fields(packed, seen):
    """Add a tile's counters, of six bits, to the program's, of twelve."""
    even, odd = packed
    bits = seen.to(tl.int64, bitcast=True)
    return even + (bits & EVEN_FIELDS), odd + ((bits >> FIELD) & EVEN_FIELDS)


@triton.jit
def quick_kernel(
    actual,
    expected,
    valid,
    numbers,
    bins,
    declined,
    tiles,
    rtol,
    atol,
    tiny,
    masked: tl.constexpr,
    windows: tl.constexpr,
    threads: tl.constexpr,
    width: tl.constexpr,
    fold: tl.constexpr,
    approximate: tl.constexpr,
):
    """Measure every ``programs``-th tile, at most 73 a program (the counters' capacity); write one row a program.

    ``tiny``: bits of the smallest normal number of the coarser dtype, in float32.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    size: tl.constexpr = threads * width * fold
    lane = tl.arange(0, threads)[:, None] * width + tl.arange(0, width)[None, :]
    f = tl.zeros([threads], tl.float32)
    g = tl.zeros([threads], tl.float64)
    never = tl.full([threads], NEVER, tl.int32)
    nothing = tl.zeros([threads], tl.int64), tl.zeros([threads], tl.int64)
    dd, aa, bb, ab, db, abs_sum, rel_sum = g, g, g, g, g, g, g
    max_d, max_a, max_b, max_rel, excess = f, f, f, f, f
    max_steps = tl.full([], 0.0, tl.float32)
    tile_d, tile_excess, tile_out = never, never, never
    n_out, n_none = f, f
    done = tl.full([], 0, tl.int32)
    w0, w1, w2, w3 = nothing, nothing, nothing, nothing
    first = tl.full([], program, tl.int64) * size + lane
    sample = tl.abs(tl.load(actual + first).to(tl.float32) - tl.load(expected + first).to(tl.float32))
    top = window_top(tl.max(tl.max(sample, 1), 0), windows)
    for tile in range(program, tiles, programs):
        start = tl.full([], tile, tl.int64) * size
        t_dd, t_aa, t_bb, t_ab, t_db, t_abs, t_rel = f, f, f, f, f, f, f
        t_d, t_a, t_b, t_max_rel, t_excess, t_gap = f, f, f, f, f, f + INF
        t_out, t_none, t_zero = f, f, f
        h0, h1, h2, h3 = g + WHOLE, g + WHOLE, g + WHOLE, g + WHOLE
        bad = f > 0
        floor = top - 7 * windows - 1
        for part in tl.range(fold, num_stages=3):
            at = part * (threads * width) + lane
            x = tl.load(actual + start + at).to(tl.float32)
            y = tl.load(expected + start + at).to(tl.float32)
            if masked:
                bad = bad | (tl.min(tl.load(valid + start + at).to(tl.int32), 1) == 0)
            difference = x - y
            d, a, b = tl.abs(difference), tl.abs(x), tl.abs(y)
            t_dd += tl.sum(d * d, 1)
            t_aa += tl.sum(x * x, 1)
            t_bb += tl.sum(y * y, 1)
            t_ab += tl.sum(x * y, 1)
            t_db += tl.sum(difference * y, 1)
            t_abs += tl.sum(d, 1)
            t_d = tl.maximum(t_d, tl.max(d, 1))
            t_a = tl.maximum(t_a, tl.max(a, 1))
            t_b = tl.maximum(t_b, tl.max(b, 1))
            # Both zero is NaN, which the maximum turns into 0; an error at an expected zero is inf: declined.
            relative = tl.maximum(d * reciprocal(b, approximate), 0.0)
            t_none += tl.sum(tl.where(b == 0, 1.0, 0.0), 1)
            t_rel += tl.sum(relative, 1)
            t_max_rel = tl.maximum(t_max_rel, tl.max(relative, 1))
            over = d - rtol * b - atol
            t_out += tl.sum(tl.where(over > 0, 1.0, 0.0), 1)
            t_excess = tl.maximum(t_excess, tl.max(over, 1))
            t_gap = tl.minimum(t_gap, tl.min(tl.abs(over) - ROUNDING * d, 1))
            t_zero += tl.sum(tl.where(d == 0, 1.0, 0.0), 1)
            octave = tl.maximum(rounded_octave(d), floor)
            h0 += counted(octave, top - 8)
            h1 += counted(tl.minimum(octave, top - 8), top - 15)
            h2 += counted(tl.minimum(octave, top - 15), top - 22)
            if windows > 3:
                h3 += counted(tl.minimum(octave, top - 22), top - 29)
        below = (h3 if windows > 3 else h2).to(tl.int64, bitcast=True) & 63
        missed = (below != t_zero.to(tl.int64)) | (rounded_octave(t_d) >= top)
        bad = bad | missed | ~(t_aa + t_bb + t_rel < INF) | (t_gap < 0)
        bad = bad | ~(in_range(t_d) & in_range(t_a) & in_range(t_b))
        # |d| / 2^floor(log2 |b|) is below 2 |d / b|: few tiles can hold a new maximum.
        verdict = tl.max(tl.where(bad, 2, (2 * t_max_rel > max_steps).to(tl.int32)), 0)
        if verdict < 2:
            done += 1
            dd += t_dd.to(tl.float64)
            aa += t_aa.to(tl.float64)
            bb += t_bb.to(tl.float64)
            ab += t_ab.to(tl.float64)
            db += t_db.to(tl.float64)
            abs_sum += t_abs.to(tl.float64)
            rel_sum += t_rel.to(tl.float64)
            tile_d = tl.where(t_d > max_d, tile, tile_d)
            tile_excess = tl.where(t_excess > excess, tile, tile_excess)
            tile_out = tl.where(t_out > 0, tl.minimum(tile_out, tile), tile_out)
            max_d, excess = tl.maximum(max_d, t_d), tl.maximum(excess, t_excess)
            max_a, max_b = tl.maximum(max_a, t_a), tl.maximum(max_b, t_b)
            max_rel = tl.maximum(max_rel, t_max_rel)
            if verdict == 1:
                for part in range(fold):
                    at = part * (threads * width) + lane
                    x = tl.load(actual + start + at).to(tl.float32)
                    y = tl.load(expected + start + at).to(tl.float32)
                    max_steps = tl.maximum(max_steps, tl.max(tl.max(steps(x - y, y, tiny), 1), 0))
            n_out += t_out
            n_none += t_none
            w0, w1, w2 = add_fields(w0, h0), add_fields(w1, h1), add_fields(w2, h2)
            if windows > 3:
                w3 = add_fields(w3, h3)
        else:
            tl.store(declined + tile, 1)
            if tl.max(missed.to(tl.int32), 0) == 1:
                flush_all(bins, w0, w1, w2, w3, top, windows)
                w0, w1, w2, w3 = nothing, nothing, nothing, nothing
                top = window_top(tl.max(t_d, 0), windows)
    flush_all(bins, w0, w1, w2, w3, top, windows)
    row = numbers + program * 19
    tl.store(row, tl.sum(dd))
    tl.store(row + 1, tl.sum(aa))
    tl.store(row + 2, tl.sum(bb))
    tl.store(row + 3, tl.sum(ab))
    tl.store(row + 4, tl.sum(db))
    tl.store(row + 5, tl.sum(abs_sum))
    tl.store(row + 6, tl.sum(rel_sum))
    largest, worst = tl.max(max_d, 0), tl.max(excess, 0)
    tl.store(row + 7, largest.to(tl.float64))
    tl.store(row + 8, tl.max(max_a, 0).to(tl.float64))
    tl.store(row + 9, tl.max(max_b, 0).to(tl.float64))
    tl.store(row + 10, tl.max(max_rel, 0).to(tl.float64))
    tl.store(row + 11, max_steps.to(tl.float64))
    tl.store(row + 12, worst.to(tl.float64))
    tl.store(row + 13, tl.min(tl.where(max_d == largest, tile_d, NEVER), 0).to(tl.float64))
    tl.store(row + 14, tl.min(tl.where(excess == worst, tile_excess, NEVER), 0).to(tl.float64))
    tl.store(row + 15, tl.min(tile_out, 0).to(tl.float64))
    tl.store(row + 16, tl.sum(n_out.to(tl.float64)))
    tl.store(row + 17, tl.sum(n_none.to(tl.float64)))
    tl.store(row + 18, done.to(tl.float64))
