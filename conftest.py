"""Shared by all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Let children be interrupted: a shell starts background jobs with SIGINT ignored, and children inherit that.

    Hypothesis draws the same examples in every run, so that the suite says the same of the same code; to look for new
    ones: ``pytest --hypothesis-profile=default``.
    """
    settings.register_profile("same", derandomize=True)
    settings.load_profile(config.getoption("--hypothesis-profile", None) or "same")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run this checkout in child processes too, and leave the user's settings and cache alone."""
    ours = [name for name in os.environ if name.startswith("DITTO_")]
    for variable in (*ours, "DEBUG_ARTIFACTS_DIR", "CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")  # it imports all of hypothesis at each run's end
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DITTO_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "ditto-cache"))
