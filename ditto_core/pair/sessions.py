"""The sessions of a pair: the engine's and those beside it, each opened when it is first asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from ditto_core.backends.base import ServesRequests
from ditto_core.backends.registry import check_runs, get_backend
from ditto_core.engines.origin import refuse_another_model
from ditto_core.engines.staged import StagedSession, open_engine
from ditto_core.errors import UsageError
from ditto_core.pair.pair_options import OWN_WEIGHTS
from ditto_core.stepping.inputs import weight_differences
from ditto_core.system.gpus import check_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ditto_core.engines.engine import Engine
    from ditto_core.engines.workspace import Workspace
    from ditto_core.model.exported import Export
    from ditto_core.model.loading import LoadedModel
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.session import Session, TakesRequests
    from ditto_core.spec import EngineSpec

SESSIONS = ("engine", "untapped", "reference", "low_precision", "requests")


class Sessions:
    """Engine, engine without taps, reference, and the reference in the engine's dtype.

    ``built`` is an engine that exists already; else the workspace builds ``spec``'s. Raises
    :class:`~ditto_core.errors.UsageError` for options that name a device which is not there, and for an engine that was
    built of another model.
    """

    def __init__(self, workspace: Workspace, spec: EngineSpec, options: PairOptions, built: Engine | None) -> None:
        check_device(options.device)
        self.workspace, self.spec = workspace, spec
        self._options, self._given = options, built
        if built is not None:
            refuse_another_model(built, spec.model, workspace.digest)

    @property
    def given(self) -> bool:
        """Whether the engine existed already, so that another one of its spec need not be like it."""
        return self._given is not None

    @cached_property
    def built(self) -> Engine:
        """The built engine on disk. One that could not run here is not built."""
        if self._given is not None:
            return self._given
        check_runs(self.spec.backend)
        return self.workspace.build(self.spec, self._options.isolation)

    @property
    def model(self) -> LoadedModel:
        """The float32 model that the engine is built from, loaded once a workspace."""
        return self.workspace.model(self.spec.model, self.spec.attention)

    @property
    def export(self) -> Export:
        """The export that the engine is built from."""
        return self.workspace.export(self.spec)

    @cached_property
    def output_axes(self) -> dict[str, tuple[str, ...]]:
        """The names of the dimensions of the final outputs in the exported graph; empty for a decoder, whose logits are
        [batch, length, vocab], and where there is no graph."""
        if self.built.decoder or not self.export.onnx_path.exists():
            return {}
        from ditto_core.graphs.graph import Graph

        graph = Graph.read(self.export.onnx_path)
        return {name: graph.axes(name) for name in self.export.finals}

    @cached_property
    def engine(self) -> Session:
        """The engine's session."""
        return self._open(self.built)

    @cached_property
    def weight_differences(self) -> tuple[str, ...]:
        """Lines where weights of the engine are not the model's: they are read once."""
        return tuple(weight_differences(self.engine, self.model.module))

    @cached_property
    def untapped(self) -> Session | None:
        """The same engine without taps, or None when the observer check is off."""
        if not self._options.observer or not self.spec.outputs:
            return None
        return self._open(self.workspace.build(self.spec.untapped(), self._options.isolation))

    @cached_property
    def own_models(self) -> tuple[LoadedModel, LoadedModel]:
        """The model with the engine's own weights, and the same that rounds as the engine's kernels do.

        Raises :class:`UsageError` when nothing tells the engine's weights.
        """
        from ditto_core.pair.reference import own_models

        return own_models(self.workspace, self.spec)

    def _own(self, model: LoadedModel, dtype: str) -> Session:
        """Open the model with the engine's own weights."""
        from ditto_core.pair.reference import own_session

        return own_session(model, self.built, dtype, self._options.device)

    @property
    def replayed(self) -> LoadedModel:
        """The model that local errors are measured against."""
        return self.own_models[1] if self._options.reference == OWN_WEIGHTS else self.model

    @cached_property
    def requests(self) -> TakesRequests:
        """The engine without taps as a server of requests. Raises :class:`UsageError` where the backend has none."""
        backend, plain = get_backend(self.spec.backend), self.spec.untapped()
        if not isinstance(backend, ServesRequests):
            raise UsageError(f"{self.spec.backend} takes no requests: expected a server, such as vllm")
        return backend.open_requests(plain, self.workspace.build(plain).directory)

    @cached_property
    def reference(self) -> Session:
        """The reference's session."""
        from ditto_core.backends.eager import HIGHER

        if self._options.reference == OWN_WEIGHTS:
            return self._own(self.own_models[0], HIGHER[self.spec.dtype])
        from ditto_core.pair.reference import open_reference

        return open_reference(self.workspace, self.spec, self.built, self._options)

    @cached_property
    def low_precision(self) -> Session | None:
        """The eager model in the engine's dtype: its error against the eager reference is the noise floor.

        With the engine's own weights it rounds what the engine's kernels round.
        """
        if self._options.reference == OWN_WEIGHTS:
            return self._own(self.own_models[1], self.spec.dtype)
        if self.reference.info.backend != "eager" or self.engine.info.dtype != self.spec.dtype:
            return None
        if self.reference.info.dtype == self.spec.dtype:
            return None
        return self.workspace.eager(self.spec, self.engine.taps, dtype=self.spec.dtype, device=self._options.device)

    def samples(self, count: int) -> tuple[Session, ...]:
        """Open ``count`` more samples of the low-precision reference, which round products in other ways; none of a
        session that is not the eager model."""
        from ditto_core.backends.eager import EagerSession

        low = self.low_precision
        if not isinstance(low, EagerSession):
            return ()
        model = replace(self.model, module=low.module)  # the same weights: nothing is copied
        how = {"dtype": low.info.dtype, "device": self._options.device}
        return tuple(EagerSession(model, low.taps, **how, sample=sample) for sample in range(1, count + 1))

    def _open(self, engine: Engine) -> Session:
        return open_engine(self.workspace, engine, self._options.isolation, self._options.step_timeout)

    def correct(self) -> bool:
        """Tell whether the engine was built from a cached export of another model; then it is built and opened again.

        A digest does not see everything, and an engine that was given is as it is.
        """
        if self._given is not None or not sum(self.workspace.correct(spec) for spec in self._exported()):
            return False
        self.close()
        del self.built
        return True

    def _exported(self) -> Iterator[EngineSpec]:
        """Yield the specs whose exports the engine was built from."""
        yield self.spec
        if isinstance(self.engine, StagedSession) and self.engine.continued:
            yield self.spec.later_steps({})

    def close(self) -> None:
        """Release the sessions that were opened."""
        self.__dict__.pop("weight_differences", None)
        for name in SESSIONS:
            session = self.__dict__.pop(name, None)
            if session is not None:
                session.close()
