"""A whole run from a cache that nobody may write to, by a process that keeps to the permissions of files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gate_suites import tiny_suite, write_suite
from tests.integration.conftest import AGREES, DIVERGES

GATE = """
import pytest
from tiny import tiny_llama

@pytest.mark.ditto_engine(model=tiny_llama, reference="eager:float32")
@pytest.mark.ditto_gate(suite="tiny.jsonl", max_new_tokens=3, resamples=300)
def test_accuracy(ditto_gate):
    ditto_gate.assert_passed()
"""


@pytest.fixture
def read_only(copied_cache):
    """The warm cache with its noise floors, without write permission on anything."""
    paths = [copied_cache, *copied_cache.rglob("*")]
    for path in reversed(paths):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield copied_cache
    for path in paths:
        path.chmod(0o755)


def run(project, *arguments: str) -> subprocess.CompletedProcess:
    unprivileged = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"] if os.geteuid() == 0 else []
    command = [*unprivileged, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    temporary = project.path / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environment, cwd=project.path, capture_output=True, text=True, check=False)
    assert [*temporary.glob("ditto*")] == []
    return done


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_read_only_cache_that_holds_the_engine_serves_a_whole_test(project, read_only):
    project.makepyfile(AGREES)
    before = tree(read_only)
    done = run(project)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert tree(read_only) == before


def test_a_failure_from_a_read_only_cache_is_checked_against_the_model_and_localized(project, read_only):
    project.makepyfile(DIVERGES)
    done = run(project)
    assert (done.returncode, "1 failed" in done.stdout) == (1, True), done.stdout + done.stderr
    assert "rel_l2" in done.stdout
    assert "cannot be written" not in done.stdout


def test_a_gate_runs_from_a_read_only_cache(project, read_only):
    write_suite(project.path / "tiny.jsonl", tiny_suite(5, 4, 1))
    project.makepyfile(GATE)
    done = run(project)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
