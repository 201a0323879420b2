"""Bounds with a reason: a multiple of the measured noise floor, a user's rule, or a table by dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ditto_core.errors import UsageError, nearest
from ditto_core.sites import matches

if TYPE_CHECKING:
    from ditto_core.compare.metrics import Metrics

WITHIN, EXPLAINED, DIVERGED = "within", "explained", "diverged"
FACTOR = 4.0

EPSILON: Mapping[str, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
"""Machine epsilon by dtype (distance from 1 to the next number)."""

TABLE: Mapping[str, float] = {
    "float64": 1e-7,
    "float32": 1e-4,
    "float16": 5e-3,
    "bfloat16": 5e-2,
}
"""rel-L2 bounds where no noise floor was measured."""


METRICS = (
    "rel_l2",
    "max_abs",
    "mean_abs",
    "rms",
    "mse",
    "max_rel",
    "mean_rel",
    "max_ulp",
    "mismatched",
    "mismatch_ratio",
    "p50",
    "p90",
    "p99",
    "p999",
    "scale_residual",
)
"""Metrics that a rule may bound from above."""


@dataclass(frozen=True)
class Rule:
    """A user's bound on ``metric`` at the sites that match ``selector`` (at ``step``, where given).

    ``status`` is what exceeding the noise floor but not this bound means: ``within``, or ``explained`` by ``reason``.
    """

    selector: str
    bound: float
    metric: str = "rel_l2"
    step: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            hint = nearest(self.metric, METRICS)
            raise UsageError(f"no tolerance on {self.metric!r} can be set, expected {', '.join(METRICS)}{hint}")

    def applies(self, sites: Sequence[str], step: int) -> bool:
        """Tell whether the rule speaks of a site (by any of its names) at a step."""
        return (self.step is None or self.step == step) and any(matches(self.selector, site) for site in sites)


@dataclass(frozen=True)
class Verdict:
    """What was decided at one site and step, by which rule, with how much room: ``margin`` is value / bound."""

    status: str
    metric: str
    value: float
    bound: float
    rule: str

    @property
    def margin(self) -> float:
        """Return value / bound: above 1 it has diverged."""
        if self.bound:
            return self.value / self.bound
        return math.inf if self.value else 0.0

    @property
    def ok(self) -> bool:
        """Tell whether the site passed."""
        return self.status != DIVERGED

    def __str__(self) -> str:
        sign = "<=" if self.ok else ">"
        return f"{self.metric} {self.value:.1e} {sign} {self.bound:.1e} ({self.rule})"


@dataclass(frozen=True)
class Tolerance:
    """How errors are judged. ``factor`` multiplies the noise floor; ``rules`` override it, later ones first."""

    factor: float = FACTOR
    rules: tuple[Rule, ...] = field(default=())

    @classmethod
    def of(cls, value: Any) -> Tolerance:
        """Build from a tolerance, a factor, or a mapping ``{"factor": 4, "selector": bound | {"bound": …}}``."""
        if isinstance(value, Tolerance):
            return value
        if value is None:
            return cls()
        if isinstance(value, int | float):
            return cls(factor=float(value))
        if not isinstance(value, Mapping):
            raise UsageError(f"a tolerance is a number or a table of selectors, got {type(value).__name__}")
        rules = tuple(parse_rule(selector, bound) for selector, bound in value.items() if selector != "factor")
        return cls(float(value.get("factor", FACTOR)), rules)

    def judge(self, sites: Sequence[str], step: int, metrics: Metrics, dtype: str, floor: float | None) -> Verdict:
        """Judge a site's metrics; ``dtype`` is the engine's, ``floor`` the reference's own rel-L2 error there."""
        for rule in reversed(self.rules):
            if rule.applies(sites, step):
                return self._by_rule(rule, metrics)
        if floor is not None:
            # Rounding alone costs half of epsilon at most; a floor below that was measured where chance was kind.
            base = max(floor, EPSILON[dtype] / 2)
            rule_text = f"{self.factor:g} x noise floor {base:.1e}"
            return decide("rel_l2", metrics.rel_l2, self.factor * base, rule_text)
        return decide("rel_l2", metrics.rel_l2, TABLE[dtype], f"table for {dtype}, no floor measured")

    def _by_rule(self, rule: Rule, metrics: Metrics) -> Verdict:
        value = float(getattr(metrics, rule.metric))
        text = f"rule {rule.selector!r}" + (f": {rule.reason}" if rule.reason else "")
        verdict = decide(rule.metric, value, rule.bound, text)
        if verdict.ok and rule.reason:
            return Verdict(EXPLAINED, *(getattr(verdict, n) for n in ("metric", "value", "bound", "rule")))
        return verdict

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tolerance:
        """Inverse of :meth:`to_json`."""
        return cls(data["factor"], tuple(Rule(**rule) for rule in data["rules"]))


def decide(metric: str, value: float, bound: float, rule: str) -> Verdict:
    """Compare a value with its bound; NaN never passes."""
    return Verdict(WITHIN if value <= bound else DIVERGED, metric, value, bound, rule)


def parse_rule(selector: str, value: Any) -> Rule:
    """Read one rule of a table: a number (rel-L2 bound), or a table with the fields of :class:`Rule`."""
    if isinstance(value, int | float):
        return Rule(selector, float(value))
    if not isinstance(value, Mapping) or "bound" not in value:
        raise UsageError(f"tolerance for {selector!r} is {value!r}, expected a number or a table with 'bound'")
    known = [name for name in Rule.__dataclass_fields__ if name != "selector"]
    for name in value:
        if name not in known:
            raise UsageError(f"tolerance for {selector!r} has no field {name!r}{nearest(name, known)}")
    return Rule(selector, **value)
