"""Long work shows on a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ditto_core.errors import DittoError

TEST = """
import pytest
from tiny import tiny_mlp

@pytest.mark.ditto_engine(model=tiny_mlp, observer=False)
def test_mlp(ditto):
    ditto.run().assert_close()
"""


def on_a_terminal(folder: Path) -> tuple[int, str]:
    """Run pytest with a pseudo-terminal as its output; return the exit status and what the terminal got."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    child = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    got = b""
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            break
        if not chunk:
            break
        got += chunk
    os.close(ours)
    return child.wait(), got.decode(errors="replace")


def test_status_line_on_a_terminal_and_silence_elsewhere(cold_project):
    cold_project.makepyfile(test_it=TEST)
    status, text = on_a_terminal(cold_project.path)
    assert status == pytest.ExitCode.OK
    assert "ditto-engine: exporting tiny_mlp float32 to ONNX" in text
    assert "1 passed" in text
    assert "ditto-engine: loading tiny_mlp" in text
    result = cold_project.runpytest_subprocess()  # the export is there by now; the model is loaded again
    result.assert_outcomes(passed=1)
    assert "loading" not in result.stdout.str() + result.stderr.str()


def test_an_error_below_a_status_line_passes_through(pytester, monkeypatch):
    from pytest_ditto import progress

    monkeypatch.setattr(progress, "interactive", lambda config: True)
    show = progress.progress_of(pytester.parseconfigure())
    with pytest.raises(DittoError, match="inside"), show("working"):
        raise DittoError("inside")
