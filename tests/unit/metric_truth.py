"""Every metric of a pair worked out whole in float64 by numpy, and the check that ours are equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

LARGEST = {
    torch.float64: (2 - 2.0**-52) * 2.0**1023,
    torch.float32: (2 - 2.0**-23) * 2.0**127,
    torch.float16: 65504.0,
    torch.bfloat16: (2 - 2.0**-7) * 2.0**127,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.int8: 127,
    torch.int16: 2**15 - 1,
    torch.int32: 2**31 - 1,
    torch.int64: 2**63 - 1,
    torch.uint8: 255,
    torch.uint16: 2**16 - 1,
    torch.uint32: 2**32 - 1,
    torch.bool: 1,
}
MANTISSA = {
    torch.float64: (52, -1022),
    torch.float32: (23, -126),
    torch.float16: (10, -14),
    torch.bfloat16: (7, -126),
    torch.float8_e4m3fn: (3, -6),
    torch.float8_e5m2: (2, -14),
}


def whole(actual, expected, valid=None):
    """Both sides as flat float64 arrays, only what is valid and finite on both sides, and the difference."""
    a, b = (x.to(torch.float64).contiguous().numpy().reshape(-1) for x in (actual, expected))
    keep = np.ones(a.size, bool) if valid is None else valid.expand(actual.shape).numpy().reshape(-1)
    return a[keep], b[keep]


def steps(dtype, b):
    """ULP at each |b|, by frexp: 2^(max(e, e_min) - mantissa bits)."""
    if dtype not in MANTISSA:
        return np.ones_like(b)
    bits, lowest = MANTISSA[dtype]
    exponents = np.where(b == 0, lowest, np.frexp(np.abs(b))[1] - 1)
    return np.ldexp(1.0, np.maximum(exponents, lowest) - bits)


def widest(first, second):
    return max(first, second, key=lambda t: -MANTISSA[t][0] if t in MANTISSA else -100)


def check(actual, expected, m, valid=None, equal_nan=False):
    a, b = whole(actual, expected, valid)
    both = np.isfinite(a) & np.isfinite(b)
    unequal = ~both & ~((a == b) | (np.isnan(a) & np.isnan(b) & equal_nan))
    x, y = a[both], b[both]
    d = x - y
    n = max(1, x.size)
    close = {"rel": 1e-9, "abs": 1e-300}
    assert m.count == a.size
    dd, aa, bb, ab = (d**2).sum(), (x**2).sum(), (y**2).sum(), (x * y).sum()
    rel = math.inf if unequal.any() else math.sqrt(dd / bb) if bb else (math.inf if dd else 0.0)
    assert m.rel_l2 == pytest.approx(rel, **close)
    assert m.max_abs == pytest.approx(np.abs(d).max(initial=0), **close)
    assert m.mean_abs == pytest.approx(np.abs(d).sum() / n, **close)
    assert m.mse == pytest.approx(dd / n, **close)
    assert m.rms == pytest.approx(math.sqrt(dd / n), **close)
    assert m.snr_db == (pytest.approx(-20 * math.log10(rel)) if rel else math.inf)
    cosine = ab / math.sqrt(aa) / math.sqrt(bb) if aa and bb else float(not aa and not bb)
    assert m.cosine == pytest.approx(cosine, rel=1e-9, abs=1e-9)
    if bb:
        assert m.scale == pytest.approx(ab / bb, rel=1e-7, abs=1e-11 * math.sqrt(aa / bb))
    nonzero = (x != 0) | (y != 0)
    with np.errstate(divide="ignore"):
        r = np.abs(d[nonzero] / y[nonzero])
    assert m.max_rel == pytest.approx(r.max(initial=0), **close)
    assert m.mean_rel == pytest.approx(r.sum() / max(1, r.size), **close)
    units = np.abs(d) / steps(widest(actual.dtype, expected.dtype), y)
    assert m.max_ulp == pytest.approx(units.max(initial=0), **close)
    outside = unequal.copy()
    outside[both] = np.abs(d) > m.atol + m.rtol * np.abs(y)
    assert m.mismatched == outside.sum()
    assert m.mismatch_ratio == outside.sum() / max(1, a.size)
    for name, test in (("nan", np.isnan), ("inf", np.isinf)):
        assert getattr(m, f"{name}_actual") == test(a).sum()
        assert getattr(m, f"{name}_expected") == test(b).sum()
    assert m.nan_mismatch == (np.isnan(a) ^ np.isnan(b)).sum()
    assert m.inf_mismatch == (~both & ~np.isnan(a) & ~np.isnan(b) & (a != b)).sum()
    assert m.nonfinite_mismatch == unequal.sum()
    assert m.max_expected == np.abs(b[np.isfinite(b)]).max(initial=0)
    assert m.max_actual == np.abs(a[np.isfinite(a)]).max(initial=0)
    assert m.all_zero_actual == bool(a.size and (a == 0).all())
    assert m.all_zero_expected == bool(b.size and (b == 0).all())
    for share, found in zip((0.5, 0.9, 0.99, 0.999), (m.p50, m.p90, m.p99, m.p999), strict=True):
        exact = np.sort(np.abs(d))[max(0, math.ceil(share * d.size) - 1)] if d.size else 0.0
        assert found == pytest.approx(exact, rel=2**-7.9, abs=1e-40)
    assert dict(m.histogram) == octaves(np.abs(d))
    assert m.headroom == m.max_actual / LARGEST[actual.dtype]
    if bb and abs(cosine) > 1e-6:
        scale = ab / bb
        left = math.sqrt(((x - scale * y) ** 2).sum() / bb) / abs(scale)
        assert m.scale_residual == pytest.approx(left, rel=1e-6, abs=3e-8)
    if valid is None:
        check_places(actual, expected, m, a, b, outside, unequal)


def check_places(actual, expected, m, a, b, outside, unequal):
    """First and worst places; ``a`` and ``b`` are all elements of both sides, two masks say what is out or unequal."""
    both = np.isfinite(a) & np.isfinite(b)
    d = (a - b)[both]
    if not both.all():
        first = int((~both).argmax())
        side = "expected" if np.isfinite(a[first]) else "actual" if np.isfinite(b[first]) else "both"
        assert m.first_nonfinite == (tuple(int(i) for i in np.unravel_index(first, actual.shape)), side)
    if outside.any():
        assert m.first_mismatch == tuple(int(i) for i in np.unravel_index(outside.argmax(), actual.shape))
        worst = np.ravel_multi_index(m.worst_mismatch, actual.shape) if actual.dim() else 0
        if unequal.any():
            assert worst == unequal.argmax()
        else:
            excess = np.where(both, np.abs(a - b) - m.atol - m.rtol * np.abs(b), -np.inf)
            assert excess[worst] == pytest.approx(excess.max(), rel=1e-9, abs=1e-12 * np.abs(b[both]).max())
    if np.abs(d).max(initial=0) > 0 and both.all():
        assert m.max_abs_index == tuple(int(i) for i in np.unravel_index(np.abs(d).argmax(), actual.shape))
        assert m.max_abs_actual == actual[m.max_abs_index].item()
        assert m.max_abs_expected == expected[m.max_abs_index].item()


def octaves(d):
    """How many |d| lie in each octave once they are rounded to 8 bits (bfloat16), by lower edge; zeros at 0."""
    mantissa, exponent = np.frexp(d.astype(np.float32).astype(np.float64))
    rounded = np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    edges = np.where(rounded == 0, 0.0, np.ldexp(0.5, np.frexp(rounded)[1]))
    return dict(zip(*(found.tolist() for found in np.unique(edges, return_counts=True)), strict=True))
