"""A build or a session in a child process: a crash or a hang fails one test, and the next one starts anew."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from ditto_core.backends.base import Backend, BuildReport, BuildRequest, IsolatesSessions
from ditto_core.errors import BuildError, RunError, UsageError
from ditto_core.session import Session, SessionInfo, ShowsCache, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec, ModelSource

PROCESS, NONE = "process", "none"
TIMEOUT = 600.0
"""Seconds that an engine may take to load, or a step from one tensor to the next."""

BUILD_TIMEOUT = 3600.0
"""Seconds that a build may take in a child process."""

Packed = tuple[str, tuple[int, ...], Any]


def open_backend(
    backend: Backend, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...], isolation: str = "", timeout: float = 0
) -> Session:
    """Open an engine here (``isolation="none"``) or in a child process (``"process"``); empty: as the backend asks.

    ``timeout`` in seconds, 0 for :data:`TIMEOUT`. Raises what the backend raises, and
    :class:`~ditto_core.errors.RunError` when the child dies.
    """
    wanted = isolation or (backend.isolation if isinstance(backend, IsolatesSessions) else NONE)
    if wanted == NONE:
        return backend.open(spec, directory, taps)
    session = ChildSession(backend, spec, directory, taps, timeout or TIMEOUT)
    return CachedChildSession.of(session) if session.shows_cache else session


def build_backend(backend: Backend, request: BuildRequest, isolation: str = "") -> BuildReport:
    """Build an engine here, or in a child process for ``isolation="process"``.

    Raises what the backend raises, and :class:`~ditto_core.errors.BuildError` when the child dies or is silent for
    :data:`BUILD_TIMEOUT`.
    """
    if isolation != PROCESS:
        return backend.build(request)
    from ditto_core.system.worker import Worker

    name = f"the build of the {backend.name} engine"
    worker = Worker("ditto_core.backends.child:Served", name, timeout=BUILD_TIMEOUT, failure=BuildError)
    found: list[BuildReport] = []
    try:
        worker.ask(("build", kind_of(backend), portable(request)), found.append)
    finally:
        worker.close()
    return found[0]


def portable(request: BuildRequest) -> BuildRequest:
    """Return the request without the loaded model, and without a factory that another process cannot import."""
    source = request.spec.model
    try:
        pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError):
        absent = partial(not_importable, source.label)
        return replace(request, spec=replace(request.spec, model=ModelSource(source.label)), load=absent)
    return replace(request, load=None)


def not_importable(label: str) -> NoReturn:
    """Refuse to make a model in a child process."""
    raise UsageError(
        f"isolation='process' builds in a child process, which cannot make {label}: give a path, a Hub id or a "
        "function of a module"
    )


def kind_of(backend: Backend) -> str:
    """Return ``module:name`` of a backend's class."""
    return f"{type(backend).__module__}:{type(backend).__qualname__}"


def backend_of(kind: str) -> Backend:
    """Inverse of :func:`kind_of`."""
    module, _, name = kind.partition(":")
    backend: Backend = getattr(importlib.import_module(module), name)()
    return backend


class ChildSession:
    """Steps a session that lives in a child process. A child that died is started again by :meth:`start`."""

    def __init__(
        self, backend: Backend, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...], timeout: float
    ) -> None:
        if spec.model.factory is not None:  # what made the module need not be importable there
            spec = replace(spec, model=ModelSource(spec.model.label))
        self._opening = "open", kind_of(backend), spec, directory, taps
        self._backend, self._timeout = backend.name, timeout
        self.taps = taps
        self._launch()

    def _launch(self) -> None:
        from ditto_core.system.worker import Worker

        self._worker = Worker("ditto_core.backends.child:Served", f"the {self._backend} engine", timeout=self._timeout)
        opened: list[Any] = []
        try:
            self._worker.ask(self._opening, opened.append)
        except BaseException:
            self._worker.close()
            raise
        info, self.taps, self.shows_cache = opened
        self.info: SessionInfo = replace(info, facts={**info.facts, "isolation": PROCESS})

    def start(self, batch: int) -> None:
        """Begin a new sequence, in a new process if the last one died."""
        if not self._worker.alive:
            self._launch()
        self._worker.ask(("start", batch), ignore)

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.session.Session`. Tensors come one by one, on the CPU."""
        outputs: dict[str, torch.Tensor] = {}

        def take(part: tuple[bool, str, Packed]) -> None:
            is_tap, name, packed = part
            (sink if is_tap else outputs.__setitem__)(name, unpack(packed))

        self._ask(("step", {name: pack(tensor) for name, tensor in inputs.items()}), take)
        return outputs

    def _ask(self, question: Any, take: Callable[[Any], None]) -> None:
        if not self._worker.alive:
            raise RunError("the engine's process has ended, its KV cache with it; start a new sequence")
        self._worker.ask(question, take)

    def close(self) -> None:
        """Release the engine and end its process."""
        self._worker.close()


class CachedChildSession(ChildSession):
    """One whose engine shows its KV cache."""

    @classmethod
    def of(cls, session: ChildSession) -> CachedChildSession:
        """Return the same session with its cache in sight."""
        made = cls.__new__(cls)
        made.__dict__ = session.__dict__
        return made

    @property
    def past(self) -> Mapping[str, torch.Tensor]:
        """The KV cache that the next step reads, by the names of the graph's inputs."""
        found: dict[str, torch.Tensor] = {}
        self._ask(("past",), lambda part: found.__setitem__(part[0], unpack(part[1])))
        return found


class Served:
    """The child's part: a question names one of the methods and holds its arguments."""

    def __call__(self, question: tuple[Any, ...], give: Callable[[Any], None]) -> None:
        """Answer one question."""
        name, *arguments = question
        getattr(self, name)(give, *arguments)

    def open(
        self, give: Callable[[Any], None], kind: str, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]
    ) -> None:
        """Load the engine and describe its session."""
        self.session = backend_of(kind).open(spec, directory, taps)
        for each in (self.session.info, self.session.taps, isinstance(self.session, ShowsCache)):
            give(each)

    def build(self, give: Callable[[Any], None], kind: str, request: BuildRequest) -> None:
        """Build an engine and give the report."""
        give(backend_of(kind).build(request))

    def start(self, give: Callable[[Any], None], batch: int) -> None:
        """Begin a new sequence."""
        self.session.start(batch)

    def step(self, give: Callable[[Any], None], inputs: Mapping[str, Packed]) -> None:
        """Run one forward pass; taps are given while it runs."""
        given = {name: unpack(packed) for name, packed in inputs.items()}
        outputs = self.session.step(given, lambda site, tensor: give((True, site, pack(tensor))))
        for name, tensor in outputs.items():
            give((False, name, pack(tensor)))

    def past(self, give: Callable[[Any], None]) -> None:
        """Give the KV cache."""
        assert isinstance(self.session, ShowsCache)
        for name, tensor in self.session.past.items():
            give((name, pack(tensor)))


def ignore(part: Any) -> None:
    """Take nothing."""


def pack(tensor: torch.Tensor) -> Packed:
    """Return dtype, shape and bytes: numpy has no bfloat16."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy()


def unpack(packed: Packed) -> torch.Tensor:
    """Inverse of :func:`pack`."""
    dtype, shape, data = packed
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = data  # numpy cannot view no bytes as another dtype
    return tensor
