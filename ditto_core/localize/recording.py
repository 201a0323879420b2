"""The replay of the kept steps, recorded: what the model's own code computes from the engine's tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ditto_core.causes.evidence import Seen
from ditto_core.causes.slices import Slice
from ditto_core.localize.local import Kept, Localizer, Valid
from ditto_core.model.tape import Tape

if TYPE_CHECKING:
    from ditto_core.compare.blame import LocalResult

FAITHFUL = 1e-2
"""Share of a local error, or of its bound, by which a slice may miss it: else it is not the model's computation."""


@dataclass(frozen=True)
class Recording:
    """The tapes of the kept steps, with what was measured there."""

    localizer: Localizer
    steps: tuple[tuple[Kept, Tape], ...]
    results: Mapping[tuple[int, str], LocalResult]

    @classmethod
    def of(cls, localizer: Localizer, sites: Collection[str] = ()) -> Recording:
        """Replay the kept steps, up to the last of some sites or to the end."""
        results = {(result.step, result.site): result for result in localizer.results}
        return cls(localizer, tuple(recorded(localizer, sites)), results)

    def slices(self, site: str, unfolded: Collection[str] = ()) -> list[Slice]:
        """Return a site's slices that are the same computation as at its first flagged step, by step."""
        made = self.every_slice(site, unfolded)
        first = next((part for part in made if part.flagged), None)
        return [] if first is None else [part for part in made if part.signature == first.signature]

    def every_slice(self, site: str, unfolded: Collection[str] = ()) -> list[Slice]:
        """Return a site's slices by step; none where one does not reproduce the local error that was measured.

        Then the tape is not what the model computes, and nothing may be said by it.
        """
        made = [self._slice(kept, tape, site, unfolded) for kept, tape in self.steps if site in tape.sites]
        return made if all(self._faithful(part) for part in made) else []

    def _slice(self, kept: Kept, tape: Tape, site: str, unfolded: Collection[str]) -> Slice:
        order = list(tape.sites)
        upstream = [name for name in order[: order.index(site)] if not tape.same(name, site)]
        return Slice(tape, seen(self.localizer, self.results[kept.step, site], kept, upstream), unfolded)

    def _faithful(self, part: Slice) -> bool:
        result = self.results[part.seen.step, part.seen.site]
        measured = result.metrics.rel_l2
        # other numbers of a mask, and infinity where the right tensor is zero, are no measure
        if part.mask or not math.isfinite(measured):
            return part.flagged == result.flagged
        return abs(part.now - measured) <= FAITHFUL * max(measured, result.bound)


def seen(localizer: Localizer, result: LocalResult, kept: Kept, shown: Collection[str]) -> Seen:
    """Collect what is known of a site at a step; the engine's tensors at ``shown`` are reachable by all their names."""
    tap = next(tap for tap in localizer.taps if tap.site == result.site)
    captured = {
        name: kept.actual[t.site]
        for t in localizer.taps
        if t.site in shown and t.site in kept.actual
        for name in (t.site, *t.aliases)
    }
    return Seen(
        result.site,
        kept.step,
        kept.actual[result.site].double(),
        Valid(kept.inputs).of(tap),
        kept.inputs,
        captured,
        result.bound,
        result.bound / localizer.factor,
    )


def recorded(localizer: Localizer, sites: Collection[str]) -> Iterator[tuple[Kept, Tape]]:
    """Yield the kept steps, each with the tape of its replay up to the last of some sites, or to the end."""
    replay = localizer.truth
    replay.start()
    for kept in localizer.kept:
        tape = Tape(replay.names(kept.inputs), sites)
        replay.step(kept.inputs, kept.actual, ignored, tape)
        yield kept, tape


def ignored(tap: object, tensor: torch.Tensor) -> None:
    """Do nothing with what the replay hands out."""
