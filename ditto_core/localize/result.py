"""What a localization found: data first, JSON in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ditto_core.causes.base import Cause
from ditto_core.compare.result import number, parse
from ditto_core.localize.local import LocalResult

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.localize.graph import Graph
    from ditto_core.sites import Tap


@dataclass(frozen=True)
class Blame:
    """One site that adds error of its own.

    ``module`` is the module whose code computes it, ``source`` the line of the model that does; ``inputs`` are the
    nearest sites upstream that the engine shows, ``operators`` what lies between them and the site. ``step`` is the
    first at which it is flagged, ``steps`` all of them; ``local``, ``floor`` and ``accumulated`` are rel-L2 at ``step``
    (``accumulated`` is None where the reference has no such site).
    """

    site: str
    module: str
    module_class: str
    source: str
    step: int
    steps: tuple[int, ...]
    local: float
    floor: float
    bound: float
    accumulated: float | None = None
    inputs: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    operator: str = ""

    def __str__(self) -> str:
        where = f" in {self.operator}" if self.operator else ""
        return f"{self.site}{where}: local error {self.local:.1e} > {self.bound:.1e} at step {self.step}"


@dataclass(frozen=True)
class Localization:
    """The local error of every site and step, whom to blame, and why.

    ``blamed``: flagged sites, earliest step first, then topological order; the first is where to look. False when no
    site is to blame.
    """

    dtype: str
    factor: float
    results: tuple[LocalResult, ...]
    blamed: tuple[Blame, ...] = ()
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.blamed)

    @property
    def flagged(self) -> tuple[LocalResult, ...]:
        """Results above their bound, earliest step first, then topological order."""
        return tuple(sorted((r for r in self.results if r.flagged), key=lambda r: (r.step, r.order)))

    @property
    def first(self) -> Blame | None:
        """The site to look at first."""
        return next(iter(self.blamed), None)

    @property
    def cause(self) -> Cause | None:
        """The most likely cause."""
        return next(iter(self.causes), None)

    @cached_property
    def by_site(self) -> Mapping[str, tuple[LocalResult, ...]]:
        """Results of each site, by step."""
        sites: dict[str, list[LocalResult]] = {}
        for result in sorted(self.results, key=lambda r: (r.order, r.step)):
            sites.setdefault(result.site, []).append(result)
        return {site: tuple(results) for site, results in sites.items()}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary (strict JSON: NaN and infinities are strings)."""
        return {
            "dtype": self.dtype,
            "factor": self.factor,
            "results": [result.to_json() for result in self.results],
            "blamed": [{k: number(v) for k, v in asdict(blame).items()} for blame in self.blamed],
            "causes": [cause.to_json() for cause in self.causes],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Localization:
        """Inverse of :meth:`to_json`."""
        return cls(
            data["dtype"],
            data["factor"],
            tuple(LocalResult.from_json(r) for r in data["results"]),
            tuple(blame_from_json(b) for b in data["blamed"]),
            tuple(Cause.from_json(c) for c in data["causes"]),
            tuple(data["notes"]),
        )


def blame_from_json(data: Mapping[str, Any]) -> Blame:
    """Read one blamed site."""
    numbers = {name: parse(data[name]) for name in ("local", "floor", "bound", "accumulated")}
    lists = {name: tuple(data[name]) for name in ("steps", "inputs", "operators")}
    return Blame(**{**data, **numbers, **lists})


def blame(
    results: Sequence[LocalResult], taps: Sequence[Tap], comparison: Comparison | None, graph: Graph | None
) -> tuple[Blame, ...]:
    """Turn flagged results into blamed sites, with what the comparison and the exported graph know of each."""
    by_site: dict[str, list[LocalResult]] = {}
    for result in sorted((r for r in results if r.flagged), key=lambda r: (r.step, r.order)):
        by_site.setdefault(result.site, []).append(result)
    known = {} if comparison is None else {(r.step, r.site): r.metrics.rel_l2 for r in comparison.results}
    tap_of = {tap.site: tap for tap in taps}
    blamed = [blame_site(tap_of[site], found, known) for site, found in by_site.items()]
    return tuple(blamed if graph is None else (with_segment(b, tap_of[b.site], graph, taps) for b in blamed))


def blame_site(tap: Tap, found: Sequence[LocalResult], accumulated: Mapping[tuple[int, str], float]) -> Blame:
    """Describe one flagged site from its results, the earliest first."""
    first = found[0]
    return Blame(
        tap.site,
        owner(tap.site),
        tap.module_class,
        tap.source,
        first.step,
        tuple(result.step for result in found),
        first.metrics.rel_l2,
        first.floor,
        first.bound,
        accumulated.get((first.step, tap.site)),
    )


def owner(site: str) -> str:
    """Return the module whose code computes a site: itself, or for an input the module around it."""
    path, _, port = site.partition(":")
    path = path.split("@")[0]
    return path.rpartition(".")[0] if port == "in" or port.startswith("in.") else path


def with_segment(blamed: Blame, tap: Tap, graph: Graph, taps: Sequence[Tap]) -> Blame:
    """Add the operators between a site and the nearest sites upstream."""
    segment = graph.segment(tap.value, {t.value for t in taps})
    sites = {t.value: t.site for t in taps}
    names = tuple(sites.get(value, value) for value in segment.inputs)
    return replace(blamed, inputs=names, operators=tuple(str(op) for op in segment.operators))
