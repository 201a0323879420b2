"""Paired bootstrap: confidence intervals of sums over sums, and of quantiles, by drawing whole samples anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 22
"""Indices drawn at once (32 MB)."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval; each end is missed with probability ``alpha``."""

    estimate: float
    low: float
    high: float


def ratio_interval(
    values: Sequence[float],
    weights: Sequence[float],
    *,
    alpha: float,
    seed: int,
    resamples: int,
    clusters: Sequence[str] | None = None,
) -> Interval:
    """Return the interval of sum(values) / sum(weights) over samples drawn with replacement.

    ``values`` and ``weights`` hold one number a sample (a difference of the two sides and 1, or a sum over positions
    and their number). Samples of one cluster are drawn together. Each end is the wider of two: studentized, from the
    quantiles of (ratio* - ratio) / se* with the linearized standard error of a ratio, which holds its level on skewed
    differences; and the percentile of ratio*, which holds it on heavy tails. Source: Efron and Tibshirani, An
    Introduction to the Bootstrap, chapters 12.5 and 13.3. NaN or Inf anywhere makes both ends NaN.
    """
    x, w = (by_cluster(np.asarray(part, np.float64), clusters) for part in (values, weights))
    ratio = float(ratios_of(x, w))
    if not (np.isfinite(x).all() and np.isfinite(w).all()):
        return Interval(ratio, float("nan"), float("nan"))
    error = float(standard_error(x, w))
    if error == 0:
        return Interval(ratio, ratio, ratio)
    drawn = [(ratios_of(x[rows], w[rows]), standard_error(x[rows], w[rows])) for rows in draws(len(x), seed, resamples)]
    ratios, errors = (np.concatenate(part) for part in zip(*drawn, strict=True))
    low, high = np.quantile(ratios, [alpha, 1 - alpha])
    above, below = np.quantile(studentized(ratios - ratio, errors), [1 - alpha, alpha])
    return Interval(
        ratio, min(float(low), ratio - float(above) * error), max(float(high), ratio - float(below) * error)
    )


def by_cluster(values: Floats, clusters: Sequence[str] | None) -> Floats:
    """Return one sum a cluster, in the order in which clusters are first met; without clusters the values as are."""
    if clusters is None:
        return values
    numbers = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    sums: Floats = np.zeros(len(numbers))
    np.add.at(sums, [numbers[name] for name in clusters], values)
    return sums


def studentized(moved: Floats, errors: Floats) -> Floats:
    """Return each distance over its standard error. One that has neither says nothing and is left out."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = moved / errors
    finite: Floats = np.clip(t[~np.isnan(t)], -1e6, 1e6)
    return finite


def ratios_of(x: Floats, w: Floats) -> Floats:
    """Return sum(x) / sum(w) along the last axis."""
    ratio: Floats = x.sum(-1) / w.sum(-1)
    return ratio


def standard_error(x: Floats, w: Floats) -> Floats:
    """Return the linearized standard error of sum(x) / sum(w) along the last axis, up to a factor of n alone.

    The studentized interval divides by it and multiplies by it: sqrt(n / (n - 1)) would cancel.
    """
    ratio = ratios_of(x, w)[..., None]
    error: Floats = np.sqrt(np.square(x - ratio * w).sum(-1)) / w.sum(-1)
    return error


def quantile_interval(
    groups: Sequence[Sequence[float]], q: float, *, alpha: float, seed: int, resamples: int
) -> Interval:
    """Return the percentile interval of the ``q`` quantile of all values, drawing whole groups (samples) anew."""
    values = np.concatenate([np.asarray(group, np.float64) for group in groups])
    if not np.isfinite(values).all():
        return Interval(float("nan"), float("nan"), float("nan"))
    order = np.argsort(values, kind="stable")
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[order]
    values = values[order]
    found = [
        weighted_quantile(values, np.bincount(row, minlength=len(groups))[owner], q)
        for rows in draws(len(groups), seed, resamples)
        for row in rows
    ]
    low, high = np.quantile(found, [alpha, 1 - alpha])
    return Interval(weighted_quantile(values, np.ones(len(values), np.int64), q), float(low), float(high))


def weighted_quantile(values: Floats, counts: npt.NDArray[np.int64], q: float) -> float:
    """Return the least of the sorted ``values`` with a share ``q`` of all counts at or below it."""
    total = np.cumsum(counts)
    return float(values[np.searchsorted(total, q * total[-1])])


def draws(n: int, seed: int, resamples: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield blocks [resamples, n] of indices drawn with replacement; the same for the same ``seed``."""
    generator = np.random.default_rng(seed)
    step = max(1, CHUNK // n)
    for start in range(0, resamples, step):
        yield generator.integers(0, n, (min(step, resamples - start), n))
