"""What a pytest run holds: one workspace, the sessions of the last spec, and what came up while they were made."""

from __future__ import annotations

import atexit
import gc
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ditto_core.errors import BackendError, RunError, UsageError
from pytest_ditto.progress import progress_of
from pytest_ditto.pytest_options import OPTIONS, PytestOptions

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace
    from ditto_core.pair.pair import Pair
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.spec import EngineSpec

NAME_LENGTH = 100


class DtypeMissing(UsageError):
    """A backend has no kernels of the dtype, on any machine."""


class Bench:
    """Makes pairs for tests. Tests of one spec in a row share its sessions; another spec closes them first."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._pair: Pair | None = None

    def pair(self, spec: EngineSpec, options: PairOptions) -> Pair:
        """Return a pair without comparisons, with the last one's sessions where they and the model are the same."""
        from ditto_core.pair.pair import Pair

        last = self._pair
        changed = self.workspace.renew(spec.model)
        if last is not None and not changed and last.spec == spec and last.options.same_sessions(options):
            self._pair = Pair(self.workspace, spec, options, sessions=last.sessions)
        else:
            self.close()
            self.workspace.keep_only(spec.model)
            self._pair = Pair(self.workspace, spec, options)
        return self._pair

    def close(self) -> None:
        """Release the sessions."""
        if self._pair is not None:
            self._pair.close()
            self._pair = None


BENCH = pytest.StashKey[Bench]()
NOTES = pytest.StashKey[list[str]]()
"""Events that nobody has reported yet: a damaged cache entry, waiting for another process."""


def bench_of(config: pytest.Config) -> Bench:
    """Return the run's bench; the first call makes it, and loads torch."""
    if BENCH not in config.stash:
        atexit.register(gc.freeze)  # else Python looks through all of torch's objects before it ends: 2 s
        from ditto_core.cache import Cache
        from ditto_core.engines.workspace import Workspace

        options = config.stash[OPTIONS]
        config.stash[BENCH] = Bench(
            Workspace(
                cache=Cache.at(options.cache_dir),
                say=config.stash[NOTES].append,
                progress=progress_of(config),
                artifacts=options.artifacts_dir,
            )
        )
    return config.stash[BENCH]


def unavailable(spec: EngineSpec) -> str:
    """Return why a spec's backend cannot be used here, or an empty string.

    Raises :class:`DtypeMissing` for a dtype that the backend lacks, :class:`UsageError` for an unknown option, and
    :class:`RunError` for a backend that is installed and broken.
    """
    from ditto_core.backends.registry import get_backend

    try:
        backend = get_backend(spec.backend)
    except ModuleNotFoundError as error:
        return f"backend {spec.backend} cannot be loaded: {error}"
    except ImportError as error:
        raise RunError(f"backend {spec.backend} cannot be loaded: {error}") from error
    if spec.dtype not in backend.dtypes:
        raise DtypeMissing(f"backend {spec.backend} has no {spec.dtype}, expected {', '.join(backend.dtypes)}")
    try:
        backend.check(spec)
    except BackendError as error:
        return str(error)
    return ""


def dump_folder(options: PytestOptions, nodeid: str) -> Path | None:
    """Return the folder of a test's dump: its readable name, and a digest that keeps similar names apart."""
    if options.dump_dir is None:
        return None
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", nodeid).strip("-.")[-NAME_LENGTH:]
    return options.dump_dir / f"{name}-{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}"
