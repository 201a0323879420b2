"""A user's rule: a bound on a metric at the sites that a selector matches, and its form in a table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from ditto_core.compare._record import decode, encode
from ditto_core.compare.verdict import DIVERGED, EXPLAINED, Verdict, decide
from ditto_core.errors import UsageError, nearest
from ditto_core.sites import matches

if TYPE_CHECKING:
    from ditto_core.compare.metrics import Metrics

METRICS = (
    *("rel_l2", "max_abs", "mean_abs", "rms", "mse", "max_rel", "mean_rel", "max_ulp"),
    *("mismatched", "mismatch_ratio", "p50", "p90", "p99", "p999", "scale_residual"),
)
"""Metrics of a tensor that a rule may bound from above."""

QUALITIES = ("cosine", "snr_db", "psnr_db")
"""Metrics of a tensor that are better the larger they are: a rule bounds them from below."""

REQUESTED = re.compile(r"(?P<kind>abs|rel)_p(?P<percent>\d+(?:\.\d+)?)|moved|outside_both")
"""Metrics that are measured only where a rule names them; :mod:`ditto_core.compare.requested` has them."""

FUNCTION = re.compile(r"[\w.]+:[\w.<>]+")
"""``package.module:function``, as :func:`name_of` writes it."""

METRIC_GROUP = "ditto_core.metrics"
"""Entry points of this group are metrics ``(actual, expected) -> float`` and preparations ``tensor -> tensor``."""

LOGITS_METRICS = ("kl_mean", "kl_p99", "kl_max", "top1_disagreement")
"""Metrics of a step's logits that a rule may bound from above: KL in nats, and the share of other greedy tokens."""

FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("step", int, "a whole number of 0 or more"),
    ("rtol", int | float, "a number of 0 or more"),
    ("atol", int | float, "a number of 0 or more"),
    ("reason", str, "a text"),
    ("at_least", bool, "a number, in place of 'bound'"),
    ("prepare", str, "a function or its name"),
)
"""What the optional fields of a rule may be."""

INTERNAL = ("selector", "required", "also", "functions")
"""Fields of a rule that are not written in its table."""


@dataclass(frozen=True)
class Rule:
    """A user's bound on ``metric`` at the sites that match ``selector`` (at ``step``, where given).

    ``rtol`` and ``atol`` set the element-wise tolerance behind ``mismatched`` and ``mismatch_ratio``. A rule with a
    ``reason`` makes what it allows ``explained``, not ``within``. ``required``: a selector that matches no site is an
    error; the rules of a whole project are not, for they speak of several models. ``also``: the rule holds beside those
    before it in a list of bounds for one selector.

    ``at_least``: the bound is the least that passes. ``prepare`` names a function that both tensors pass through before
    they are measured. It and ``metric`` may be yours: a name of the entry-point group ``ditto_core.metrics``, or
    ``package.module:function``; ``functions`` holds those that were given as objects, by such a name.
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
    at_least: bool = False
    prepare: str = ""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        known = METRICS + QUALITIES + LOGITS_METRICS
        if not is_metric(self.metric):
            hint = nearest(self.metric, known)
            raise UsageError(
                f"no tolerance on {self.metric!r} can be set, expected {', '.join(known)}, abs_pN or rel_pN (exact "
                f"percentiles), moved, outside_both, or a function of yours such as 'package.module:function'{hint}"
            )
        if not self.bound >= 0:
            raise UsageError(f"tolerance for {self.selector!r} is {self.bound}, expected a number of 0 or more")
        if self.metric in ("mismatch_ratio", "top1_disagreement", "cosine") and 1 < self.bound < math.inf:
            raise UsageError(f"tolerance for {self.selector!r} is {self.bound}, expected a share from 0 to 1")
        better = "larger" if self.metric in QUALITIES else "smaller" if self.metric in known else ""
        if better and self.at_least != (better == "larger"):
            key = "at_least" if better == "larger" else "bound"
            raise UsageError(f"tolerance for {self.selector!r}: {self.metric} is better {better}, expected {key!r}")
        if self.prepare and self.of_logits:
            raise UsageError(f"tolerance for {self.selector!r}: {self.metric} takes no 'prepare', it is of the logits")
        for name, kind, expected in FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            wrong = isinstance(value, bool) != (kind is bool) or not isinstance(value, kind)
            if wrong or (kind is not str and not value >= 0):
                raise UsageError(f"tolerance for {self.selector!r} has {name} {value!r}, expected {expected}")

    @property
    def of_logits(self) -> bool:
        """Tell whether the rule is about logits as such, not about the tensor that holds them."""
        return self.metric in LOGITS_METRICS

    @property
    def requested(self) -> str:
        """The name of what has to be measured for this rule alone; empty where it is measured anyway."""
        if self.prepare:
            return f"{self.metric} of {self.prepare}"
        return "" if self.metric in METRICS + QUALITIES + LOGITS_METRICS else self.metric

    @property
    def text(self) -> str:
        """What a verdict says of the rule."""
        return f"rule {self.selector!r}" + (f": {self.reason}" if self.reason else "")

    def decide(self, value: float) -> Verdict:
        """Judge a value of the metric; with a reason, what passes is explained."""
        verdict = decide(self.requested or self.metric, value, self.bound, self.text, at_least=self.at_least)
        return replace(verdict, status=EXPLAINED) if verdict.ok and self.reason else verdict

    def judge(self, metrics: Metrics) -> Verdict:
        """Judge the metrics of a tensor. Raises :class:`UsageError` where what the rule bounds was not measured.

        Maxima and means leave NaN and Inf out. So an unequal one breaks every bound below infinity, except that NaN on
        both sides is an element like others where elements are counted.
        """
        counted = self.metric in ("mismatched", "mismatch_ratio")
        unequal = metrics.nan_mismatch + metrics.inf_mismatch if counted else metrics.nonfinite_mismatch
        if unequal and (self.at_least or self.bound < math.inf):
            text = f"{self.text}; {unequal} NaN or Inf are never allowed"
            worst = -math.inf if self.at_least else math.inf
            return Verdict(DIVERGED, self.requested or self.metric, worst, self.bound, text, self.at_least)
        if not self.requested:
            return self.decide(float(getattr(metrics, self.metric)))
        measured = dict(metrics.requested)
        if self.requested not in measured:
            raise UsageError(
                f"{self.requested} was not measured for {self.selector!r}: compare the tensors again with it"
            )
        return self.decide(measured[self.requested])

    def applies(self, sites: Sequence[str], step: int) -> bool:
        """Tell whether the rule speaks of a site (by any of its names) at a step."""
        return (self.step is None or self.step == step) and any(matches(self.selector, site) for site in sites)

    def to_json(self) -> dict[str, Any]:
        """Return the fields; functions that were given as objects are left out, their names stay."""
        found = asdict(replace(self, functions={}))
        return {name: encode(value) for name, value in found.items() if name != "functions"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rule:
        """Inverse of :meth:`to_json`, in which an infinite number is a text."""
        numbers = ("bound", "rtol", "atol")
        return cls(**{name: decode(value) if name in numbers else value for name, value in data.items()})


def parse_rules(selector: str, value: Any) -> Iterator[Rule]:
    """Read the bounds of one selector: a list, whose bounds hold beside each other, or one as :func:`parse_rule` reads
    it. Raises :class:`UsageError`.
    """
    if not isinstance(selector, str):
        raise UsageError(f"tolerance has {selector!r}, expected a selector such as 'model.layers.*'")
    bounds = value if isinstance(value, list | tuple) else [value]
    if not bounds:
        raise UsageError(f"tolerance for {selector!r} is an empty list, expected bounds")
    for i, bound in enumerate(bounds):
        yield replace(parse_rule(selector, bound), also=i > 0)


def parse_rule(selector: str, value: Any) -> Rule:
    """Read one rule of a table: a number (rel-L2 bound), or a table with the fields of :class:`Rule`.

    ``max_mismatch_ratio`` is short for ``metric = "mismatch_ratio"`` with that bound; ``at_least`` takes the place of
    ``bound`` where more is better. ``metric`` and ``prepare`` may be functions.
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
    if "at_least" in fields:
        if "bound" in fields:
            raise UsageError(f"tolerance for {selector!r} has bound and at_least, expected one")
        fields |= {"bound": fields["at_least"], "at_least": True}
    functions = {name_of(fields[key]): fields[key] for key in ("metric", "prepare") if callable(fields.get(key))}
    fields |= {key: name_of(fields[key]) for key in ("metric", "prepare") if callable(fields.get(key))}
    known = [name for name in Rule.__dataclass_fields__ if name not in INTERNAL]
    for name in fields:
        if name not in known:
            raise UsageError(f"tolerance for {selector!r} has no field {name!r}{nearest(name, known)}")
    if isinstance(fields.get("bound"), bool) or not isinstance(fields.get("bound"), int | float):
        raise UsageError(f"tolerance for {selector!r} has no 'bound', expected a number")
    return Rule(selector, **fields, functions=functions)


def name_of(function: Any) -> str:
    """Return the name under which a function can be found again: ``module:function``."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


def is_metric(name: Any) -> bool:
    """Tell whether a rule may bound a metric of this name; one of your module is looked up when it is measured."""
    if not isinstance(name, str):
        return False
    found = REQUESTED.fullmatch(name)
    if found:
        return found["percent"] is None or float(found["percent"]) <= 100
    known = name in METRICS + QUALITIES + LOGITS_METRICS or FUNCTION.fullmatch(name)
    return bool(known) or name in entry_points(group=METRIC_GROUP).names
