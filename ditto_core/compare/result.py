"""What a comparison is made of: a tensor of a step, the tokens of a row, the observer effect; and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ditto_core.compare._record import Metrics, decode, encode
from ditto_core.compare.row_error import RowError
from ditto_core.compare.tokens import matching_prefix
from ditto_core.compare.verdict import UNJUDGED, Verdict

STEPS = "steps"
"""Under what name a comparison says which steps only one side has, among the sites that are missing."""

NUMBERS = ("floor", "element", "conditioning")
"""Fields of a result that are a number or None."""


@dataclass(frozen=True)
class SiteResult:
    """One tensor of one step: how far the engine's is from the reference's, and what that means.

    ``floor`` is the reference's own error there in the engine's dtype. ``order`` is topological. ``healed``: the
    error exceeds its bound, as rounding may, but is gone at the end of an enclosing module. ``final``: the tensor is an
    output of the model, so nothing that comes after can heal it, and a run that cannot judge it fails. ``dtype``: that
    of the tensor where its own bounds hold (integers; dumps of engines whose dtype is not known), else empty: the
    engine's hold.
    ``row``: the row [batch, position] that is furthest beyond its own floor. ``element``: the largest |d| of an element
    of the reference in the engine's dtype, None where no floor was measured. ``conditioning``: sum |terms| / |sum| of
    the linear layer that computes the tensor, None where that was not measured. ``tied``: why nothing of the tensor was
    judged, where all of it depends on a choice of the reference that nearly tied.
    """

    step: int
    site: str
    order: int
    metrics: Metrics
    verdict: Verdict
    floor: float | None = None
    healed: bool = False
    final: bool = False
    dtype: str = ""
    row: RowError | None = None
    element: float | None = None
    conditioning: float | None = None
    tied: str = ""

    @classmethod
    def unjudged(cls, **known: Any) -> SiteResult:
        """Return a result without a verdict, of all fields without a default. A step of a large model makes hundreds,
        and a frozen class's own ``__init__`` takes four times as long."""
        found = object.__new__(cls)
        vars(found).update(known, verdict=UNJUDGED)
        return found

    @property
    def ok(self) -> bool:
        """Tell whether this result lets the comparison pass."""
        return self.verdict.ok or self.healed


@dataclass(frozen=True)
class TokenResult:
    """Greedy tokens of one row on both sides and what became of each difference.

    ``left_out``: steps that depend on a choice of experts that nearly tied, where another token says nothing.
    """

    prompt: str
    engine: tuple[int, ...]
    reference: tuple[int, ...]
    engine_text: str = ""
    reference_text: str = ""
    near_ties: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

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
        """Differences that are no near ties, and depend on none."""
        return tuple(i for i in self.differences if i not in self.near_ties + self.left_out)

    @property
    def judged(self) -> int:
        """Number of tokens that say something: those that are equal or not left out."""
        return min(len(self.engine), len(self.reference)) - len({*self.differences} & {*self.left_out})


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

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**asdict(self), "rel_l2": encode(self.rel_l2)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ObserverEffect:
        """Inverse of :meth:`to_json`."""
        return cls(**{**data, "rel_l2": decode(data["rel_l2"])})


def row(result: SiteResult) -> dict[str, Any]:
    """Flatten a result; infinities and NaN stay numbers, so that columns do."""
    numbers = {k: v for k, v in asdict(result.metrics).items() if isinstance(v, int | float | bool | None)}
    verdict = asdict(result.verdict) | {"margin": result.verdict.margin}
    head = {"step": result.step, "site": result.site, "floor": result.floor, "healed": result.healed}
    return head | verdict | numbers


def result_to_json(result: SiteResult) -> dict[str, Any]:
    """Return a JSON-ready dictionary of one result."""
    verdict = {k: encode(v) for k, v in asdict(result.verdict).items()}
    flat = {k: getattr(result, k) for k in ("step", "site", "order", "healed", "final", "dtype", "tied")}
    numbers = {name: encode(getattr(result, name)) for name in NUMBERS}
    row = None if result.row is None else result.row.to_json()
    return {**flat, **numbers, "verdict": verdict, "row": row, "metrics": result.metrics.to_json()}


def result_from_json(data: Mapping[str, Any]) -> SiteResult:
    """Inverse of :func:`result_to_json`."""
    verdict = Verdict(**{k: decode(v) if k in ("value", "bound") else v for k, v in data["verdict"].items()})
    row = RowError.from_json(data["row"]) if data.get("row") else None
    numbers = {name: decode(data.get(name)) for name in NUMBERS}
    fields = {**data, **numbers, "row": row, "verdict": verdict}
    return SiteResult(**{**fields, "metrics": Metrics.from_json(data["metrics"])})


def token_from_json(data: Mapping[str, Any]) -> TokenResult:
    """Inverse of ``dataclasses.asdict`` on a :class:`TokenResult`."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return TokenResult(**fields)
