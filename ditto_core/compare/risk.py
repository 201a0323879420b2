"""How often a healthy engine is flagged: from how many results healthy engines were measured on. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from ditto_core.compare.result import SiteResult
from ditto_core.compare.tolerance import FACTOR

MEASURED, BEYOND = 47_877, 2
"""Results of healthy engines that were judged by their noise floor (rows and elements too), and how many of them failed
a run. benchmarks/tolerance.md has the runs."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Risk:
    """The chance that a healthy engine fails a run of so many ``results``, at the usual factor.

    ``expected`` is results x the rate that was measured; ``most`` takes the rate's upper bound at 95 % confidence. By
    Boole's inequality neither assumes that results are independent: it holds for engines like those that were measured.
    """

    results: int

    @property
    def expected(self) -> float:
        """Results x measured rate, at most 1."""
        return min(1.0, self.results * BEYOND / MEASURED)

    @property
    def most(self) -> float:
        """Results x the rate's upper bound, at most 1."""
        return min(1.0, self.results * poisson_upper(BEYOND, CONFIDENCE) / MEASURED)

    def __str__(self) -> str:
        count = f"{self.results} result{'s' * (self.results != 1)} judged by noise floor"
        return f"false-alarm risk: {self.expected:.2g} for a healthy engine, at most {self.most:.2g} ({count})"


def risk_of(results: Iterable[SiteResult], factor: float) -> Risk | None:
    """Return the risk of a run; None where no result was judged by a floor, or by a factor below the measured one."""
    count = sum(by_floor(result) for result in results)
    return Risk(count) if count and factor >= FACTOR else None


def by_floor(result: SiteResult) -> bool:
    """Tell whether a result was judged by its noise floor, not by a rule of the user's."""
    return result.floor is not None and result.verdict.judged and not result.verdict.rule.startswith("rule ")


def poisson_upper(count: int, confidence: float) -> float:
    """Return the upper bound, at one-sided ``confidence``, of the mean of a Poisson variable that was ``count``.

    The root of P(X <= count) = 1 - confidence: 3.00 for 0, 4.74 for 1.
    """
    low, high = float(count), count + 3 + 5 * NormalDist().inv_cdf(confidence) * math.sqrt(count + 1)
    for _ in range(60):
        middle = (low + high) / 2
        chance = sum(math.exp(-middle) * middle**k / math.factorial(k) for k in range(count + 1))
        low, high = (middle, high) if chance > 1 - confidence else (low, middle)
    return high
