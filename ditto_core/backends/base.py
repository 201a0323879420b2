"""The one protocol for everything that can be stepped, the backend protocol, and the registry of backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ditto_core.errors import BackendError, nearest

if TYPE_CHECKING:
    from ditto_core.session import Session
    from ditto_core.sites import Tap
    from ditto_core.spec import EngineSpec

ENTRY_POINTS = "ditto_core.backends"


@dataclass(frozen=True)
class BuildRequest:
    """What a backend gets to build from: an ONNX file and the taps that it must expose.

    ``onnx_path`` has no taps among its outputs but every tap's value in its graph. ``outputs`` are the model's own
    final outputs. ``decoder`` tells whether the graph has KV-cache inputs ``past_key_values.{i}.key|value`` and outputs
    ``present.{i}.key|value`` besides. ``artifacts`` is a folder for readable by-products, or None.
    """

    spec: EngineSpec
    onnx_path: Path
    taps: tuple[Tap, ...]
    outputs: tuple[str, ...]
    decoder: bool
    directory: Path
    artifacts: Path | None = None


@dataclass(frozen=True)
class BuildReport:
    """What came of a build: taps that the engine exposes, those it could not (site -> reason), free-form facts."""

    taps: tuple[Tap, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Builds engines and opens them. It knows nothing of comparison."""

    name: str
    dtypes: tuple[str, ...]

    def check(self, spec: EngineSpec) -> None:
        """Raise :class:`BackendError` with the remedy when this spec cannot be built here."""
        ...

    def versions(self) -> dict[str, str]:
        """Return what else decides the engine's bits: library, driver, GPU. Part of the cache key."""
        ...

    def build(self, request: BuildRequest) -> BuildReport:
        """Write the engine into ``request.directory``."""
        ...

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> Session:
        """Load the engine that :meth:`build` wrote."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A backend that can tell what is in an engine it wrote, without running it."""

    def inspect(self, directory: Path) -> Inspection:
        """Describe the engine in a directory. Raises :class:`~ditto_core.errors.DittoError` when it cannot be read."""
        ...


@runtime_checkable
class WritesArtifacts(Protocol):
    """A backend that can write the readable by-products of an engine that was built before, without building again."""

    def write_artifacts(self, request: BuildRequest) -> None:
        """Write by-products into ``request.artifacts`` for the engine in ``request.directory``."""
        ...


@runtime_checkable
class NeedsDevice(Protocol):
    """A backend that builds engines on machines where they cannot run."""

    def check_runs(self) -> None:
        """Raise :class:`BackendError` with the reason when no engine of this backend can run here."""
        ...


@dataclass(frozen=True)
class EngineTensor:
    """A tensor at an engine's border: torch's dtype name, sizes or names of its dimensions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class EngineLayer:
    """A layer of an engine: its kernel, and the module paths whose computation it holds."""

    name: str
    kind: str
    kernel: str = ""
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """What is in an engine. ``profiles`` map dimension names to (min, opt, max)."""

    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    layers: tuple[EngineLayer, ...] = ()
    profiles: tuple[Mapping[str, tuple[int, int, int]], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def backend_names() -> list[str]:
    """Return the names of all registered backends, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINTS)})


def get_backend(name: str) -> Backend:
    """Return a backend by name. Raises :class:`BackendError` for an unknown one."""
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            backend: Backend = point.load()()
            return backend
    names = backend_names()
    raise BackendError(f"unknown backend {name!r}, registered: {', '.join(names)}{nearest(name, names)}")


def check_runs(name: str) -> None:
    """Raise :class:`BackendError` when a backend's engines cannot run here, before one is built to be run."""
    backend = get_backend(name)
    if isinstance(backend, NeedsDevice):
        backend.check_runs()


def iter_backends() -> Iterator[Backend]:
    """Yield every registered backend."""
    for name in backend_names():
        yield get_backend(name)
