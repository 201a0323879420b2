"""Bounds with a reason: a multiple of the measured noise floor, a user's rule, or a table by dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ditto_core.compare.bounds import Rule, parse_rules
from ditto_core.compare.row_error import RowError, row_factor
from ditto_core.compare.verdict import DIVERGED, EXPLAINED, INCONCLUSIVE, WITHIN, Verdict, decide
from ditto_core.errors import SelectorError, UsageError
from ditto_core.sites import matches, no_match

if TYPE_CHECKING:
    from ditto_core.compare.metrics import Metrics
    from ditto_core.session import KernelProperty


FACTOR = 4.0
"""How many times the noise floor a healthy engine may show; benchmarks/tolerance.md has the measurement."""

CEILING = 0.5
"""A bound on rel-L2 must be smaller: zeros have 1, a tensor scaled by 2 too, so half of that still tells them apart.

Healthy floors are far below ``CEILING / FACTOR``; docs/tolerances.md has the measurement.
"""

LUCK = 16.0
"""Margin beyond which no floor is too small by chance: the spread of a floor's samples. So large an error is no
rounding, and it recovers nowhere."""

FEW = 32
"""Below this many elements the factor is widened."""

SETTINGS = ("factor", "finite")
"""Keys of a table of tolerances that are no selectors."""

NONFINITE = "nonfinite"
"""What is counted where NaN and Inf fail on both sides."""

EMPTY = "it has no element that was compared"
"""Why a tensor is not judged that is empty, or of which everything was left out."""

EPSILON: Mapping[str, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
}
"""Machine epsilon by dtype (distance from 1 to the next number)."""

TABLE: Mapping[str, float] = {
    "float64": 1e-12,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 8e-2,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
}
"""rel-L2 bounds of accumulated error where no noise floor was measured: about ten times the floors of real models, and
half a step of the 8-bit floats, the most by which rounding alone may move an element."""

ROW_TABLE = 10.0
"""How many times the table's bound one row may have."""

INTEGERS = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float8_e8m0fnu")
"""Dtypes of tensors (token ids, masks) that are equal or not: one id beside another is no small error, and neither is
one step of a scale that is a power of two (float8_e8m0fnu). As the dtype of an engine, ``int8`` is a quantization
instead."""

QUANTIZED: Mapping[str, tuple[float, float]] = {
    "int8": (0.0014, 0.95),
    "q6": (0.0055, 0.95),
    "q5": (0.011, 0.93),
    "int4": (0.043, 0.89),
    "q4": (0.043, 0.89),
}
"""Bounds on mean KL (nats) and top-1 agreement of quantized engines: llama.cpp's published measurements of healthy
quantizations (pull requests 6936 and 12557). Their single layers are not judged."""


def quantized_bounds(dtype: str) -> tuple[float, float] | None:
    """Return the bounds on mean KL and top-1 agreement of a quantized engine's logits, None for a dtype of floats.

    ``dtype`` is what :attr:`~ditto_core.session.SessionInfo.judged_as` says. A quantization that the table lacks must
    be as close as ``int8``, the strictest.
    """
    return None if dtype in EPSILON else QUANTIZED.get(dtype, QUANTIZED["int8"])


@dataclass(frozen=True)
class Tolerance:
    """How errors are judged. ``factor`` multiplies the noise floor; ``rules`` override it, later ones first.

    ``allclose``: where no rule decides, every element has to be within its ``rtol`` and ``atol``, whatever the floor.
    ``finite``: a NaN or Inf fails, though the other side has it too.
    """

    factor: float = FACTOR
    rules: tuple[Rule, ...] = field(default=())
    allclose: bool = False
    finite: bool = False

    @classmethod
    def of(cls, value: Any) -> Tolerance:
        """Build from a tolerance, a factor, or a mapping ``{"factor": 4, "finite": True, "selector": bound |
        {"bound": …}}``, where a selector may have a list of bounds."""
        if isinstance(value, Tolerance):
            return value
        if value is None:
            return cls()
        if isinstance(value, int | float):
            return cls(factor=positive(value))
        if not isinstance(value, Mapping):
            raise UsageError(f"a tolerance is a number or a table of selectors, got {type(value).__name__}")
        rules = (rule for name, bounds in value.items() if name not in SETTINGS for rule in parse_rules(name, bounds))
        finite = value.get("finite", False)
        if not isinstance(finite, bool):
            raise UsageError(f"tolerance has finite {finite!r}, expected True or False")
        return cls(positive(value.get("factor", FACTOR)), tuple(rules), finite=finite)

    def over(self, other: Tolerance) -> Tolerance:
        """Return both sets of rules, these overriding ``other``'s, with this factor unless it is the default."""
        factor = self.factor if self.factor != FACTOR else other.factor
        strict = self.allclose or other.allclose, self.finite or other.finite
        return Tolerance(factor, (*other.rules, *self.rules), *strict)

    def optional(self) -> Tolerance:
        """Return the same rules, none of which must be about a site."""
        return replace(self, rules=tuple(replace(rule, required=False) for rule in self.rules))

    def rules_for(self, sites: Sequence[str], step: int) -> tuple[Rule, ...]:
        """Return the rules that decide at a site and step: the last that applies to its tensor, and those on other
        metrics that stand before it in one list of bounds.
        """
        found: dict[str, Rule] = {}
        selector = None
        for rule in reversed(self.rules):
            if selector not in (None, rule.selector):
                continue
            if not rule.of_logits and rule.applies(sites, step):
                found.setdefault(rule.requested or rule.metric, rule)
                selector = rule.selector
            if found and not rule.also:
                break
        return tuple(found.values())

    def elementwise(self, sites: Sequence[str], step: int) -> tuple[float | None, float | None]:
        """Return the ``rtol`` and ``atol`` that the rules set at a site and step, None where they do not."""
        rules = self.rules_for(sites, step)
        rtol = next((rule.rtol for rule in rules if rule.rtol is not None), None)
        return rtol, next((rule.atol for rule in rules if rule.atol is not None), None)

    def requests(self, names: Sequence[str], step: int) -> list[Rule]:
        """Return the rules that may decide at a step by what is measured for them alone."""
        return [rule for rule in self.rules if rule.requested and rule.applies(names, step)]

    def logits_rules(self, names: Sequence[str], step: int) -> dict[str, Rule]:
        """Return the rules that decide on the logits at a step, by metric; ``names`` is what the logits are called."""
        return {rule.metric: rule for rule in self.rules if rule.of_logits and rule.applies(names, step)}

    def on_logits(self) -> Tolerance:
        """Return the rules about logits alone."""
        return Tolerance(rules=tuple(rule for rule in self.rules if rule.of_logits))

    def check(self, sites: Iterable[str], logits: Sequence[str] = ()) -> None:
        """Raise :class:`~ditto_core.errors.SelectorError` for a required rule that speaks of none of ``sites``, or, if
        it is about logits, of none of their names."""
        tensors = list(sites)
        for rule in self.rules:
            names = list(logits) if rule.of_logits else tensors
            if rule.required and not any(matches(rule.selector, name) for name in names):
                raise SelectorError(f"tolerance: {no_match(rule.selector, names)}")

    def idle(self, steps: Iterable[int]) -> tuple[str, ...]:
        """Return what to say of required rules about a step that is none of ``steps``, those that were compared."""
        known = set(steps)
        idle = [rule for rule in self.rules if rule.required and rule.step is not None and rule.step not in known]
        last = f"the last step compared is {max(known)}" if known else "no step was compared"
        return tuple(f"tolerance for {rule.selector!r} at step {rule.step} decided nothing: {last}" for rule in idle)

    def judge(
        self,
        sites: Sequence[str],
        step: int,
        metrics: Metrics,
        dtype: str,
        floor: float | None = None,
        kernels: Iterable[KernelProperty] = (),
        exact: bool = False,
        reason: str = "the noise floor is too large to judge by",
        row: RowError | None = None,
        element: float | None = None,
    ) -> Verdict:
        """Judge a site's metrics.

        ``sites`` are the site's names, ``dtype`` is the engine's, ``floor`` the reference's own error there (rel-L2; of
        integers the share that differs), ``kernels`` the engine's measured kernel properties; ``exact``: the site holds
        integers; ``reason``: why a floor is not usable, where it is not; ``row``: the worst row and ``element``: the
        reference's own largest |d|, which are judged where the tensor as a whole is within its floor. In this order: a
        user's rule; mismatches of integers; elements, with :attr:`allclose`; the noise floor; the noise floor widened
        by a kernel property, which makes the result ``explained``; the table by dtype. Where the floor is not usable,
        what exceeds the table is ``inconclusive``; so is a tensor of which no element was compared, unless a rule of
        the user's allows it anything.
        """
        decided = self._decided(sites, step, metrics)
        if decided is not None:
            return decided
        if exact:
            return self._integers(metrics, floor or 0.0, reason)
        if self.allclose:
            rule = f"every element within rtol {metrics.rtol:g} and atol {metrics.atol:g}"
            return decide("mismatched", metrics.mismatched, 0.0, rule)
        if quantized_bounds(dtype):
            return quantized(metrics, dtype)
        if floor is None:
            return by_table(metrics, dtype, row)
        parts = self._parts(step, metrics, dtype, kernels, row, element)
        return self._by_floor(step, metrics, dtype, floor, kernels, parts) or without_floor(metrics, dtype, reason)

    def _decided(self, sites: Sequence[str], step: int, metrics: Metrics) -> Verdict | None:
        """Judge by what the user says: no NaN and Inf on either side, then the rules; None where nothing is said.

        What has no element that was compared is not judged, unless all its rules allow anything.
        """
        nonfinite = metrics.nan_actual + metrics.inf_actual + metrics.nan_expected + metrics.inf_expected
        if self.finite and nonfinite:
            return decide(NONFINITE, nonfinite, 0.0, "finite: NaN and Inf fail on either side")
        verdicts = [rule.judge(metrics) for rule in self.rules_for(sites, step)]
        if not metrics.count and not (verdicts and all(verdict.bound == math.inf for verdict in verdicts)):
            return Verdict(INCONCLUSIVE, "rel_l2", metrics.rel_l2, math.inf, EMPTY)
        return max(verdicts, key=lambda verdict: (not verdict.ok, verdict.margin), default=None)

    def _integers(self, metrics: Metrics, floor: float, reason: str) -> Verdict:
        """Judge integers: as many may differ as a multiple of those that nearly tie in the reference itself."""
        if self.usable(floor):
            rule = f"{self.factor:g} x the reference's own {floor:.1%}" if floor else "integers are equal or not"
            return decide("mismatched", metrics.mismatched, self.factor * floor * metrics.count, rule)
        equal = decide("mismatched", metrics.mismatched, 0.0, f"integers: {reason}")
        return equal if equal.ok else Verdict(INCONCLUSIVE, "mismatched", metrics.mismatched, math.inf, reason)

    def usable(self, floor: float) -> bool:
        """Tell whether a noise floor is a tolerance: not NaN, not infinite, and the bound that it sets below
        :data:`CEILING`."""
        return self.factor * floor < CEILING

    def _by_floor(
        self,
        step: int,
        metrics: Metrics,
        dtype: str,
        measured: float,
        kernels: Iterable[KernelProperty],
        parts: Iterable[Verdict],
    ) -> Verdict | None:
        """Judge by the noise floor, and ``parts`` of a tensor that is within it; None where it is not usable."""
        if not self.usable(measured):
            return None
        floor = max(measured, EPSILON[dtype] / 2)
        factor = min(widened(self.factor, metrics.count), max(self.factor, CEILING / floor))
        few = f" of {metrics.count} elements" if factor != self.factor else ""
        plain = decide("rel_l2", metrics.rel_l2, factor * floor, f"{factor:.3g} x noise floor {floor:.1e}{few}")
        if not plain.ok:
            return by_kernels(kernels, step, plain, floor, factor)
        weighed = (DIVERGED, EXPLAINED, WITHIN)
        return min((plain, *parts), key=lambda part: weighed.index(part.status))

    def _parts(
        self,
        step: int,
        metrics: Metrics,
        dtype: str,
        kernels: Iterable[KernelProperty],
        row: RowError | None,
        element: float | None,
    ) -> Iterator[Verdict]:
        """Judge what a tensor within its floor may hide: its worst row, and its worst element."""
        if row is not None and row.floor is not None:
            floor = max(row.floor, EPSILON[dtype] / 2)
            factor = row_factor(widened(self.factor, row.width), row.rows)
            if factor * floor < CEILING:
                rule = f"{factor:.3g} x noise floor {floor:.1e} of {row}"
                found = decide("row_rel_l2", row.error, factor * floor, rule)
                # The extreme of many rows: twice of what the probe's ratio allows a tensor.
                yield by_kernels(kernels, step, found, floor, 2 * factor)
        if element is not None and metrics.rel_l2:
            size = metrics.rms / metrics.rel_l2
            largest, factor = max(element, EPSILON[dtype] / 2 * size), 2 * widened(self.factor, metrics.count)
            rule = f"{factor:.3g} x the largest of the reference in {dtype}, at {list(metrics.max_abs_index or ())}"
            found = decide("max_abs", metrics.max_abs, factor * largest, rule)
            # The extreme of many elements: likewise.
            yield by_kernels(kernels, step, found, largest, 2 * factor, math.inf)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        rules = [rule.to_json() for rule in self.rules]
        return {"factor": self.factor, "rules": rules, "allclose": self.allclose, "finite": self.finite}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tolerance:
        """Inverse of :meth:`to_json`."""
        strict = (data.get(name, False) for name in ("allclose", "finite"))
        return cls(data["factor"], tuple(map(Rule.from_json, data["rules"])), *strict)


def widened(factor: float, count: int) -> float:
    """Return the factor for a tensor of ``count`` elements. The floor of a few is a small sample: they get more.

    ``benchmarks/few_elements.py`` measured how much: beyond this are 0 to 0.2 % of healthy results.
    """
    return factor * (1 + 3 / count) if 0 < count < FEW else factor


def by_table(metrics: Metrics, dtype: str, row: RowError | None) -> Verdict:
    """Judge where no floor was measured; a row may have ten times the error of its tensor."""
    found = decide("rel_l2", metrics.rel_l2, TABLE[dtype], f"table for {dtype}, no floor measured")
    if row is None or not found.ok:
        return found
    bound = min(ROW_TABLE * TABLE[dtype], CEILING)
    worst = decide("row_rel_l2", row.error, bound, f"{ROW_TABLE:g} x table for {dtype}, {row}")
    return found if worst.ok else worst


def without_floor(metrics: Metrics, dtype: str, reason: str) -> Verdict:
    """Judge where the reference gives no usable floor: by the table, beyond which nothing is known.

    A NaN or Inf that only the engine has is wrong whatever the reference's error is.
    """
    found = decide("rel_l2", metrics.rel_l2, TABLE[dtype], f"table for {dtype}: {reason}")
    if found.ok or not_finite(metrics):
        return found
    return Verdict(INCONCLUSIVE, "rel_l2", metrics.rel_l2, math.inf, reason)


def quantized(metrics: Metrics, dtype: str) -> Verdict:
    """Judge a tensor inside a quantized engine: only NaN and Inf that the reference does not have are wrong."""
    if not_finite(metrics):
        return Verdict(DIVERGED, "rel_l2", metrics.rel_l2, math.inf, f"{dtype}; NaN or Inf are never allowed")
    return Verdict(EXPLAINED, "rel_l2", metrics.rel_l2, math.inf, f"{dtype}: judged by KL and top-1 of the logits")


def not_finite(metrics: Metrics) -> bool:
    """Tell whether the engine has a NaN or Inf where the reference has something else."""
    return bool(metrics.nan_mismatch + metrics.inf_mismatch and metrics.nan_actual + metrics.inf_actual)


def by_kernels(
    kernels: Iterable[KernelProperty], step: int, found: Verdict, floor: float, factor: float, ceiling: float = CEILING
) -> Verdict:
    """Return a verdict, or ``explained`` in the place of one that a kernel property widens enough at a step.

    ``floor``, of which ``factor`` is allowed without one, and ``ceiling``, below which the bound stays, are in the
    verdict's own metric.
    """
    for kernel in () if found.ok else kernels:
        # The probe's ratio is that of one product; half of the factor leaves room for what accumulates.
        wide = min(factor / 2 * kernel.ratio * floor, ceiling)
        if found.value <= wide and kernel.phase in ("both", "prefill" if step == 0 else "decode"):
            multiple = f"{factor / 2:g} x {kernel.ratio:.3g} x noise floor {floor:.1e}"
            return replace(found, status=EXPLAINED, bound=wide, rule=f"{kernel.name}: {kernel.evidence}; {multiple}")
    return found


def positive(value: Any) -> float:
    """Return a factor. Raises :class:`UsageError` when it is no positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"the tolerance factor is {value!r}, expected a positive number such as 4")
    return float(value)
