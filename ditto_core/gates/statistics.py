"""Paired and unpaired tests of right against wrong answers, their power, and the smallest effect that they detect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

WORST_SIGMA = 50.0
"""Standard deviation of right (100) or wrong (0) at an accuracy of one half, in points: TensorRT-LLM's default."""

EXACT_PAIRS = 200
"""Expected pairs that differ, above which the exact sum is slow and its normal limit as good."""


def mcnemar(worse: int, better: int) -> float:
    """Return the one-sided exact p-value of McNemar's test: the engine is no worse than the reference.

    ``worse`` pairs are right on the reference and wrong on the engine, ``better`` the other way round; pairs that agree
    say nothing. P(X >= worse) for X ~ Binomial(worse + better, 1/2). Source: McNemar 1947, in its exact form.
    """
    n = worse + better
    p: float = sum(math.comb(n, k) for k in range(worse, n + 1)) / 2**n
    return p


def sign_flip(differences: Sequence[int]) -> float:
    """Return the one-sided exact p-value that clusters are no worse: McNemar's test where a cluster is one sample.

    ``differences``: worse minus better pairs of each cluster. A healthy engine makes either sign as likely, so the sum
    is compared with all sums of the same numbers under random signs. Source: Fisher's randomization test for pairs.
    """
    chances = np.ones(1)
    for size in map(abs, filter(None, differences)):
        wider = np.zeros(len(chances) + 2 * size)
        wider[: len(chances)] += chances / 2
        wider[2 * size :] += chances / 2
        chances = wider
    middle = len(chances) // 2
    return min(1.0, float(chances[middle + sum(differences) :].sum()))


def mcnemar_power(n: int, drop: float, discordant: float, alpha: float) -> float:
    """Return the probability that :func:`mcnemar` gives p < ``alpha`` on ``n`` pairs.

    ``drop``: loss of accuracy (0..1); ``discordant``: share of pairs that differ, taken as at least ``drop``. The
    number of such pairs is Binomial(n, discordant); each is worse with probability (discordant + drop) / 2 discordant.
    """
    discordant = max(discordant, drop)
    if not 0 < discordant <= 1:
        return 0.0
    worse = (discordant + drop) / (2 * discordant)
    spread = 7 * math.sqrt(n * discordant) + 7
    low, high = max(0, int(n * discordant - spread)), min(n, int(n * discordant + spread))
    return math.fsum(
        binomial(n, pairs, discordant) * tail(pairs, critical(pairs, alpha), worse) for pairs in range(low, high + 1)
    )


def detectable_drop(n: int, *, alpha: float, beta: float, discordant: float) -> float | None:
    """Return the smallest drop of accuracy (0..1) that McNemar's test finds with probability 1 - ``beta``.

    Exact to 1e-4 up to ``EXACT_PAIRS`` expected pairs that differ; beyond, the root of Miettinen's (1968) formula
    n drop^2 = (z_alpha sqrt(discordant) + z_beta sqrt(discordant - drop^2))^2. None when even a drop from all right to
    all wrong would not be found.
    """
    if n * discordant > EXACT_PAIRS:
        return smallest(lambda drop: miettinen_pairs(drop, max(discordant, drop), alpha, beta) <= n)
    return smallest(lambda drop: mcnemar_power(n, drop, discordant, alpha) >= 1 - beta)


def miettinen_pairs(drop: float, discordant: float, alpha: float, beta: float) -> float:
    """Return the number of samples at which a drop is found with probability 1 - ``beta``, in the normal limit."""
    z = NormalDist().inv_cdf
    root = z(1 - alpha) * math.sqrt(discordant) + z(1 - beta) * math.sqrt(discordant - drop**2)
    return (root / drop) ** 2


def detectable_mean(n: int, *, sigma: float, alpha: float, beta: float) -> float:
    """Return the smallest mean of ``n`` paired differences of standard deviation ``sigma`` that a one-sided test finds
    with probability 1 - ``beta``, in the normal limit: (z_alpha + z_beta) sigma / sqrt(n).
    """
    z = NormalDist().inv_cdf
    return -(z(alpha) + z(beta)) * sigma / math.sqrt(n)


def unpaired_threshold(reference: float, n: int, *, alpha: float, sigma: float = WORST_SIGMA) -> float:
    """Return the accuracy (points, 0..100) below which TensorRT-LLM's accuracy test fails.

    One-sided two-sample z-test, as if both sides saw samples of their own: reference + z_alpha * sqrt(2 sigma^2 / n).
    Source: TensorRT-LLM, tests/integration/defs/accuracy.
    """
    return reference + NormalDist().inv_cdf(alpha) * math.sqrt(2 * sigma**2 / n)


def unpaired_detectable(n: int, *, alpha: float, beta: float, sigma: float = WORST_SIGMA) -> float:
    """Return the smallest drop (points) that TensorRT-LLM's test finds with probability 1 - ``beta``."""
    return detectable_mean(n, sigma=math.sqrt(2) * sigma, alpha=alpha, beta=beta)


@cache
def critical(pairs: int, alpha: float) -> int:
    """Return the least number of worse pairs among ``pairs`` that is significant; ``pairs + 1`` when none is."""
    total, least = 0, pairs + 1
    while total / 2**pairs < alpha:
        least -= 1
        total += math.comb(pairs, least)
    return least + 1


def binomial(n: int, k: int, p: float) -> float:
    """Return the binomial probability of exactly ``k``."""
    if p in (0.0, 1.0):
        return float(k == n * p)
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))


def tail(n: int, k: int, p: float) -> float:
    """Return the binomial probability of ``k`` or more."""
    return math.fsum(binomial(n, i, p) for i in range(k, n + 1))


def smallest(holds: Callable[[float], bool], step: float = 1e-4) -> float | None:
    """Return the least multiple of ``step`` in (0, 1] from which a monotone condition holds, or None."""
    last = round(1 / step)
    high = 1
    while not holds(min(high, last) * step):
        if high >= last:
            return None
        high *= 2
    low, high = high // 2, min(high, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle * step) else (middle, high)
    return high * step
