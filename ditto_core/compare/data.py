"""What a comparison found: structured, JSON in both directions, judged again at will. Reports are views of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.compare.blame import Localization
from ditto_core.compare.judging import judge, judge_logits
from ditto_core.compare.result import (
    STEPS,
    ObserverEffect,
    SiteResult,
    TokenResult,
    result_from_json,
    result_to_json,
    row,
    token_from_json,
)
from ditto_core.compare.risk import Risk, risk_of
from ditto_core.compare.tokens import LogitsMetrics
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.verdict import Verdict
from ditto_core.errors import SelectorError, TraceError, check_type, shown
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap, matches, no_match
from ditto_core.system.files import parse_json, path_of, read_text, reading, replace_text
from ditto_core.system.receipt import Receipt
from ditto_core.visible import visible

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ComparisonData:
    """The data and the queries of a :class:`~ditto_core.compare.comparison.Comparison`, which describes the fields."""

    engine: SessionInfo
    reference: SessionInfo
    results: tuple[SiteResult, ...]
    tolerance: Tolerance = field(default_factory=Tolerance)
    tokens: tuple[TokenResult, ...] = ()
    logits: tuple[LogitsMetrics, ...] = ()
    observer: ObserverEffect | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    taps: tuple[Tap, ...] = ()
    notes: tuple[str, ...] = ()
    dump: str = ""
    localization: Localization | None = None
    repros: Mapping[str, str] = field(default_factory=dict)
    receipt: Receipt | None = None

    def __bool__(self) -> bool:
        judged = not self.missing and not self.unjudged_outputs
        return self.decided and judged and not self.differs

    def __iter__(self) -> Iterator[SiteResult]:
        return iter(sorted(self.results, key=lambda r: (-r.verdict.margin, r.step, r.order)))

    def __len__(self) -> int:
        return len(self.results)

    @cached_property
    def logits_verdicts(self) -> tuple[tuple[int, Verdict], ...]:
        """Verdicts on the logits of each step: by rules about them, and of a quantized engine by KL and top-1."""
        names, dtype = self.logits_names, self.engine.beside(self.reference).judged_as
        judged = ((m.step, judge_logits(m, dtype, self.tolerance, names)) for m in self.logits)
        return tuple((step, verdict) for step, verdicts in judged for verdict in verdicts)

    @property
    def logits_names(self) -> tuple[str, ...]:
        """What the logits are called: ``logits``, and the site that computes them where it is tapped."""
        sites = (name for tap in self.taps if tap.value == "logits" for name in (tap.site, *tap.aliases))
        return ("logits", *sites)

    @property
    def logits_ok(self) -> bool:
        """Tell whether no verdict on the logits failed."""
        return all(verdict.ok for _, verdict in self.logits_verdicts)

    @property
    def differs(self) -> bool:
        """Tell whether a tensor or the logits failed; without it a comparison that does not hold was not decided."""
        return bool(self.failures) or not self.logits_ok

    @cached_property
    def measured(self) -> bool:
        """Tell whether any element was compared: tensors that are all empty say nothing."""
        return any(result.metrics.count for result in self.results)

    @cached_property
    def decided(self) -> bool:
        """Tell whether any element was compared and judged."""
        return any(result.metrics.count and result.verdict.judged for result in self.results)

    @cached_property
    def shown(self) -> Self:
        """The comparison with names that may be shown anywhere (:func:`~ditto_core.visible.visible`)."""
        return visible(self)

    @property
    def steps(self) -> int:
        """Number of steps compared."""
        return 1 + max((r.step for r in self.results), default=-1)

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites compared, in topological order."""
        return tuple(dict.fromkeys(r.site for r in sorted(self.results, key=lambda r: r.order)))

    @cached_property
    def failures(self) -> tuple[SiteResult, ...]:
        """Results that make the comparison fail, earliest step first, then topological order."""
        return tuple(sorted((r for r in self.results if not r.ok), key=lambda r: (r.step, r.order)))

    @property
    def first_bad(self) -> SiteResult | None:
        """The first site, at the earliest failing step, whose error exceeds its bound and does not heal."""
        return next(iter(self.failures), None)

    @cached_property
    def inconclusive(self) -> tuple[SiteResult, ...]:
        """Results that could not be judged, earliest step first, then topological order."""
        found = (r for r in self.results if not r.verdict.judged)
        return tuple(sorted(found, key=lambda r: (r.step, r.order)))

    @property
    def unjudged_outputs(self) -> tuple[SiteResult, ...]:
        """Final outputs that could not be judged: they make the comparison fail.

        One of which no element was compared (padding, near ties) does not, where it was judged at another step; nor
        does one that is empty on both sides, where another output was judged.
        """
        judged = {r.site: r.final for r in self.results if r.verdict.judged}
        needed = (r for r in self.inconclusive if r.final and (r.metrics.count or r.site not in judged))
        return tuple(r for r in needed if r.metrics.count or r.tied or not any(judged.values()))

    @property
    def healed(self) -> tuple[SiteResult, ...]:
        """Results above their bound whose error is gone downstream."""
        return tuple(r for r in self.results if r.healed)

    @cached_property
    def worst(self) -> SiteResult | None:
        """The result with the largest margin."""
        return next(iter(self), None)

    @property
    def risk(self) -> Risk | None:
        """The chance that a healthy engine fails such a run; None where no result was judged by a noise floor."""
        return risk_of(self.results, self.tolerance.factor)

    @cached_property
    def tap_of(self) -> Mapping[str, Tap]:
        """Taps by site."""
        return {tap.site: tap for tap in self.taps}

    def filter(self, selector: str | None = None, *, step: int | None = None) -> Self:
        """Return the part of the comparison whose sites match ``selector`` by any name, at ``step``; all without them.

        The logits' own metrics stay where ``selector`` matches the tensor that the logits are.
        Raises :class:`SelectorError` when ``selector`` matches no site of the comparison.
        """

        check_type(selector, (str, type(None)), "a selector", "a name or a pattern")

        def chosen(site: str) -> bool:
            aliases = self.tap_of[site].aliases if site in self.tap_of else ()
            return selector is None or any(matches(selector, name) for name in (site, *aliases))

        known = [*self.sites, *(site for site in self.missing if site != STEPS)]
        if selector is not None and known and not any(map(chosen, known)):
            raise SelectorError(no_match(selector, known))
        logits = self.logits if any(map(chosen, self.logits_names)) else ()
        return replace(
            self,
            results=tuple(r for r in self.results if step in (None, r.step) and chosen(r.site)),
            missing={site: why for site, why in self.missing.items() if site == STEPS or chosen(site)},
            logits=tuple(m for m in logits if step in (None, m.step)),
        )

    def judged(self, tolerance: Tolerance | float | Mapping[str, Any]) -> Self:
        """Return the same measurements judged by another tolerance, a factor or a table of rules, as in the marker."""
        tolerance = Tolerance.of(tolerance)
        results = judge(self.results, tolerance, self.taps, self.engine.beside(self.reference))
        return replace(self, results=results, tolerance=tolerance)

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary a result, as ``pandas.DataFrame`` takes them."""
        return [row(result) for result in sorted(self.results, key=lambda r: (r.step, r.order))]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary (strict JSON: NaN and infinities are strings)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": bool(self),
            "inconclusive": len(self.inconclusive),
            "false_alarm_risk": self.risk.expected if self.risk else None,
            "engine": asdict(self.engine),
            "reference": asdict(self.reference),
            "tolerance": self.tolerance.to_json(),
            "results": [result_to_json(r) for r in self.results],
            "tokens": [asdict(t) for t in self.tokens],
            "logits": [m.to_json() for m in self.logits],
            "observer": self.observer.to_json() if self.observer else None,
            "missing": dict(self.missing),
            "taps": [t.to_json() for t in self.taps],
            "notes": list(self.notes),
            "dump": self.dump,
            "localization": self.localization.to_json() if self.localization else None,
            "repros": dict(self.repros),
            "receipt": self.receipt.to_json() if self.receipt else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`. Raises :class:`TraceError` for another schema version, or no such table."""
        if not isinstance(data, Mapping):
            raise TraceError(f"comparison is {shown(data)}, expected a table")
        version = data.get("schema_version")
        if version is None:
            raise TraceError("this is no comparison (`ditto gate check` shows a gate's result)")
        if version != SCHEMA_VERSION:
            raise TraceError(f"comparison has schema version {version!r}, this version reads {SCHEMA_VERSION}")
        observer = data["observer"]
        return cls(
            engine=SessionInfo.from_json(data["engine"]),
            reference=SessionInfo.from_json(data["reference"]),
            results=tuple(result_from_json(r) for r in data["results"]),
            tolerance=Tolerance.from_json(data["tolerance"]),
            tokens=tuple(token_from_json(t) for t in data["tokens"]),
            logits=tuple(LogitsMetrics.from_json({"step": i, **m}) for i, m in enumerate(data["logits"])),
            observer=ObserverEffect.from_json(observer) if observer else None,
            missing=data["missing"],
            taps=tuple(Tap.from_json(t) for t in data["taps"]),
            notes=tuple(data["notes"]),
            dump=data["dump"],
            localization=Localization.from_json(data["localization"]) if data.get("localization") else None,
            repros=data.get("repros", {}),
            receipt=Receipt.from_json(data["receipt"]) if data.get("receipt") else None,
        )

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`TraceError` when the file cannot be written."""
        replace_text(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Inverse of :meth:`save`. Raises :class:`TraceError` for a file that is no comparison."""
        path = path_of(path, "comparison")
        with reading(path):
            return cls.from_json(parse_json(read_text(path)))
