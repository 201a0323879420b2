"""The built engine of a pair and the sessions beside it, each opened when it is first asked for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ditto_core.backends.base import check_runs
from ditto_core.system.gpus import check_device

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine
    from ditto_core.engines.workspace import Workspace
    from ditto_core.pair.options import PairOptions
    from ditto_core.session import Session
    from ditto_core.spec import EngineSpec

SESSIONS = ("engine", "plain", "reference", "noisy")


class PairSessions:
    """Engine, engine without taps, reference, and the reference in the engine's dtype.

    Raises :class:`~ditto_core.errors.UsageError` for options that name a device which is not there.
    """

    def __init__(self, workspace: Workspace, spec: EngineSpec, options: PairOptions, engine: Engine | None) -> None:
        check_device(options.device)
        self.workspace, self.spec, self.options = workspace, spec, options
        self._built = engine

    @cached_property
    def engine_files(self) -> Engine:
        """The built engine on disk. One that could not run here is not built."""
        if self._built is not None:
            return self._built
        check_runs(self.spec.backend)
        return self.workspace.build(self.spec)

    @cached_property
    def engine(self) -> Session:
        """The engine's session."""
        return self.engine_files.open()

    @cached_property
    def plain(self) -> Session | None:
        """The same engine without taps, or None when the observer check is off."""
        if not self.options.observer or not self.spec.outputs:
            return None
        return self.workspace.build(self.spec.plain()).open()

    @cached_property
    def reference(self) -> Session:
        """The reference's session."""
        from ditto_core.pair.reference import open_reference

        return open_reference(self.workspace, self.spec, self.engine_files, self.options)

    @cached_property
    def noisy(self) -> Session | None:
        """The eager model in the engine's dtype: its error against the eager reference is the noise floor."""
        if self.reference.info.backend != "eager" or self.engine.info.dtype != self.spec.dtype:
            return None
        if self.reference.info.dtype == self.spec.dtype:
            return None
        return self.workspace.eager(self.spec, self.engine.taps, dtype=self.spec.dtype, device=self.options.device)

    def close(self) -> None:
        """Release the sessions that were opened."""
        for name in SESSIONS:
            session = self.__dict__.pop(name, None)
            if session is not None:
                session.close()

    def _hand_over(self, heir: PairSessions) -> None:
        """Give what is built and open to another pair of the same engine."""
        for name in ("engine_files", *SESSIONS):
            if name in self.__dict__:
                heir.__dict__[name] = self.__dict__.pop(name)
