"""The engines of a staged model as one session: that of the first step, then that of the later ones.

Staged are encoder-decoders, and decoders that see images: their first step takes more than later ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ditto_core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ditto_core.engines.engine import Engine
    from ditto_core.engines.workspace import Workspace
    from ditto_core.session import Session, SessionInfo, TapSink
    from ditto_core.sites import Tap


LATER = "later"
"""The folder in a copied engine of a staged model that holds the engine of its later steps."""


class StagedSession:
    """Runs one engine in the first step, another in the later ones, and gives each what the last one returned.

    ``later`` builds and opens the second engine when a sequence has a second step. Its taps are among the first's.
    """

    def __init__(self, first: Session, later: Callable[[], Session]) -> None:
        self._first, self._open = first, later
        self._later: Session | None = None
        self._rows = 1
        self._carried: dict[str, torch.Tensor] = {}
        self.idle: frozenset[str] = frozenset()

    @property
    def info(self) -> SessionInfo:
        """What the first engine is."""
        return self._first.info

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the first step delivers, in topological order."""
        return self._first.taps

    @property
    def continued(self) -> bool:
        """Tell whether a sequence had a second step."""
        return self._later is not None

    @property
    def past(self) -> Mapping[str, torch.Tensor]:
        """What the next step reads, by the names of the graph's inputs."""
        return self._carried

    def start(self, batch: int) -> None:
        """Begin a new sequence."""
        self._rows, self._carried, self.idle = batch, {}, frozenset()
        self._first.start(batch)

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass: the first with all of the model's inputs, a later one with new token ids."""
        from ditto_core.model.states import state_of, taken

        session = self._next() if self._carried else self._first
        outputs = session.step({**inputs, **self._carried}, sink)
        states = {taken(state_of(name)): outputs.pop(name).clone() for name in list(outputs) if state_of(name)}
        self._carried = {**self._carried, **states}  # what was encoded stays
        return outputs

    def close(self) -> None:
        """Release both engines."""
        self._carried = {}
        self._first.close()
        if self._later is not None:
            self._later.close()

    def _next(self) -> Session:
        if self._later is None:
            self._later = self._open()
        if not self.idle:
            self._later.start(self._rows)
            self.idle = frozenset(tap.site for tap in self.taps) - {tap.site for tap in self._later.taps}
        return self._later


def open_engine(workspace: Workspace, engine: Engine, isolation: str = "", timeout: float = 0) -> Session:
    """Load an engine; that of a staged model with the engine of its later steps.

    ``isolation`` and ``timeout`` are those of :meth:`~ditto_core.engines.engine.Engine.open`.
    """
    if not workspace.export(engine.spec).staged:
        return engine.open(isolation, timeout)
    return StagedSession(
        engine.open(isolation, timeout), lambda: later_engine(workspace, engine, isolation).open(isolation, timeout)
    )


def copy_engine(workspace: Workspace, engine: Engine, directory: Path) -> Engine:
    """Copy an engine out of the cache; that of a staged model with the engine of its later steps."""
    copied = engine.copy_to(directory)
    if workspace.export(engine.spec).staged and not engine.spec.option("file"):
        later_engine(workspace, engine).copy_to(directory / LATER)
    return copied


def open_copy(engine: Engine) -> Session:
    """Load the engines of a staged model from a directory that :func:`copy_engine` wrote."""
    return StagedSession(engine.open(), lambda: type(engine).load(engine.directory / LATER).open())


def later_engine(workspace: Workspace, engine: Engine, isolation: str = "") -> Engine:
    """Build the engine of a staged model's later steps, with those of the first's taps that they have too.

    Raises :class:`UsageError` for a file that is there already: it is one graph.
    """
    if engine.spec.option("file"):
        raise UsageError(f"{engine.spec.model.label} is run from one file, which has one step: call run(inputs)")
    known = workspace.export(engine.spec.later_steps({})).provenance
    taps = {}
    for tap in engine.taps:
        name = next((name for name in (tap.site, *tap.aliases) if known.find(name)), "")
        if name:
            taps[name] = tap.site
    return workspace.build(engine.spec.later_steps(taps), isolation)
