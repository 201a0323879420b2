"""The result of a comparison: structured, JSON in both directions, judged again at will. Reports are views of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ditto_core.backends.base import SessionInfo
from ditto_core.compare.metrics import Metrics
from ditto_core.compare.tokens import LogitsMetrics, matching_prefix
from ditto_core.compare.tolerance import INTEGERS, WITHIN, Tolerance, Verdict, judge_logits
from ditto_core.errors import TraceError
from ditto_core.receipt import Receipt
from ditto_core.sites import Tap, matches

if TYPE_CHECKING:
    from ditto_core.localize import Localization

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SiteResult:
    """One tensor of one step: how far the engine's is from the reference's, and what that means.

    ``floor`` is the reference's own error there in the engine's dtype. ``order`` is topological. ``healed``: the
    error exceeds its bound but is gone at the end of an enclosing module.
    """

    step: int
    site: str
    order: int
    metrics: Metrics
    verdict: Verdict
    floor: float | None = None
    healed: bool = False

    @property
    def ok(self) -> bool:
        """Tell whether this result lets the comparison pass."""
        return self.verdict.ok or self.healed


@dataclass(frozen=True)
class TokenResult:
    """Greedy tokens of one row on both sides and what became of each difference."""

    prompt: str
    engine: tuple[int, ...]
    reference: tuple[int, ...]
    engine_text: str = ""
    reference_text: str = ""
    near_ties: tuple[int, ...] = ()

    @property
    def differences(self) -> tuple[int, ...]:
        """Steps at which the tokens differ."""
        pairs = zip(self.engine, self.reference, strict=False)
        return tuple(i for i, (a, b) in enumerate(pairs) if a != b)

    @property
    def prefix(self) -> int:
        """Length of the greedy prefix on which both sides agree."""
        return matching_prefix(self.engine, self.reference)

    @property
    def flips(self) -> tuple[int, ...]:
        """Differences that are no near ties."""
        return tuple(i for i in self.differences if i not in self.near_ties)


@dataclass(frozen=True)
class ObserverEffect:
    """Largest rel-L2 between the final outputs of the tapped engine and of the same engine without taps."""

    rel_l2: float
    step: int
    output: str

    @property
    def changed(self) -> bool:
        """Tell whether tapping changed any bit that the metric can see."""
        return self.rel_l2 > 0


@dataclass(frozen=True)
class Comparison:
    """Everything that a lockstep run found. True when every site is within its tolerance, explained, or healed.

    Iterating yields :class:`SiteResult`, worst margin first. ``missing`` maps sites that could not be compared to the
    reason. ``taps`` tells where each site lives; ``notes`` are lines for people; ``localization`` is what each site
    adds by itself, where that was measured; ``repros`` maps sites to the folders of the repros that were saved.
    ``receipt`` tells what produced it all.
    """

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
        return bool(self.results) and not self.missing and all(result.ok for result in self.results) and self.logits_ok

    def __repr__(self) -> str:
        from ditto_core.report.text import summary_line

        return f"<Comparison: {summary_line(self)}>"

    def __iter__(self) -> Iterator[SiteResult]:
        return iter(sorted(self.results, key=lambda r: (-r.verdict.margin, r.step, r.order)))

    def __len__(self) -> int:
        return len(self.results)

    @cached_property
    def logits_verdicts(self) -> tuple[tuple[int, Verdict], ...]:
        """Verdicts on the logits of each step: of a quantized engine by KL and top-1, of others none."""
        judged = (judge_logits(m, self.engine.dtype) for m in self.logits)
        return tuple((step, verdict) for step, verdicts in enumerate(judged) for verdict in verdicts)

    @property
    def logits_ok(self) -> bool:
        """Tell whether no verdict on the logits failed."""
        return all(verdict.ok for _, verdict in self.logits_verdicts)

    @property
    def steps(self) -> int:
        """Number of steps compared."""
        return 1 + max((r.step for r in self.results), default=-1)

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites compared, in topological order."""
        return tuple(dict.fromkeys(r.site for r in sorted(self.results, key=lambda r: r.order)))

    @property
    def failures(self) -> tuple[SiteResult, ...]:
        """Results that make the comparison fail, earliest step first, then topological order."""
        return tuple(sorted((r for r in self.results if not r.ok), key=lambda r: (r.step, r.order)))

    @property
    def first_bad(self) -> SiteResult | None:
        """The first site, at the earliest failing step, whose error exceeds its bound and does not heal."""
        return next(iter(self.failures), None)

    @property
    def healed(self) -> tuple[SiteResult, ...]:
        """Results above their bound whose error is gone downstream."""
        return tuple(r for r in self.results if r.healed)

    @property
    def worst(self) -> SiteResult | None:
        """The result with the largest margin."""
        return next(iter(self), None)

    @cached_property
    def tap_of(self) -> Mapping[str, Tap]:
        """Taps by site."""
        return {tap.site: tap for tap in self.taps}

    def filter(self, selector: str = "**", *, step: int | None = None) -> Comparison:
        """Return the part of the comparison whose sites match ``selector``, at ``step`` where given."""
        keep = (r for r in self.results if matches(selector, r.site) and step in (None, r.step))
        return replace(self, results=tuple(keep))

    def judged(self, tolerance: Tolerance) -> Comparison:
        """Return the same measurements judged by another tolerance."""
        results = judge(self.results, tolerance, self.taps, self.engine)
        return replace(self, results=results, tolerance=tolerance)

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary a result, as ``pandas.DataFrame`` takes them."""
        return [row(result) for result in sorted(self.results, key=lambda r: (r.step, r.order))]

    def assert_close(self) -> None:
        """Raise ``AssertionError`` with the first bad site and the worst ones, unless the comparison holds."""
        __tracebackhide__ = True
        if not self:
            from ditto_core.report.text import failure_message

            raise AssertionError(failure_message(self))

    def assert_same_tokens(self) -> None:
        """Raise ``AssertionError`` when a greedy token differs and the reference did not nearly tie there."""
        __tracebackhide__ = True
        if any(token.flips for token in self.tokens):
            from ditto_core.report.text import token_message

            raise AssertionError(token_message(self))

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from ditto_core.report.notebook import notebook_html

        return notebook_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary (strict JSON: NaN and infinities are strings)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": bool(self),
            "engine": asdict(self.engine),
            "reference": asdict(self.reference),
            "tolerance": self.tolerance.to_json(),
            "results": [result_to_json(r) for r in self.results],
            "tokens": [asdict(t) for t in self.tokens],
            "logits": [m.to_json() for m in self.logits],
            "observer": asdict(self.observer) if self.observer else None,
            "missing": dict(self.missing),
            "taps": [t.to_json() for t in self.taps],
            "notes": list(self.notes),
            "dump": self.dump,
            "localization": self.localization.to_json() if self.localization else None,
            "repros": dict(self.repros),
            "receipt": self.receipt.to_json() if self.receipt else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """Inverse of :meth:`to_json`. Raises :class:`TraceError` for another schema version."""
        if data.get("schema_version") != SCHEMA_VERSION:
            raise TraceError(
                f"comparison has schema version {data.get('schema_version')}, this version reads {SCHEMA_VERSION}"
            )
        observer = data["observer"]
        return cls(
            engine=SessionInfo.from_json(data["engine"]),
            reference=SessionInfo.from_json(data["reference"]),
            results=tuple(result_from_json(r) for r in data["results"]),
            tolerance=Tolerance.from_json(data["tolerance"]),
            tokens=tuple(token_from_json(t) for t in data["tokens"]),
            logits=tuple(LogitsMetrics.from_json(m) for m in data["logits"]),
            observer=ObserverEffect(**observer) if observer else None,
            missing=data["missing"],
            taps=tuple(Tap.from_json(t) for t in data["taps"]),
            notes=tuple(data["notes"]),
            dump=data["dump"],
            localization=localization_from_json(data.get("localization")),
            repros=data.get("repros", {}),
            receipt=Receipt.from_json(data["receipt"]) if data.get("receipt") else None,
        )

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`TraceError` when the file cannot be written."""
        from ditto_core.trace.files import replace_text

        replace_text(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Comparison:
        """Inverse of :meth:`save`."""
        return cls.from_json(json.loads(path.read_text()))


def localization_from_json(data: Mapping[str, Any] | None) -> Localization | None:
    """Read the localization of a comparison, where it has one."""
    if data is None:
        return None
    from ditto_core.localize import Localization

    return Localization.from_json(data)


def judge(
    results: Sequence[SiteResult], tolerance: Tolerance, taps: Iterable[Tap], engine: SessionInfo
) -> tuple[SiteResult, ...]:
    """Give every measurement its verdict, then mark those that heal downstream."""
    taps = tuple(taps)
    names = {tap.site: (tap.site, *tap.aliases) for tap in taps}
    exact = {tap.site for tap in taps if tap.dtype in INTEGERS}
    usual = usual_floors(results)

    def verdict(r: SiteResult) -> Verdict:
        floor = None if r.floor is None else max(r.floor, usual[r.site, r.step > 0])
        sites = names.get(r.site, (r.site,))
        return tolerance.judge(sites, r.step, r.metrics, engine.dtype, floor, engine.kernels, r.site in exact)

    judged = [replace(r, verdict=verdict(r), healed=False) for r in results]
    return tuple(mark_healed(judged, names))


def usual_floors(results: Iterable[SiteResult]) -> Mapping[tuple[str, bool], float]:
    """Return the median floor of each site over the prefill, and over the decoding steps.

    One sample of a floor can be small by chance; what is usual there is not.
    """
    samples: dict[tuple[str, bool], list[float]] = {}
    for r in results:
        if r.floor is not None:
            samples.setdefault((r.site, r.step > 0), []).append(r.floor)
    return {key: median(values) for key, values in samples.items()}


def mark_healed(results: Iterable[SiteResult], names: Mapping[str, tuple[str, ...]]) -> Iterator[SiteResult]:
    """Mark a diverged site as healed when an enclosing module's output, computed later in the same step, is within.

    An output that a kernel property explains is off too, so it heals nothing.
    ``model.layers.0.self_attn:q_rope`` heals when ``model.layers.0.self_attn`` or ``model.layers.0`` passes.
    """
    results = list(results)
    known: dict[tuple[int, str], SiteResult] = {}
    for result in results:
        for name in names.get(result.site, (result.site,)):
            known[result.step, name] = result
    for result in results:
        later = (known.get((result.step, path)) for path in enclosing(result.site))
        fine = any(o and o.order > result.order and o.verdict.status == WITHIN for o in later)
        healed = not result.verdict.ok and fine
        yield replace(result, healed=healed)


def enclosing(site: str) -> Iterator[str]:
    """Yield the paths of the modules around a site, innermost first: ``a.b:port`` -> ``a.b``, ``a``."""
    path, _, port = site.partition(":")
    if port:
        yield path
    while "." in path:
        path = path.rsplit(".", 1)[0]
        yield path


def row(result: SiteResult) -> dict[str, Any]:
    """Flatten a result; infinities and NaN stay numbers, so that columns do."""
    numbers = {k: v for k, v in asdict(result.metrics).items() if isinstance(v, int | float | bool | None)}
    verdict = asdict(result.verdict) | {"margin": result.verdict.margin}
    head = {"step": result.step, "site": result.site, "floor": result.floor, "healed": result.healed}
    return head | verdict | numbers


def result_to_json(result: SiteResult) -> dict[str, Any]:
    """Return a JSON-ready dictionary of one result."""
    verdict = {k: number(v) for k, v in asdict(result.verdict).items()}
    flat = {k: getattr(result, k) for k in ("step", "site", "order", "healed")}
    return {**flat, "floor": number(result.floor), "verdict": verdict, "metrics": result.metrics.to_json()}


def result_from_json(data: Mapping[str, Any]) -> SiteResult:
    """Inverse of :func:`result_to_json`."""
    verdict = Verdict(**{k: parse(v) if k in ("value", "bound") else v for k, v in data["verdict"].items()})
    fields = {**data, "floor": parse(data["floor"]), "verdict": verdict}
    return SiteResult(**{**fields, "metrics": Metrics.from_json(data["metrics"])})


def token_from_json(data: Mapping[str, Any]) -> TokenResult:
    """Inverse of ``dataclasses.asdict`` on a :class:`TokenResult`."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return TokenResult(**fields)


def number(value: Any) -> Any:
    """Spell a float that JSON cannot hold."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse(value: Any) -> Any:
    """Inverse of :func:`number`."""
    return float(value) if value in ("nan", "inf", "-inf") else value
