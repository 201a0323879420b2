"""A recorded trace as a session: it replays what was recorded, on the very tokens that it was recorded on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ditto_core.errors import RunError
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.trace import Trace


class RecordedSession:
    """Implements :class:`~ditto_core.backends.base.Session` over a trace; tensors are read one at a time."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._next = 0

    @property
    def info(self) -> SessionInfo:
        """What was recorded."""
        return replace(self._trace.info, recorded=True)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The taps of the trace, in topological order."""
        return self._trace.taps

    def start(self, batch: int) -> None:
        """Go back to step 0. Raises :class:`RunError` when the trace was recorded with another number of rows."""
        self._next = 0
        recorded = self._rows()
        if recorded not in (None, batch):
            raise RunError(f"{self._where} was recorded with {recorded} rows, this run has {batch}")

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Replay the next step.

        Raises :class:`RunError` when ``inputs`` are not the recorded ones, or after the last step, and
        :class:`~ditto_core.errors.TraceError` when the trace is damaged.
        """
        index = self._next
        if index >= self._trace.steps:
            raise RunError(f"{self._where} ends after {self._trace.steps} steps, step {index} was asked for")
        data = self._trace.step(index)
        problem = difference(inputs, data.inputs)
        if problem:
            raise RunError(f"{self._where} was recorded on other inputs: step {index}, {problem}")
        for site, tensor in data.taps.items():
            sink(site, tensor)
        self._next = index + 1
        return dict(data.outputs)

    def close(self) -> None:
        """Nothing is held open."""

    @property
    def _where(self) -> str:
        return f"trace {self._trace.directory}"

    def _rows(self) -> int | None:
        if not self._trace.steps:
            return None
        tensors = self._trace.meta(0).tensors
        return next((t.shape[0] for t in tensors if t.kind == "input" and t.shape), None)


def difference(given: Mapping[str, torch.Tensor], recorded: Mapping[str, torch.Tensor]) -> str:
    """Say in words where two sets of inputs first differ; an empty string when they are equal. NaN equals NaN."""
    if missing := sorted(set(recorded) - set(given)):
        return f"input {missing[0]!r} was recorded but not given"
    if extra := sorted(set(given) - set(recorded)):
        return f"input {extra[0]!r} was given but not recorded"
    return next((text for name in recorded if (text := differs(name, given[name], recorded[name]))), "")


def differs(name: str, given: torch.Tensor, recorded: torch.Tensor) -> str:
    """Say in words where one input differs from the recorded one; an empty string when it does not."""
    given = given.detach().cpu()
    if given.shape != recorded.shape:
        return f"{name} has shape {list(given.shape)}, recorded was {list(recorded.shape)}"
    if given.dtype != recorded.dtype:
        return f"{name} has dtype {given.dtype}, recorded was {recorded.dtype}"
    unequal = (given != recorded) & ~((given != given) & (recorded != recorded))  # noqa: PLR0124 (NaN differs from itself)
    if not bool(unequal.any()):
        return ""
    where = tuple(int(i) for i in unequal.nonzero()[0])
    return f"{name}{list(where)} is {given[where].item()}, recorded was {recorded[where].item()}"
