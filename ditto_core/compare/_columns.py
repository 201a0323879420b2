"""The metrics of many pairs at once: from columns of sums to :class:`Metrics`.

What :mod:`ditto_core.compare._assemble` works out for one pair, by the same formulas. Each number is a column with an
entry for each pair, so that the arithmetic costs the same for one pair and for hundreds. Only for pairs of floats
without NaN and Inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from ditto_core.compare._accumulate import Rules
from ditto_core.compare._arithmetic import Counts
from ditto_core.compare._assemble import QUANTILES, bin_values
from ditto_core.compare._blocks import Floats
from ditto_core.compare._record import Index
from ditto_core.compare.ulp import spacing

BINS = 257
"""Columns of a histogram: zeros, then the octaves by their biased exponent in bfloat16."""

LOWEST = np.concatenate([[0, 1], np.arange(1, BINS - 1) << 7])
EDGES = bin_values(np.concatenate([[0], np.arange(BINS - 1) << 7])).astype(np.float64)
"""The lower edge of each octave; what is below the first is no more than its bfloat16 subnormals."""

COPIED = ("count", "max_abs", "max_rel", "mismatched", "max_actual", "max_expected")
NONFINITE = (
    *("nan_actual", "nan_expected", "nan_mismatch", "inf_actual", "inf_expected", "inf_mismatch"),
    "nonfinite_mismatch",
)
ABSENT: dict[str, Any] = {**dict.fromkeys(NONFINITE, 0), "first_nonfinite": None, "requested": ()}
"""What has one value in all of these pairs."""

AT = ("max_abs_at", "first_mismatch", "worst_mismatch")
PLACES = ("max_abs_index", "max_abs_actual", "max_abs_expected", *AT[1:])
OF_AXES = ("by_row", "by_position", "by_head")
NORMS = ("rel_l2", "mse", "rms", "snr_db", "cosine", "scale", "scale_residual")
RANKS = ("p50", "p90", "p99", "p999")


class Columns:
    """The metrics of pairs of one dtype a side: a column with an entry for each pair, worked out when first asked for.

    ``found``: columns by the names of :class:`~ditto_core.compare._accumulate.Accumulator`, with ``difference``,
    ``actual``, ``expected`` and ``product``, and both values at the largest error. ``octaves`` [pairs, 256]: the errors
    that are not 0. ``shapes``: those of groups of pairs and how many are in each; ``dtype`` is the engine's.
    ``splits`` returns the errors by axis of each pair. ``quantiles`` [4, pairs]: known better than by octave.
    """

    def __init__(
        self,
        found: dict[str, Any],
        octaves: Counts,
        shapes: Sequence[tuple[torch.Size, int]],
        dtype: torch.dtype,
        rules: Sequence[Rules],
        splits: Callable[[], list[dict[str, tuple[float, ...]]]],
        quantiles: Floats | None = None,
    ) -> None:
        self._found, self._octaves, self._shapes, self._dtype = found, octaves.astype(np.int32), shapes, dtype
        self._rules, self._splits, self._quantiles = rules, splits, quantiles
        self._known: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> list[Any]:
        """Return the column of a field of :class:`Metrics`."""
        if name not in self._known:
            with np.errstate(all="ignore"):
                self._known |= self._part(name)
        return self._known[name]

    def _part(self, name: str) -> dict[str, list[Any]]:
        """Work out a column, and those that cost no more beside it."""
        if name in PLACES:
            return indices(self._found, self._shapes)
        if name in OF_AXES:
            split = self._splits()
            return {axis: [each.get(axis, ()) for each in split] for axis in OF_AXES}
        if name == "histogram":
            return {name: histograms(self._bins())}
        if name in RANKS:
            known = self._quantiles
            if known is None:
                known = quantiles_of(self._bins(), self._found["count"], self._found["max_abs"])
            return dict(zip(RANKS, known.tolist(), strict=True))
        if name in ABSENT:
            return {name: [ABSENT[name]] * len(self._rules)}
        numbers = norms(self._found) if name in NORMS else numbers_of(self._found, self._dtype, self._rules)
        return {number: column.tolist() for number, column in numbers.items()}

    def _bins(self) -> Counts:
        return np.concatenate([(self._found["count"] - self._octaves.sum(1))[:, None], self._octaves], 1)


def numbers_of(found: dict[str, Any], dtype: torch.dtype, rules: Sequence[Rules]) -> dict[str, Any]:
    """Return the other columns that are one number a pair; ``dtype`` is the engine's."""
    count = np.maximum(1, found["count"])
    there = found["count"] > 0
    bounds = np.array([(each.rtol, each.atol) for each in rules])
    return {
        **{name: found[name] for name in COPIED},
        "mean_abs": found["abs_sum"] / count,
        "mean_rel": found["rel_sum"] / np.maximum(1, found["rel_count"]),
        "max_ulp": found["max_steps"] / rules[0].place.eps,
        "mismatch_ratio": found["mismatched"] / count,
        "all_zero_actual": there & (found["max_actual"] == 0),
        "all_zero_expected": there & (found["max_expected"] == 0),
        "headroom": found["max_actual"] / spacing(dtype).largest,
        "rtol": bounds[:, 0],
        "atol": bounds[:, 1],
    }


def norms(found: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that are made of sums of squares: :data:`NORMS`."""
    dd, aa, bb, ab = (found[name] for name in ("difference", "actual", "expected", "product"))
    some, none, norm = (aa > 0) & (bb > 0), (aa == 0) & (bb == 0), np.sqrt(aa) * np.sqrt(bb)
    rel, mse = ratio(np.sqrt(dd), np.sqrt(bb)), dd / np.maximum(1, found["count"])
    cosine = np.where(some, ab / np.where(some, norm, 1), none)
    left = np.sqrt(np.maximum(0, 1 - cosine * cosine))
    return {
        "rel_l2": rel,
        "mse": mse,
        "rms": np.sqrt(mse),
        "snr_db": -20 * np.log10(rel),
        "cosine": np.clip(cosine, -1, 1),
        "scale": np.where(bb > 0, ab / np.where(bb > 0, bb, 1), np.where(aa == 0, 1.0, math.inf)),
        "scale_residual": np.where(some, ratio(left, np.abs(cosine)), rel),
    }


def ratio(error: Any, size: Any) -> Any:
    """Return error / size, with 0 for 0/0 and inf for x/0."""
    return np.where(error == 0, 0.0, error / size)


def quantiles_of(bins: Counts, count: Counts, largest: Floats) -> Floats:
    """Return the errors at the ranks ``QUANTILES`` [4, pairs] from histograms, linear in an octave."""
    upto = bins.cumsum(1)
    ranks = np.array(QUANTILES)[:, None] * count
    at = np.stack([(upto < rank[:, None]).sum(1) for rank in ranks])
    pairs = np.arange(len(bins))
    inside = (upto[pairs, at] - ranks) / np.maximum(1, bins[pairs, at])
    found: Floats = np.minimum(bin_values(LOWEST)[at].astype(np.float64) * (2 - inside), largest)
    return found


def histograms(bins: Counts) -> list[tuple[tuple[float, int], ...]]:
    """Return the lower edge and the count of each bin that holds elements, for each pair."""
    pairs, columns = bins.nonzero()
    filled = list(zip(EDGES[columns].tolist(), bins[pairs, columns].tolist(), strict=True))
    ends = np.bincount(pairs, minlength=len(bins)).cumsum().tolist()
    return [tuple(filled[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def indices(found: dict[str, Any], shapes: Sequence[tuple[torch.Size, int]]) -> dict[str, list[Any]]:
    """Return the columns that are places, and both values at the largest error."""
    flat = np.stack([found[name] for name in AT])
    columns: dict[str, list[Any]] = {name: [] for name in AT}
    start = 0
    for shape, pairs in shapes:
        part = iter(unravelled(flat[:, start : start + pairs].reshape(-1), shape))
        start += pairs
        for name in AT:
            columns[name] += islice(part, pairs)
    at = columns["max_abs_index"] = columns.pop("max_abs_at")
    columns["max_abs_actual"], columns["max_abs_expected"] = (
        [None if index is None else value for index, value in zip(at, found[name].tolist(), strict=True)]
        for name in ("actual_there", "expected_there")
    )
    return columns


def unravelled(flat: Counts, shape: Sequence[int]) -> list[Index | None]:
    """Return the indices of flat positions, None for -1."""
    if not shape:
        return [None if at < 0 else () for at in flat.tolist()]
    there = (flat >= 0).tolist()
    found = zip(*(axis.tolist() for axis in np.unravel_index(np.maximum(flat, 0), tuple(shape))), strict=True)
    return [index if known else None for index, known in zip(found, there, strict=True)]
