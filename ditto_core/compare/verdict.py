"""What was decided about a number: its bound, the rule that set it, and whether it passed."""

from __future__ import annotations

import math
from dataclasses import dataclass

WITHIN, EXPLAINED, DIVERGED, INCONCLUSIVE = "within", "explained", "diverged", "inconclusive"
"""``inconclusive``: nothing can be said, for the reference gives no usable bound; ``rule`` has the reason."""


@dataclass(frozen=True)
class Verdict:
    """What was decided at one site and step, by which rule, with how much room: ``margin`` is value / bound.

    ``at_least``: the bound is the least that passes, and the margin is bound / value.
    """

    status: str
    metric: str
    value: float
    bound: float
    rule: str
    at_least: bool = False

    @property
    def margin(self) -> float:
        """Return value / bound: above 1 it has diverged. A bound of infinity leaves room for anything."""
        if self.at_least:
            room = 0.0 if self.value >= self.bound else math.inf
            return self.bound / self.value if 0 < self.value < math.inf else room
        if self.bound == math.inf:
            return 0.0
        if self.bound:
            return self.value / self.bound
        return math.inf if self.value else 0.0

    @property
    def ok(self) -> bool:
        """Tell whether the site lets a run pass: an inner site that could not be judged does."""
        return self.status != DIVERGED

    @property
    def judged(self) -> bool:
        """Tell whether the number was compared with a bound that means something."""
        return self.status != INCONCLUSIVE

    def __str__(self) -> str:
        if not self.judged:
            return f"{self.metric} {self.value:.1e} not judged ({self.rule})"
        if self.at_least:
            sign = ">=" if self.ok else "<"
            return f"{self.metric} {self.value:.8g} {sign} {self.bound:.8g} ({self.rule})"
        sign = "<=" if self.ok else ">"
        texts = [f"{number:.1e}" for number in (self.value, self.bound)]
        if texts[0] == texts[1] and not self.ok:  # by a hair: more digits show which is larger
            texts = [f"{number:.8g}" for number in (self.value, self.bound)]
        return f"{self.metric} {texts[0]} {sign} {texts[1]} ({self.rule})"


UNJUDGED = Verdict(WITHIN, "rel_l2", 0.0, 0.0, "not judged yet")
"""Stands in a result until all of a run's results are judged together."""


def decide(metric: str, value: float, bound: float, rule: str, *, at_least: bool = False) -> Verdict:
    """Compare a value with its bound; NaN never passes."""
    passes = value >= bound if at_least else value <= bound
    return Verdict(WITHIN if passes else DIVERGED, metric, value, bound, rule, at_least)
