"""The kernel at memory speed: the common case of 16- and 32-bit floats, in float32.

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

from ditto_core.compare._kernels import NEVER, QUICK_COLUMNS, store_each, store_sums

INF = tl.constexpr(float("inf"))
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
def first_top(actual, expected, at, windows: tl.constexpr):
    """The window's top by a sample of the elements."""
    sample = tl.abs(tl.load(actual + at).to(tl.float32) - tl.load(expected + at).to(tl.float32))
    return window_top(tl.max(tl.max(sample, 1), 0), windows)


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
def add_sums(x, y, d, sums):
    """Add the products and the error of a thread's elements to its sums."""
    dd, aa, bb, ab, db, abs_sum = sums
    difference = x - y
    dd += tl.sum(d * d, 1)
    aa += tl.sum(x * x, 1)
    bb += tl.sum(y * y, 1)
    ab += tl.sum(x * y, 1)
    db += tl.sum(difference * y, 1)
    return dd, aa, bb, ab, db, abs_sum + tl.sum(d, 1)


@triton.jit
def add_relative(d, b, relatives, approximate: tl.constexpr):
    """Add relative errors to their sum, count zeros and raise the maximum."""
    rel_sum, uncounted, max_rel = relatives
    # Both zero is NaN, which the maximum turns into 0; an error at an expected zero is inf: declined.
    relative = tl.maximum(d * reciprocal(b, approximate), 0.0)
    uncounted += tl.sum(tl.where(b == 0, 1.0, 0.0), 1)
    return rel_sum + tl.sum(relative, 1), uncounted, tl.maximum(max_rel, tl.max(relative, 1))


@triton.jit
def add_bounds(d, b, rtol, atol, bounds):
    """Count errors beyond their bound; keep the largest excess and how near the bound an error came."""
    outside, excess, gap = bounds
    over = d - rtol * b - atol
    outside += tl.sum(tl.where(over > 0, 1.0, 0.0), 1)
    gap = tl.minimum(gap, tl.min(tl.abs(over) - ROUNDING * d, 1))
    return outside, tl.maximum(excess, tl.max(over, 1)), gap


@triton.jit
def count_octaves(d, fields, top, windows: tl.constexpr):
    """Count the octaves of errors in the windows below octave ``top``; what lies below them, in the lowest field."""
    h0, h1, h2, h3 = fields
    octave = tl.maximum(rounded_octave(d), top - 7 * windows - 1)
    h0 += counted(octave, top - 8)
    h1 += counted(tl.minimum(octave, top - 8), top - 15)
    h2 += counted(tl.minimum(octave, top - 15), top - 22)
    if windows > 3:
        h3 += counted(tl.minimum(octave, top - 22), top - 29)
    return h0, h1, h2, h3


@triton.jit
def missed_window(fields, zeros, largest, top, windows: tl.constexpr):
    """Tell whether a thread saw an error above the window, or one below it that is not 0."""
    lowest = (fields[3] if windows > 3 else fields[2]).to(tl.int64, bitcast=True) & 63
    return (lowest != zeros.to(tl.int64)) | (rounded_octave(largest) >= top)


@triton.jit
def add_double(sums, found):
    """Add a tile's float32 sums to the program's float64 ones."""
    dd, aa, bb, ab, db, abs_sum = sums
    dd += found[0].to(tl.float64)
    aa += found[1].to(tl.float64)
    bb += found[2].to(tl.float64)
    ab += found[3].to(tl.float64)
    db += found[4].to(tl.float64)
    return dd, aa, bb, ab, db, abs_sum + found[5].to(tl.float64)


@triton.jit
def keep_tile(value, tile, best, best_tile):
    """Keep the larger value of a thread and the tile that it is in; of equals the first."""
    return tl.maximum(best, value), tl.where(value > best, tile, best_tile)


@triton.jit
def most_steps(actual, expected, tiny, lane, threads: tl.constexpr, stride: tl.constexpr, fold: tl.constexpr):
    """The largest error of a tile in steps of the dtype."""
    best = tl.zeros([threads], tl.float32)
    for part in range(fold):
        at = part * stride + lane
        x, y = tl.load(actual + at).to(tl.float32), tl.load(expected + at).to(tl.float32)
        best = tl.maximum(best, tl.max(steps(x - y, y, tiny), 1))
    return tl.max(best, 0)


@triton.jit
def measure_tile(
    actual, expected, valid, lane, rtol, atol, top,
    masked: tl.constexpr, windows: tl.constexpr, threads: tl.constexpr, stride: tl.constexpr, fold: tl.constexpr,
    approximate: tl.constexpr,
):  # fmt: skip
    """Measure one tile, each thread its part: sums, relative errors, bounds, largest sizes, octaves, what is wrong.

    ``missed``: the thread saw errors outside the histogram's window; ``bad``: it cannot measure its part.
    """
    f, whole = tl.zeros([threads], tl.float32), tl.full([threads], WHOLE, tl.float64)
    sums, relatives, bounds = (f, f, f, f, f, f), (f, f, f), (f, f, f + INF)
    max_d, max_a, max_b, zeros = f, f, f, f
    fields = (whole, whole, whole, whole)
    bad = f > 0
    for part in tl.range(fold, num_stages=3):
        at = part * stride + lane
        x, y = tl.load(actual + at).to(tl.float32), tl.load(expected + at).to(tl.float32)
        if masked:
            bad = bad | (tl.min(tl.load(valid + at).to(tl.int32), 1) == 0)
        d, a, b = tl.abs(x - y), tl.abs(x), tl.abs(y)
        sums = add_sums(x, y, d, sums)
        max_d = tl.maximum(max_d, tl.max(d, 1))
        max_a = tl.maximum(max_a, tl.max(a, 1))
        max_b = tl.maximum(max_b, tl.max(b, 1))
        relatives = add_relative(d, b, relatives, approximate)
        bounds = add_bounds(d, b, rtol, atol, bounds)
        zeros += tl.sum(tl.where(d == 0, 1.0, 0.0), 1)
        fields = count_octaves(d, fields, top, windows)
    missed = missed_window(fields, zeros, max_d, top, windows)
    bad = bad | missed | ~(sums[1] + sums[2] + relatives[0] < INF) | (bounds[2] < 0)
    bad = bad | ~(in_range(max_d) & in_range(max_a) & in_range(max_b))
    return sums, relatives, bounds, (max_d, max_a, max_b), fields, missed, bad


@triton.jit
def quick_kernel(
    actual, expected, valid, numbers, bins, declined, tiles, rtol, atol, tiny,
    masked: tl.constexpr, windows: tl.constexpr, threads: tl.constexpr, width: tl.constexpr, fold: tl.constexpr,
    approximate: tl.constexpr,
):  # fmt: skip
    """Measure every ``programs``-th tile, at most 73 a program (the counters' capacity); write one row a program.

    ``tiny``: bits of the smallest normal number of the coarser dtype, in float32.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    stride: tl.constexpr = threads * width
    size: tl.constexpr = stride * fold
    lane = tl.arange(0, threads)[:, None] * width + tl.arange(0, width)[None, :]
    f, g, never = tl.zeros([threads], tl.float32), tl.zeros([threads], tl.float64), tl.full([threads], NEVER, tl.int32)
    nothing = tl.zeros([threads], tl.int64), tl.zeros([threads], tl.int64)
    sums, rel_sum = (g, g, g, g, g, g), g
    max_d, max_a, max_b, max_rel, excess, outside, uncounted = f, f, f, f, f, f, f
    tile_d, tile_excess, tile_out = never, never, never
    max_steps, done = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    w0, w1, w2, w3 = nothing, nothing, nothing, nothing
    top = first_top(actual, expected, tl.full([], program, tl.int64) * size + lane, windows)
    for tile in range(program, tiles, programs):
        start = tl.full([], tile, tl.int64) * size
        found, relatives, bounds, largest, fields, missed, bad = measure_tile(
            actual + start, expected + start, valid + start, lane, rtol, atol, top,
            masked, windows, threads, stride, fold, approximate,
        )  # fmt: skip
        # |d| / 2^floor(log2 |b|) is below 2 |d / b|: few tiles can hold a new maximum.
        verdict = tl.max(tl.where(bad, 2, (2 * relatives[2] > max_steps).to(tl.int32)), 0)
        if verdict < 2:
            done += 1
            sums = add_double(sums, found)
            rel_sum += relatives[0].to(tl.float64)
            max_d, tile_d = keep_tile(largest[0], tile, max_d, tile_d)
            excess, tile_excess = keep_tile(bounds[1], tile, excess, tile_excess)
            tile_out = tl.where(bounds[0] > 0, tl.minimum(tile_out, tile), tile_out)
            max_a, max_b = tl.maximum(max_a, largest[1]), tl.maximum(max_b, largest[2])
            max_rel = tl.maximum(max_rel, relatives[2])
            if verdict == 1:
                found_steps = most_steps(actual + start, expected + start, tiny, lane, threads, stride, fold)
                max_steps = tl.maximum(max_steps, found_steps)
            outside += bounds[0]
            uncounted += relatives[1]
            w0, w1, w2 = add_fields(w0, fields[0]), add_fields(w1, fields[1]), add_fields(w2, fields[2])
            if windows > 3:
                w3 = add_fields(w3, fields[3])
        else:
            tl.store(declined + tile, 1)
            if tl.max(missed.to(tl.int32), 0) == 1:
                flush_all(bins, w0, w1, w2, w3, top, windows)
                w0, w1, w2, w3 = nothing, nothing, nothing, nothing
                top = window_top(tl.max(largest[0], 0), windows)
    flush_all(bins, w0, w1, w2, w3, top, windows)
    row, best, worst = numbers + program * QUICK_COLUMNS, tl.max(max_d, 0), tl.max(excess, 0)
    store_sums(row, sums)
    tl.store(row + 6, tl.sum(rel_sum))
    store_each(row + 7, (best, tl.max(max_a, 0), tl.max(max_b, 0), tl.max(max_rel, 0), max_steps, worst))
    tile_d, tile_excess = tl.where(max_d == best, tile_d, NEVER), tl.where(excess == worst, tile_excess, NEVER)
    store_each(row + 13, (tl.min(tile_d, 0), tl.min(tile_excess, 0), tl.min(tile_out, 0)))
    store_each(row + 16, (tl.sum(outside, 0), tl.sum(uncounted, 0), done))
