"""The registry of backends: entry points, by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packaging.requirements import Requirement

from ditto_core.backends.base import Backend, NeedsDevice
from ditto_core.errors import BackendError, RunError, first_line, nearest
from ditto_core.spec import FILE_BACKENDS

ENTRY_POINTS = "ditto_core.backends"


def backend_names() -> list[str]:
    """Return the names of all registered backends, sorted, without those that only ``engine=`` asks for."""
    return sorted({point.name for point in registered()} - {*FILE_BACKENDS.values()})


def registered() -> tuple[EntryPoint, ...]:
    """Return the entry points of all backends. They are read once for an import path: all distributions are opened."""
    return _registered(tuple(sys.path))


@lru_cache(maxsize=8)
def _registered(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINTS))


def get_backend(name: str) -> Backend:
    """Return a backend by name. Raises :class:`BackendError` for an unknown one."""
    for point in registered():
        if point.name == name:
            backend: Backend = point.load()()
            return backend
    names = backend_names()
    raise BackendError(f"unknown backend {name!r}, registered: {', '.join(names)}{nearest(name, names)}")


def import_package(name: str, install: str = "") -> Any:
    """Import a package that a backend needs; ``install`` tells how to get it, by default the extra of the same name.

    Raises :class:`BackendError` where it is not installed, :class:`RunError` where it is and does not load: only what
    is missing may skip a test.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0]):
            install = install or f"pip install 'pytest-ditto-engine[{name}]'"
            raise BackendError(f"{name} is not installed: {install}") from error
        raise RunError(f"{name} is installed but does not load ({first_line(error)}): install it again") from error


def libraries(name: str) -> tuple[str, ...]:
    """Return the distributions that a backend may need, without importing it.

    These are the requirements of the extras that are named after it, ``NAME`` and ``NAME-…``, in the distribution that
    registers it; without such an extra it is the distribution of the backend's own name.
    """
    points = (point for point in registered() if point.name == name)
    return tuple(dict.fromkeys(each for point in points for each in required(point))) or (name,)


def required(point: EntryPoint) -> Iterator[str]:
    """Yield what the extras that are named after a backend require."""
    if point.dist is None:
        return
    extras = point.dist.metadata.get_all("Provides-Extra") or []
    own = [extra for extra in extras if extra == point.name or extra.startswith(f"{point.name}-")]
    for requirement in map(Requirement, point.dist.requires or ()):
        marker = requirement.marker
        if marker and not marker.evaluate({"extra": ""}) and any(marker.evaluate({"extra": extra}) for extra in own):
            yield requirement.name


def check_runs(name: str) -> None:
    """Raise :class:`BackendError` when a backend's engines cannot run here, before one is built to be run."""
    backend = get_backend(name)
    if isinstance(backend, NeedsDevice):
        backend.check_runs()


def iter_backends() -> Iterator[Backend]:
    """Yield every registered backend."""
    for name in backend_names():
        yield get_backend(name)
