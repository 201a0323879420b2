"""The model's tensor in the place of the engine's: what was caused there heals downstream, what remains is another
fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ditto_core.compare.masks import is_hidden
from ditto_core.engines.cutting import GIVEN, cut
from ditto_core.errors import RunError, SelectorError, UsageError, nearest

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.pair.sessions import Sessions
    from ditto_core.session import Session, SessionInfo, TapSink
    from ditto_core.sites import Tap

PROVED = 0.99
"""Share of the error that has to heal for the replaced sites to be the whole fault."""


@dataclass(frozen=True)
class Replaced:
    """What became of a run with the model's tensors at ``sites``.

    ``before`` and ``after``: the largest rel-L2 of a final output at any step, with the engine's own tensors and with
    the model's. ``remaining``: sites that still exceed their bound, in topological order. ``comparison``: the run. True
    where the error healed by 99 % and no site exceeds its bound any more: the sites are the whole fault.
    """

    sites: tuple[str, ...]
    before: float
    after: float
    remaining: tuple[str, ...]
    comparison: Comparison = field(repr=False)

    @property
    def healed(self) -> float:
        """The share of the final outputs' error that is gone: 1 for all of it, 0 for nothing, below if it grew."""
        if not math.isfinite(self.after):
            return 0.0
        if not math.isfinite(self.before):
            return 1.0
        return 1 - self.after / self.before if self.before else 0.0

    def __bool__(self) -> bool:
        return self.healed >= PROVED and not self.remaining

    def __str__(self) -> str:
        count, first = len(self.remaining), next(iter(self.remaining), "")
        rest = f"{count} sites still differ, {first} first" if count else "no site differs any more"
        healed = f"heals {percent(self.healed)} of the final outputs' error" if self.healed > 0 else "heals nothing"
        return f"the model's tensor at {', '.join(self.sites)} {healed} ({self.before:.1e} -> {self.after:.1e}); {rest}"


def percent(share: float) -> str:
    """Write a share as a percentage that is never rounded up to 100."""
    return f"{math.trunc(share * 1e4) / 1e2:g} %"


class WithModel:
    """The session of an engine that was cut: the eager model steps along and gives the tensors that were cut off.

    ``taps``: what is replaced; ``dtype``: that of the engine.
    """

    def __init__(self, engine: Session, eager: Session, taps: Sequence[Tap], dtype: str) -> None:
        self._engine, self._eager, self._replaced, self._dtype = engine, eager, taps, dtype

    @property
    def info(self) -> SessionInfo:
        """What the engine is."""
        return self._engine.info

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the engine delivers."""
        return self._engine.taps

    def start(self, batch: int) -> None:
        """Begin a new sequence on both."""
        self._engine.start(batch)
        self._eager.start(batch)

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run the model, then the engine on the model's tensors; see :class:`~ditto_core.session.Session`.

        Raises :class:`RunError` for a site that the model does not compute in this step.
        """
        seen: dict[str, torch.Tensor] = {}
        self._eager.step(inputs, lambda site, tensor: seen.update({site: tensor.clone()}))
        given = {}
        for tap in self._replaced:
            if tap.site not in seen:
                raise RunError(f"{tap.site} cannot be replaced: the model does not compute it in this step")
            given[f"{tap.value}{GIVEN}"] = narrowed(seen[tap.site], tap.dtype or self._dtype, tap.site)
        return self._engine.step({**inputs, **given}, sink)

    def close(self) -> None:
        """Release both."""
        self._engine.close()
        self._eager.close()


def narrowed(tensor: torch.Tensor, dtype: str, site: str) -> torch.Tensor:
    """Return the model's tensor in the engine's dtype; what a mask hides stays hidden, by the engine's own number.

    Raises :class:`RunError` for a number that the dtype does not hold: clamped, it would be another fault.
    """
    kind: torch.dtype = getattr(torch, dtype)
    if not tensor.is_floating_point() or not kind.is_floating_point:
        return tensor
    lowest, beyond = torch.finfo(kind).min, torch.isfinite(tensor) & (tensor.abs() > torch.finfo(kind).max)
    tensor = tensor.masked_fill(beyond & is_hidden(tensor), lowest)
    if bool((tensor.abs() > torch.finfo(kind).max)[torch.isfinite(tensor)].any()):
        most = float(tensor[torch.isfinite(tensor)].abs().max())
        raise RunError(f"{site} cannot be replaced: the model's tensor holds {most:.1e}, beyond {dtype}")
    return tensor.to(kind)


def open_with_model(sessions: Sessions, sites: Sequence[str], isolation: str, timeout: float) -> WithModel:
    """Open the engine with the model's tensors at ``sites``.

    Raises :class:`UsageError` for no site, an encoder-decoder, or a backend whose engine cannot be cut, and
    :class:`~ditto_core.errors.SelectorError` for an unknown site.
    """
    if not sites:
        raise UsageError("no site is given: name the sites whose tensors are replaced")
    if sessions.model.staged:
        raise UsageError(f"{sessions.spec.model.label} has one engine for each kind of step: no tensor can be replaced")
    provenance = sessions.export.provenance
    taps = []
    for site in sites:
        tap = provenance.find(site)
        if tap is None:
            known = provenance.sites
            raise SelectorError(f"the model has no site {site!r}{nearest(site, known)}; it has {len(known)}")
        taps.append(tap)
    engine = cut(sessions.workspace.cache, sessions.built, [tap.value for tap in taps])
    eager = sessions.workspace.eager(sessions.spec, tuple(taps))
    return WithModel(engine.open(isolation, timeout), eager, taps, sessions.spec.dtype)


def replaced(sites: Sequence[str], before: Comparison, after: Comparison) -> Replaced:
    """Compare two runs."""
    remaining = tuple(site for site in after.sites if site in {r.site for r in after.failures})
    return Replaced(tuple(sites), final_error(before), final_error(after), remaining, after)


def final_error(comparison: Comparison) -> float:
    """Return the largest rel-L2 of a final output at any step; NaN and infinity count as infinite."""
    errors = [result.metrics.rel_l2 for result in comparison.results if result.final]
    return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)
