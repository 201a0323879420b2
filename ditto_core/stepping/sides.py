"""The sides of a run: their sessions, and what is recorded of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ditto_core.session import Session


class Recorder(Protocol):
    """Takes what one side of a run produces; :class:`ditto_core.trace.TraceWriter` is one."""

    def step(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Enter a context that yields an object with ``tap(site, tensor)`` and ``finish(outputs, tokens)``."""
        ...

    def close(self) -> None:
        """Mark the recording as complete."""
        ...


class TapReader(Protocol):
    """Reads the engine's taps of each step before they are dropped; :class:`ditto_core.localize.Localizer` is one."""

    def start(self) -> None:
        """Begin a new sequence."""
        ...

    def take(self, step: int, inputs: Mapping[str, torch.Tensor], captured: Mapping[str, torch.Tensor]) -> None:
        """Read the taps of a step, by site."""
        ...


@dataclass
class Sides:
    """The sessions of a run. ``low_precision`` is the reference in the engine's dtype (measures the noise floor), of
    which ``samples`` are more samples: the largest error of all is the floor;
    ``untapped`` is the engine without taps (observer check). The recorders write the engine's and the reference's
    traces; ``localizer`` measures local errors."""

    engine: Session
    reference: Session
    low_precision: Session | None = None
    untapped: Session | None = None
    engine_recorder: Recorder | None = None
    reference_recorder: Recorder | None = None
    localizer: TapReader | None = None
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the dimensions of the model's outputs, where they are known."""
    samples: Sequence[Session] = ()

    def start(self, rows: int) -> None:
        """Begin a new sequence on every side."""
        if self.localizer is not None:
            self.localizer.start()
        for session in (self.engine, self.reference, self.low_precision, self.untapped, *self.samples):
            if session is not None:
                session.start(rows)


@contextmanager
def recording(sides: Sides, writers: tuple[Recorder, Recorder] | None) -> Iterator[None]:
    """Attach trace writers to both sides for the time of a run, and complete the traces when it ends well."""
    if writers is None:
        yield
        return
    sides.engine_recorder, sides.reference_recorder = writers
    try:
        yield
        for writer in writers:
            writer.close()
    finally:
        sides.engine_recorder = sides.reference_recorder = None
