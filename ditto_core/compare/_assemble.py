"""From sums to :class:`Metrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ditto_core.compare._accumulate import Accumulator
from ditto_core.compare._arithmetic import Counts
from ditto_core.compare._blocks import unravel
from ditto_core.compare._record import Index, Metrics
from ditto_core.compare.ulp import spacing

FEW = 16
"""Indices of an axis that plain Python handles before numpy has started."""

QUANTILES = (0.5, 0.9, 0.99, 0.999)


def assemble(seen: Accumulator, actual: torch.Tensor, expected: torch.Tensor) -> Metrics:
    """Turn sums into metrics; the few single values that are shown are read from the tensors."""
    rules, finite, shape = seen.rules, seen.count - seen.nonfinite, actual.shape
    bins, numbers = seen.histogram()
    at = place(seen.max_abs_at, shape)
    values = (None, None) if at is None else seen.values or (actual[at].item(), expected[at].item())
    first = place(seen.first_nonfinite, shape)
    p50, p90, p99, p999 = quantiles(bins, numbers, finite, seen.max_abs, seen.fine)
    return Metrics(
        count=seen.count,
        max_abs=seen.max_abs,
        max_abs_index=at,
        max_abs_actual=values[0],
        max_abs_expected=values[1],
        mean_abs=seen.abs_sum / max(1, finite),
        max_rel=seen.max_rel,
        mean_rel=seen.rel_sum / max(1, seen.rel_count),
        max_ulp=seen.max_steps / rules.place.eps if rules.place.eps else seen.max_abs,
        mismatched=seen.mismatched,
        mismatch_ratio=seen.mismatched / max(1, seen.count),
        first_mismatch=place(seen.first_mismatch, shape),
        worst_mismatch=place(seen.worst_mismatch, shape),
        rtol=rules.rtol,
        atol=rules.atol,
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
        histogram=octaves(bins, numbers),
        first_nonfinite=None if first is None else (first, nonfinite_side(actual[first], expected[first])),
        all_zero_actual=seen.count > 0 and seen.max_actual == 0 and not seen.nan_actual + seen.inf_actual,
        all_zero_expected=seen.count > 0 and seen.max_expected == 0 and not seen.nan_expected + seen.inf_expected,
        max_actual=seen.max_actual,
        max_expected=seen.max_expected,
        headroom=seen.max_actual / spacing(actual.dtype).largest,
        nan_actual=seen.nan_actual,
        nan_expected=seen.nan_expected,
        nan_mismatch=seen.nan_mismatch,
        inf_actual=seen.inf_actual,
        inf_expected=seen.inf_expected,
        inf_mismatch=seen.inf_mismatch,
        nonfinite_mismatch=seen.unequal_nonfinite,
        **norms(seen, finite),
        **axis_errors(seen),
    )


def axis_errors(seen: Accumulator) -> dict[str, Any]:
    """Return ``by_row``, ``by_position`` and ``by_head``, as far as there are such axes."""
    return {split.name: by_axis(*seen.split(i)) for i, split in enumerate(seen.layout.splits)}


def norms(seen: Accumulator, finite: int) -> dict[str, Any]:
    """Return the metrics that are made of sums of squares. Long doubles carry what float64 cannot square."""
    dd, aa, bb, ab = (seen.total(name) for name in ("difference", "actual", "expected", "product"))
    norm_a, norm_b = np.sqrt(aa), np.sqrt(bb)
    rel = math.inf if seen.unequal_nonfinite else ratio(np.sqrt(dd), norm_b)
    scale = float(ab / bb) if bb else 1.0 if not aa else math.inf
    cosine = float(ab / (norm_a * norm_b)) if aa and bb else float(not aa and not bb)
    left = math.sqrt(max(0.0, 1 - cosine * cosine))
    return {
        "rel_l2": rel,
        "mse": float(dd / max(1, finite)),
        "rms": float(np.sqrt(dd / max(1, finite))),
        "snr_db": -20 * math.log10(rel) if rel else math.inf,
        "cosine": min(1.0, max(-1.0, cosine)),
        "scale": scale,
        "scale_residual": ratio(left, abs(cosine)) if aa and bb else rel,
    }


def ratio(error: Any, size: Any) -> float:
    """Return error / size, with 0 for 0/0 and inf for x/0."""
    if not error:
        return 0.0
    return float(error / size) if size else math.inf


def by_axis(errors: Any, sizes: Any) -> tuple[float, ...]:
    """Return the relative L2 error of each index of an axis, from squared errors and sizes."""
    if errors.size <= FEW and errors.dtype == np.float64:  # a long double may be beyond what math takes
        return tuple(ratio(math.sqrt(x), math.sqrt(y)) for x, y in zip(errors.tolist(), sizes.tolist(), strict=True))
    with np.errstate(all="ignore"):
        found = np.where(errors == 0, 0.0, np.sqrt(errors) / np.sqrt(sizes)).astype(np.float64)
    return tuple(found.tolist())


def place(flat: int, shape: Sequence[int]) -> Index | None:
    """Return the index of a flat position, None for -1."""
    return None if flat < 0 else unravel(flat, shape)


def nonfinite_side(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Tell on which side one element is NaN or Inf."""
    a, b = (not math.isfinite(x.item()) for x in (actual, expected))
    return "both" if a and b else "actual" if a else "expected"


def bin_values(bins: Counts) -> npt.NDArray[np.float32]:
    """Return the bfloat16 value that each bin stands for."""
    return (bins << 16).astype(np.int32).view(np.float32)


def quantiles(bins: Counts, numbers: Counts, count: int, largest: float, fine: bool) -> list[float]:
    """Return the values at the ranks ``QUANTILES`` of the elements; linear in an octave where no bin is finer."""
    if not bins.size:
        return [0.0] * len(QUANTILES)
    ranks = np.array(QUANTILES) * count
    upto = numbers.cumsum()
    at = upto.searchsorted(ranks)
    found = bin_values(bins[at])
    if not fine:
        found = found * (2 - (upto[at] - ranks) / numbers[at])
    return np.minimum(found.astype(np.float64), largest).tolist()  # type: ignore[no-any-return]


def octaves(bins: Counts, numbers: Counts) -> tuple[tuple[float, int], ...]:
    """Sum the bins by octave; zeros stay apart, at the lowest edge."""
    groups = bins >> 7
    groups[bins == 0] = -1
    firsts = np.concatenate([[0], (groups[1:] != groups[:-1]).nonzero()[0] + 1]) if bins.size else bins
    edges = bin_values(np.maximum(groups[firsts], 0) << 7).tolist()
    return tuple(zip(edges, np.add.reduceat(numbers, firsts).tolist() if bins.size else (), strict=True))
