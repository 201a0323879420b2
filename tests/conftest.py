"""One cache for the whole run, so that each tiny model is exported once; workers and child processes share it."""

import os
from pathlib import Path

import pytest

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace


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


@pytest.fixture
def standin(request, tmp_path_factory, monkeypatch):
    """The stand-in for TensorRT-LLM, of the version that is the parameter, importable as ``tensorrt_llm``."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="the stand-in for TensorRT-LLM builds with TensorRT-RTX")
    import standin_trtllm

    from ditto_core.backends import registry
    from ditto_core.backends.trtllm import TrtllmBackend, detect

    version = getattr(request, "param", "0.16.0")
    folder = tmp_path_factory.getbasetemp() / f"standin-{version}"
    standin_trtllm.write_package(folder, version)
    standin_trtllm.forget()
    monkeypatch.syspath_prepend(str(folder))
    found = registry.get_backend
    monkeypatch.setattr(
        "ditto_core.engines.engine.get_backend", lambda n: TrtllmBackend() if n == "trtllm" else found(n)
    )
    monkeypatch.setattr(
        "ditto_core.engines.workspace.get_backend", lambda n: TrtllmBackend() if n == "trtllm" else found(n)
    )
    found_version = detect.installed
    monkeypatch.setattr(detect, "installed", lambda n: "10.0" if n == "tensorrt" else found_version(n))
    yield standin_trtllm
    standin_trtllm.forget()
