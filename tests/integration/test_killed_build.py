"""A build that is killed leaves a cache that the next run uses without help."""

from __future__ import annotations

import signal
import sys
import time

BUILD_HANGS = """
import os
import time
import pytest
from pathlib import Path
from ditto_core.backends.onnxruntime import OnnxRuntimeBackend

@pytest.fixture(autouse=True)
def hang(monkeypatch):
    if "HANG" not in os.environ:
        return
    build = OnnxRuntimeBackend.build

    def build_and_hang(self, request):
        build(self, request)
        Path(os.environ["HANG"]).touch()
        time.sleep(600)

    monkeypatch.setattr(OnnxRuntimeBackend, "build", build_and_hang)
"""

TEST = """
import pytest
from tiny import tiny_mlp

@pytest.mark.ditto_engine(model=tiny_mlp, observer=False)
def test_mlp(ditto):
    ditto.run().assert_close()
"""


def test_the_run_after_a_sigkill_builds_again_and_passes(cold_project, cold_cache, monkeypatch):
    cold_project.makeconftest(BUILD_HANGS)
    cold_project.makepyfile(test_it=TEST)
    building = cold_project.path / "building"
    command = [sys.executable, "-m", "pytest", "-q", "test_it.py"]
    monkeypatch.setenv("HANG", str(building))
    child = cold_project.popen(command)
    monkeypatch.delenv("HANG")
    deadline = time.monotonic() + 300
    while not building.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert building.exists()
    child.send_signal(signal.SIGKILL)
    child.wait()

    (half,) = (cold_cache / "engine").iterdir()
    assert half.name.endswith(".tmp")
    (export,) = cold_cache.glob("export/*/entry.json")
    exported = export.stat().st_ino
    result = cold_project.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    (engine,) = (cold_cache / "engine").iterdir()
    assert (engine / "entry.json").exists()
    assert export.stat().st_ino == exported
