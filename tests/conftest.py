"""One cache for the whole run, so that each tiny model is exported once; workers and child processes share it."""

import os
from pathlib import Path

import pytest

from ditto_core.cache import Cache
from ditto_core.workspace import Workspace


@pytest.fixture(scope="session")
def shared_cache_dir(tmp_path_factory):
    """``$DITTO_TEST_CACHE`` keeps engines between runs while developing; CI starts empty."""
    kept = os.environ.get("DITTO_TEST_CACHE")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    path = Path(kept) if kept else shared / "ditto-cache"
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def workspace(shared_cache_dir):
    return Workspace(Cache(shared_cache_dir))
