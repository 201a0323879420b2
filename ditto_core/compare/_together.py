"""Many small pairs in a constant number of operations: on the CPU by row of a matrix, on CUDA in one kernel
(`_together_cuda`).

Both give columns of sums for :mod:`ditto_core.compare._columns`. A pair that holds NaN or Inf is found by its sums and
left to :func:`~ditto_core.compare.metrics.measure`: ``plain`` tells which pairs hold none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ditto_core.compare._accumulate import EXPONENT_BITS, Rules
from ditto_core.compare._arithmetic import Counts
from ditto_core.compare._assemble import QUANTILES, bin_values
from ditto_core.compare._blocks import Floats
from ditto_core.compare._launch import OCTAVES


class Sums(NamedTuple):
    """What was measured of many pairs: columns by name, errors by octave [pairs, 256] and their quantiles [4, pairs];
    squared errors and sizes of all element rows, one pair's behind the other's; which pairs are ``plain``."""

    found: dict[str, Any]
    octaves: Counts
    quantiles: Floats | None
    rows: Floats
    plain: npt.NDArray[np.bool_]


def on_cpu(flat: Sequence[torch.Tensor], row: int, rules: Rules) -> Sums:
    """Measure pairs of one size and one dtype a side, with element rows of ``row``.

    ``flat``: the engine's [pairs, size], the reference's and, where some elements do not count, the masks.
    """
    a, b = (wide(side) for side in flat[:2])
    pairs, size = a.shape
    count = np.full(pairs, size)
    if len(flat) > 2:
        ignored = ~flat[2].numpy()
        a[ignored] = b[ignored] = 0
        count -= ignored.sum(1)
    with np.errstate(all="ignore"):
        aa, bb = squares(a, a), squares(b, b)
        plain = np.isfinite(aa + bb)
        if torch.float64 in (flat[0].dtype, flat[1].dtype):
            plain &= ~beyond(a, b)
        if not plain.all():
            a[~plain] = b[~plain] = 0
        found = {"count": count, "actual": aa, "expected": bb, "max_actual": np.maximum(a.max(1), -a.min(1))}
        product = squares(a, b)
        d = np.subtract(a, b, out=a)
        found["difference"] = dd = squares(d, d)
        # The errors cancel in a product of their own: as one pair is measured.
        found["product"] = np.where((aa > 1e-4 * bb) & (aa < 1e4 * bb), (aa + bb - dd) / 2, product)
        by_row = np.stack([squares(side.reshape(-1, row), side.reshape(-1, row)) for side in (d, b)])
        magnitudes(found, d, b, rules)
        places(found, flat, d)
        octaves, quantiles = errors(found, d)
    return Sums(found, octaves, quantiles, by_row, plain)


def beyond(a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
    """Tell which rows have float64 numbers whose squares could overflow or vanish."""
    largest = np.maximum(np.abs(a), np.abs(b))
    outside = (largest > 2.0**500) | ((largest < 2.0**-500) & (largest > 0))
    return np.any(outside, axis=1)  # type: ignore[no-any-return]


def wide(side: torch.Tensor) -> Floats:
    """Return a new matrix in float64; torch converts float16 to float32 in vector registers, to float64 one by one."""
    narrow = side.float() if side.dtype == torch.float16 else side
    found: Floats = narrow.to(torch.float64, copy=True).numpy()
    return found


def squares(x: Floats, y: Floats) -> Floats:
    """Return the inner product of each row."""
    found: Floats = np.einsum("ij,ij->i", x, y)
    return found


def magnitudes(found: dict[str, Any], d: Floats, b: Floats, rules: Rules) -> None:
    """Add what depends on |d| and |b|, which take the place of both, and count |d| > atol + rtol |b|, rounded once."""
    np.abs(d, out=d)
    np.abs(b, out=b)
    relative, none = d / b, b == 0
    if none.any():
        relative[none] = np.where(d[none] > 0, np.inf, 0.0)
    found |= {"max_abs": d.max(1), "max_expected": b.max(1), "abs_sum": d.sum(1)}
    found |= {"max_rel": relative.max(1), "rel_sum": relative.sum(1), "rel_count": b.shape[1] - none.sum(1)}
    pairs = len(d)
    found |= {
        "mismatched": np.zeros(pairs, np.int64),
        **{name: np.full(pairs, -1) for name in ("first_mismatch", "worst_mismatch")},
    }
    if (found["max_abs"] > rules.atol).any():
        least = torch.scalar_tensor(rules.atol, dtype=torch.float64)
        bound = torch.add(least, torch.from_numpy(b), alpha=rules.rtol, out=torch.from_numpy(relative)).numpy()
        outside = d > bound
        found["mismatched"] = counts = np.count_nonzero(outside, axis=1)
        found["first_mismatch"] = np.where(counts > 0, outside.argmax(1), -1)
        found["worst_mismatch"] = np.where(counts > 0, np.subtract(d, bound, out=bound).argmax(1), -1)
    bits = b.view(np.int64)
    np.bitwise_and(bits, EXPONENT_BITS, out=bits)
    np.maximum(b, rules.place.tiny, out=b)
    found["max_steps"] = np.divide(d, b, out=b).max(1)


def places(found: dict[str, Any], flat: Sequence[torch.Tensor], d: Floats) -> None:
    """Add the place of the largest error and both values there."""
    at = d.argmax(1)
    found["max_abs_at"] = np.where(found["max_abs"] > 0, at, -1)
    where = torch.from_numpy(at)[:, None]
    for name, side in zip(("actual_there", "expected_there"), flat, strict=False):
        found[name] = side.gather(1, where)[:, 0].double().numpy()


def errors(found: dict[str, Any], d: Floats) -> tuple[Counts, Floats]:
    """Return the errors by octave [pairs, 256] and their quantiles [4, pairs], by their bfloat16 values."""
    pairs, size = d.shape
    keys = np.sort(torch.from_numpy(d).bfloat16().view(torch.int16).numpy(), axis=1)
    bins = (keys >> 7) + (np.arange(pairs) << 8)[:, None]
    octaves = np.bincount(bins.reshape(-1), minlength=pairs << 8).reshape(pairs, OCTAVES)
    octaves[:, 0] -= np.count_nonzero(keys == 0, axis=1)
    ranks = np.ceil(np.array(QUANTILES)[:, None] * found["count"]).astype(np.int64) + (size - found["count"]) - 1
    chosen = keys[np.arange(pairs), np.maximum(ranks, 0)]
    return octaves, np.minimum(bin_values(chosen.astype(np.int64)).astype(np.float64), found["max_abs"])
