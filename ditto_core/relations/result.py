"""The result of a relation: exact, within rounding, or broken, with the place and the error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ditto_core.compare._record import encode
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.judging import judge, unjudged
from ditto_core.compare.metrics import ShapeMismatch, measure
from ditto_core.compare.requested import measure_requested
from ditto_core.compare.result import SiteResult
from ditto_core.compare.text import headline
from ditto_core.compare.tokens import LogitsMetrics, measure_logits, rounded_as
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.verdict import DIVERGED, UNJUDGED, WITHIN, Verdict
from ditto_core.relations.feed import Captured, differing_bits
from ditto_core.system.receipt import make_receipt

if TYPE_CHECKING:
    from ditto_core.compare.bounds import Rule
    from ditto_core.session import SessionInfo
    from ditto_core.sites import Tap

SAME_BITS, ROUNDING, BROKEN = "same bits", "rounding", "broken"
BIT_RULE = "same inputs in the same shapes: the same kernels, so the same bits"


@dataclass(frozen=True)
class Difference:
    """Where a relation breaks first: ``step`` is that of the run that was fed the other way."""

    site: str
    row: int
    position: int
    step: int
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.site}, row {self.row}, position {self.position} (step {self.step}): {self.verdict}"


@dataclass(frozen=True)
class Relation:
    """A relation that was checked. True when it holds, to the bit or but for rounding.

    ``comparison``: the run fed the other way (its ``engine``) against the plain run (its ``reference``), padding left
    out, positions counted in real tokens; all its results are of step 0. ``bits``: elements that differ, by site.
    ``steps``: for each row, the step that computed each position.
    """

    name: str
    comparison: Comparison
    bits: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.comparison)

    @property
    def status(self) -> str:
        """``same bits``, ``rounding`` (other kernels for other shapes: no fault), or ``broken``."""
        if not self:
            return BROKEN
        return ROUNDING if any(self.bits.values()) else SAME_BITS

    @property
    def first(self) -> Difference | None:
        """Where it breaks first: the first bad site in the order of the model, and there the first bad position."""
        bad = self.comparison.first_bad
        return None if bad is None else self._place(bad)

    def _place(self, bad: SiteResult) -> Difference:
        rows, positions = bad.metrics.by_row, bad.metrics.by_position
        row = max(range(len(rows)), key=rows.__getitem__, default=0)
        bound = bad.verdict.bound if bad.verdict.metric == "rel_l2" else 0.0
        position = next((i for i, error in enumerate(positions) if not error <= bound), 0)
        step = self.steps[row][position] if self.steps else 0
        return Difference(bad.site, row, position, step, bad.verdict)

    def __str__(self) -> str:
        first, worst = self.first, self.comparison.worst
        if first is not None:
            return f"{self.name}: broken at {first}"
        if not self and self.comparison.missing:
            site, reason = next(iter(self.comparison.missing.items()))
            return f"{self.name}: not comparable at {site}: {reason}"
        if not self:
            return f"{self.name}: {headline(self.comparison)}"
        assert worst is not None
        left_out = f", {len(self.comparison.notes)} left out" if self.comparison.notes else ""
        where = f"{len(self.comparison)} sites{left_out}, worst {worst.verdict} at {worst.site}"
        return f"{self.name}: holds, {self.status} ({where})"

    def assert_holds(self) -> None:
        """Raise ``AssertionError`` naming the site, row, position and step, unless the relation holds."""
        __tracebackhide__ = True
        if not self:
            raise AssertionError("\n".join((str(self), *self.comparison.notes)))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        first = None if self.first is None else asdict(self.first)
        if first is not None:
            first["verdict"] = {key: encode(value) for key, value in first["verdict"].items()}
        facts = {"name": self.name, "status": self.status, "first": first, "bits": dict(self.bits)}
        return {**facts, "steps": [list(row) for row in self.steps], "comparison": self.comparison.to_json()}


class Fed(Protocol):
    """How a session was fed: in words, and for each row the step that computed each of its positions."""

    @property
    def label(self) -> str:
        """The way it was fed."""
        ...

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Return the steps."""
        ...


@dataclass(frozen=True)
class Side:
    """A run of a relation: who ran, what came out, and how it was fed."""

    info: SessionInfo
    captured: Captured
    fed: Fed

    @property
    def labelled(self) -> SessionInfo:
        """The session's facts with the way it was fed in its label."""
        return replace(self.info, label=f"{self.info.label}, {self.fed.label}")


def relate(
    name: str,
    actual: Side,
    expected: Side,
    taps: tuple[Tap, ...],
    *,
    tolerance: Tolerance | None = None,
    floor: Mapping[str, float] | None = None,
    exact: bool = False,
    outputs: Collection[str] = ("logits",),
) -> Relation:
    """Compare two runs site by site; ``exact`` asks for the same bits, else ``tolerance`` judges with the ``floor``.

    ``outputs`` are the names of the model's outputs: each has to be judged.
    """
    tolerance = tolerance or Tolerance()
    names = {tap.site: (tap.site, *tap.aliases, tap.value) for tap in taps}
    requests = {site: tolerance.requests(names.get(site, (site,)), 0) for site in expected.captured.values}
    results, missing, bits = measured(actual.captured, expected.captured, floor or {}, requests)
    finals = {*outputs, *(tap.site for tap in taps if tap.value in outputs)}
    results = [replace(result, final=result.site in finals) for result in results]
    judged = (
        tuple(map(bitwise(bits), results)) if exact else judge(results, tolerance, taps, actual.info, one_engine=True)
    )
    left_out = actual.captured.left_out
    notes = tuple(f"left out {site}: {reason}" for site, reason in left_out.items())
    name_of_logits = next((tap.site for tap in taps if tap.value == "logits"), "logits")
    ours, theirs = (side.captured.values.get(name_of_logits) for side in (actual, expected))
    logits: tuple[LogitsMetrics, ...] = ()
    if ours is not None and theirs is not None and ours.shape == theirs.shape:
        logits = (measure_logits(ours, theirs, dtype=rounded_as(ours.dtype, actual.info.dtype)),)
    comparison = Comparison(
        engine=actual.labelled,
        reference=expected.labelled,
        results=judged,
        tolerance=tolerance,
        logits=logits,
        missing=unjudged(actual.info.judged_as, judged, logits, taps) | missing,
        taps=taps,
        notes=notes,
        receipt=make_receipt(),
    )
    return Relation(name, comparison, bits, actual.fed.steps())


def measured(
    actual: Captured, expected: Captured, floor: Mapping[str, float], requests: Mapping[str, Sequence[Rule]]
) -> tuple[list[SiteResult], dict[str, str], dict[str, int]]:
    """Measure every site that both runs have; return results, what could not be compared, and differing bits.

    ``requests`` are the rules of each site about what is measured for them alone.
    """
    results: list[SiteResult] = []
    missing = dict.fromkeys(actual.values.keys() ^ expected.values.keys(), "delivered by one of the two runs only")
    bits: dict[str, int] = {}
    for order, (site, value) in enumerate(expected.values.items()):
        if site in missing:
            continue
        other = actual.values[site]
        try:
            # NaN on both sides is the same result here: whether it should be there is not this relation's question.
            metrics = measure(other, value, axes=expected.axes[site], equal_nan=True)
        except ShapeMismatch as error:
            missing[site] = str(error)
            continue
        metrics = replace(metrics, requested=measure_requested(requests[site], metrics, other, value))
        bits[site] = differing_bits(other, value)
        results.append(SiteResult(0, site, order, metrics, UNJUDGED, floor.get(site)))
    return results, missing, bits


def bitwise(bits: Mapping[str, int]) -> Any:
    """Return what judges a result by its bits."""

    def verdict(result: SiteResult) -> SiteResult:
        count = bits[result.site]
        status = DIVERGED if count else WITHIN
        return replace(result, verdict=Verdict(status, "differing elements", count, 0.0, BIT_RULE))

    return verdict
