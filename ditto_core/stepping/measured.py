"""What a run has measured so far, before it is judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ditto_core.compare.result import ObserverEffect, SiteResult
from ditto_core.compare.tokens import Flip, LogitsMetrics
from ditto_core.stepping.choices import Tied
from ditto_core.stepping.floor import Floor


class Elementwise(NamedTuple):
    """What counts as a mismatched element where no rule says so; None: the dtype's usual tolerance."""

    rtol: float | None = None
    atol: float | None = None
    equal_nan: bool = False


@dataclass
class Measured:
    """What a run has measured so far."""

    results: list[SiteResult] = field(default_factory=list)
    logits: list[LogitsMetrics] = field(default_factory=list)
    flips: dict[int, tuple[Flip, ...]] = field(default_factory=dict)
    """Where the two sides choose another token, by step; the index of each is the row."""
    floor: Floor = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    observer: ObserverEffect | None = None
    engine_tokens: list[list[int]] = field(default_factory=list)
    reference_tokens: list[list[int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tied: dict[int, Tied] = field(default_factory=dict)
    """Rows of the batch that depend on a choice of experts that nearly tied."""
    random: set[str] = field(default_factory=set)
    """Sites at which the reference does not repeat itself."""

    def note(self, text: str) -> None:
        """Add what the user should know, once."""
        if text not in self.notes:
            self.notes.append(text)
