"""Triton kernels behind :mod:`ditto_core.compare.cuda`; importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
NOWHERE = tl.constexpr(2**62)
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
def measure_kernel(
    actual,
    expected,
    valid,
    sums,
    counts,
    bins,
    size,
    rtol_at,
    atol_at,
    tiny_at,
    masked: tl.constexpr,
    split_actual: tl.constexpr,
    split_expected: tl.constexpr,
    equal_nan: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
):
    """Measure every ``programs``-th block of ``lanes`` elements; write one row of partial results a program."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rtol, atol, tiny = tl.load(rtol_at), tl.load(atol_at), tl.load(tiny_at)
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
    for block in range(program, tl.cdiv(size, lanes), programs):
        at = (block * lanes + lane).to(tl.int64)
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
    row = sums + program * 12
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
    entry = counts + program * 17
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
    tl.store(entry + 13, tl.min(tl.where(max_abs == largest, abs_at, NOWHERE)))
    tl.store(entry + 14, tl.min(tl.where(excess == worst, worst_at, NOWHERE)))
    tl.store(entry + 15, tl.min(first_out))
    tl.store(entry + 16, tl.min(first_bad))
    tl.store(bins + program * 256 + tl.arange(0, 256), octaves)


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
