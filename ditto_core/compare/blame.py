"""What a localization found: data first, JSON in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ditto_core.compare._record import decode, encode
from ditto_core.compare.metrics import Metrics


@dataclass(frozen=True)
class Cause:
    """A named kind of fault: ``confidence`` 0 to 1, the evidence as lines for people, and what to do next.

    ``kind`` is one of :data:`ditto_core.causes.KINDS`. ``fault`` is False for what explains a difference without
    anything being wrong: a near tie, rounding by shape. ``rule`` is the rule that found it, ``family.name``.
    """

    kind: str
    site: str
    confidence: float
    evidence: tuple[str, ...]
    next_step: str
    fault: bool = True
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.kind} at {self.site}: {self.evidence[0]}" if self.evidence else f"{self.kind} at {self.site}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cause:
        """Inverse of :meth:`to_json`."""
        return cls(**{**data, "evidence": tuple(data["evidence"])})


@dataclass(frozen=True)
class LocalResult:
    """The error that one site adds at one step, and the error that eager adds there in the engine's own dtype.

    ``explained``: the measured property of the engine's kernels that accounts for an error above ``bound``.
    """

    step: int
    site: str
    order: int
    metrics: Metrics
    floor: float
    bound: float
    explained: str = ""

    @property
    def flagged(self) -> bool:
        """Tell whether the site adds more error than rounding and the kernels explain; NaN does."""
        return not self.explained and not self.metrics.rel_l2 <= self.bound

    @property
    def ratio(self) -> float:
        """Local error in units of the bound."""
        return self.metrics.rel_l2 / self.bound

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        numbers = {name: encode(getattr(self, name)) for name in ("floor", "bound")}
        plain = {name: getattr(self, name) for name in ("step", "site", "order", "explained")}
        return {**plain, **numbers, "metrics": self.metrics.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LocalResult:
        """Inverse of :meth:`to_json`."""
        numbers = {name: decode(data[name]) for name in ("floor", "bound")}
        return cls(**{**data, **numbers, "metrics": Metrics.from_json(data["metrics"])})


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

    @property
    def between(self) -> tuple[str, ...]:
        """The model's other lines between a site and the nearest ones that the engine shows, the last ones first.

        An operator that is no module's (``F.interpolate``, ``+``) is in none of the sites, but in one of these lines.
        """
        lines = [line.partition("(")[2].removesuffix(")") for line in reversed(self.operators) if "(" in line]
        return tuple(line for line in dict.fromkeys(lines) if line and line != self.source)

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

    @cached_property
    def measured(self) -> tuple[str, ...]:
        """Sites of which some element was measured: what is not finite in the replay itself is left out."""
        return tuple(dict.fromkeys(result.site for result in self.results if result.metrics.count))

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
            "blamed": [{k: encode(v) for k, v in asdict(blame).items()} for blame in self.blamed],
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
    numbers = {name: decode(data[name]) for name in ("local", "floor", "bound", "accumulated")}
    lists = {name: tuple(data[name]) for name in ("steps", "inputs", "operators")}
    return Blame(**{**data, **numbers, **lists})
