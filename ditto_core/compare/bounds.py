"""A user's rule: a bound on a metric at the sites that a selector chooses, and how it is written in a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ditto_core.compare.verdict import EXPLAINED, Verdict, decide
from ditto_core.errors import UsageError, nearest
from ditto_core.sites import matches

METRICS = (
    *("rel_l2", "max_abs", "mean_abs", "rms", "mse", "max_rel", "mean_rel", "max_ulp"),
    *("mismatched", "mismatch_ratio", "p50", "p90", "p99", "p999", "scale_residual"),
)
"""Metrics of a tensor that a rule may bound from above."""

LOGITS_METRICS = ("kl_mean", "kl_p99", "kl_max", "top1_disagreement")
"""Metrics of a step's logits that a rule may bound from above: KL in nats, and the share of other greedy tokens."""

FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("step", int, "a whole number of 0 or more"),
    ("rtol", int | float, "a number of 0 or more"),
    ("atol", int | float, "a number of 0 or more"),
    ("reason", str, "a text"),
)
"""What the optional fields of a rule may be."""

INTERNAL = ("selector", "required", "also")
"""Fields of a rule that are not written in its table."""


@dataclass(frozen=True)
class Rule:
    """A user's bound on ``metric`` at the sites that match ``selector`` (at ``step``, where given).

    ``rtol`` and ``atol`` set the element-wise tolerance behind ``mismatched`` and ``mismatch_ratio``. A rule with a
    ``reason`` makes what it allows ``explained``, not ``within``. ``required``: a selector that matches no site is an
    error; the rules of a whole project are not, for they speak of several models. ``also``: the rule holds beside those
    before it in a list of bounds for one selector.
    """

    selector: str
    bound: float
    metric: str = "rel_l2"
    step: int | None = None
    reason: str = ""
    rtol: float | None = None
    atol: float | None = None
    required: bool = True
    also: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        known = METRICS + LOGITS_METRICS
        if self.metric not in known:
            hint = nearest(self.metric, known)
            raise UsageError(f"no tolerance on {self.metric!r} can be set, expected {', '.join(known)}{hint}")
        if not self.bound >= 0:
            raise UsageError(f"tolerance for {self.selector!r} is {self.bound}, expected a number of 0 or more")
        if self.metric in ("mismatch_ratio", "top1_disagreement") and 1 < self.bound < math.inf:
            raise UsageError(f"tolerance for {self.selector!r} is {self.bound}, expected a share from 0 to 1")
        for name, kind, expected in FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or (kind is not str and not value >= 0):
                raise UsageError(f"tolerance for {self.selector!r} has {name} {value!r}, expected {expected}")

    @property
    def of_logits(self) -> bool:
        """Tell whether the rule is about logits as such, not about the tensor that holds them."""
        return self.metric in LOGITS_METRICS

    @property
    def text(self) -> str:
        """What a verdict says of the rule."""
        return f"rule {self.selector!r}" + (f": {self.reason}" if self.reason else "")

    def decide(self, value: float) -> Verdict:
        """Judge a value of the metric; with a reason, what passes is explained."""
        verdict = decide(self.metric, value, self.bound, self.text)
        return replace(verdict, status=EXPLAINED) if verdict.ok and self.reason else verdict

    def applies(self, sites: Sequence[str], step: int) -> bool:
        """Tell whether the rule speaks of a site (by any of its names) at a step."""
        return (self.step is None or self.step == step) and any(matches(self.selector, site) for site in sites)


def parse_rules(selector: str, value: Any) -> Iterator[Rule]:
    """Read the bounds of one selector: a list, whose bounds hold beside each other, or one as :func:`parse_rule` reads
    it. Raises :class:`UsageError`.
    """
    bounds = value if isinstance(value, list | tuple) else [value]
    if not bounds:
        raise UsageError(f"tolerance for {selector!r} is an empty list, expected bounds")
    for i, bound in enumerate(bounds):
        yield replace(parse_rule(selector, bound), also=i > 0)


def parse_rule(selector: str, value: Any) -> Rule:
    """Read one rule of a table: a number (rel-L2 bound), or a table with the fields of :class:`Rule`.

    ``max_mismatch_ratio`` is short for ``metric = "mismatch_ratio"`` with that bound.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Rule(selector, float(value))
    if not isinstance(value, Mapping):
        raise UsageError(f"tolerance for {selector!r} is {value!r}, expected a number or a table with 'bound'")
    fields = dict(value)
    if "max_mismatch_ratio" in fields:
        for other in ("bound", "metric"):
            if other in fields:
                raise UsageError(f"tolerance for {selector!r} has max_mismatch_ratio and {other}, expected one")
        fields |= {"bound": fields.pop("max_mismatch_ratio"), "metric": "mismatch_ratio"}
    known = [name for name in Rule.__dataclass_fields__ if name not in INTERNAL]
    for name in fields:
        if name not in known:
            raise UsageError(f"tolerance for {selector!r} has no field {name!r}{nearest(name, known)}")
    if isinstance(fields.get("bound"), bool) or not isinstance(fields.get("bound"), int | float):
        raise UsageError(f"tolerance for {selector!r} has no 'bound', expected a number")
    return Rule(selector, **fields)
