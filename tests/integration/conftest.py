"""Projects with ditto tests in them, run by pytester. One cache for the session: each spec is exported once.

Runs are in process where that is enough, which saves importing torch each time. pytester forgets what an inner run
imported, and torch cannot be imported twice; ``warm_cache`` therefore builds and runs the model before, out here.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ditto_core.engines.workspace import Workspace
from ditto_core.model.loading import load_model, tiny_decoder
from ditto_core.spec import EngineSpec, ModelSource

TINY = """
import torch
from ditto_core.model.loading import tiny_decoder

def tiny_llama():
    return tiny_decoder("llama")

def tiny_mlp():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return layers, {"input": torch.randn(3, 8)}
"""
"""The inner projects' models."""

AGREES = """
import pytest
from tiny import tiny_llama

@pytest.mark.ditto_engine(model=tiny_llama)
def test_agrees(ditto):
    ditto.generate([3, 1, 4, 1, 5], max_new_tokens=3).assert_close()
"""

DIVERGES = """
import pytest
from tiny import tiny_llama

@pytest.mark.ditto_engine(model=tiny_llama, tolerance=1e-4)
def test_diverges(ditto):
    ditto.generate([3, 1, 4, 1, 5], max_new_tokens=3).assert_close()
"""


def linear() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The least model that can be exported."""
    return torch.nn.Linear(2, 2), {"input": torch.zeros(1, 2)}


@pytest.fixture(scope="session")
def warm_cache(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the tiny decoder's engine and noise floor; everything heavy is imported after it.

    That includes what an export imports, which another worker's engine would spare this one: an inner run that imports
    it is the last that can export, since parts of torch cannot be imported twice.
    """
    from ditto_core.model.export import export
    from ditto_core.pair.pair import Pair
    from ditto_core.trace import Trace  # noqa: F401

    export(load_model(ModelSource.of(linear)), tmp_path_factory.mktemp("export"))
    pair = Pair(workspace, EngineSpec.of(lambda: tiny_decoder("llama")))
    pair.generate([3, 1, 4, 1, 5], max_new_tokens=3)
    pair.close()
    gc.collect()
    gc.freeze()  # each inner run ends in several full collections, which torch's objects make slow
    return workspace.cache.root


@pytest.fixture
def cold_cache(isolated_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    root = tmp_path / "cold-cache"
    monkeypatch.setenv("DITTO_CACHE_DIR", str(root))
    return root


@pytest.fixture
def own_cache(warm_cache: Path, cold_cache: Path) -> Path:
    """A cache of the test's own that has the export, but no engine."""
    shutil.copytree(warm_cache / "export", cold_cache / "export")
    return cold_cache


@pytest.fixture
def copied_cache(project: pytest.Pytester, warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the warm cache holds, for one test alone: other workers write to the warm one meanwhile."""
    root = tmp_path / "copied-cache"
    for entry in warm_cache.glob("*/*/entry.json"):
        shutil.copytree(entry.parent, root / entry.parent.relative_to(warm_cache))
    monkeypatch.setenv("DITTO_CACHE_DIR", str(root))
    return root


@pytest.fixture
def project(
    pytester: pytest.Pytester, isolated_environment: None, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """An inner project with the tiny models in ``tiny.py``."""
    monkeypatch.setenv("DITTO_CACHE_DIR", str(warm_cache))
    return bare(pytester)


@pytest.fixture
def own_project(pytester: pytest.Pytester, own_cache: Path) -> pytest.Pytester:
    """An inner project with a cache of its own that has the export."""
    return bare(pytester)


@pytest.fixture
def cold_project(pytester: pytest.Pytester, cold_cache: Path) -> pytest.Pytester:
    """An inner project with an empty cache of its own, to be run in child processes."""
    return bare(pytester)


def bare(pytester: pytest.Pytester) -> pytest.Pytester:
    """Write the models."""
    pytester.makepyfile(tiny=TINY)
    pytester.syspathinsert()
    return pytester


@pytest.fixture
def refused(project: pytest.Pytester) -> Callable[..., str]:
    """Run one test file that is expected to be bad input, and return the line that says so."""

    def run(source: str, *arguments: str) -> str:
        project.makepyfile(source)
        result = project.runpytest_inprocess(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        lines = result.errlines + result.outlines
        assert not any("Traceback" in line or "INTERNALERROR" in line for line in lines)
        errors = [line for line in result.errlines if line.startswith("ERROR: ")]
        return "\n".join(errors) or result.stdout.str()

    return run
