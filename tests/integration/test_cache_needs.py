"""`ditto cache needs` and `ditto cache fetch`: what a suite needs of the cache and of a store, without running it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

SUITE = """
import pytest
from tiny import tiny_mlp

@pytest.mark.ditto_engine(model=tiny_mlp)
@pytest.mark.parametrize("x", range(3))
def test_mlp(ditto, x):
    ditto.run().assert_close()

@pytest.mark.ditto_engine(model=tiny_mlp, outputs=None)
def test_plain(ditto):
    ditto.run().assert_close()

@pytest.mark.ditto_engine(model=tiny_mlp, bakend="x")
def test_bad_marker(ditto): pass

def test_other(): raise AssertionError("a test ran")
"""
NO_BUILD = """
import pytest
from ditto_core.backends.onnxruntime import OnnxRuntimeBackend

@pytest.fixture(autouse=True)
def no_build(monkeypatch):
    monkeypatch.setattr(OnnxRuntimeBackend, "build", lambda self, request: pytest.fail("built"))
"""


@pytest.fixture
def command(cold_project, monkeypatch, tmp_path):
    """Run `ditto cache ...` in a project whose cache has a store behind it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("DITTO_CACHE_DIR", (tmp_path / "store").as_uri())
    cold_project.makepyfile(test_it=SUITE)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "ditto_core", "cache", *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=False, cwd=cold_project.path)

    return run


def where(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    return [(need["kind"], need["where"]) for need in json.loads(done.stdout)["needs"]]


def test_a_suite_tells_what_it_needs_and_fetches_it_from_a_store(command, cold_project, tmp_path):
    """One export, the engine with taps and the one without: the tests share them."""
    cold = command("needs", "test_it.py", "--json")
    assert (cold.returncode, where(cold)) == (
        1,
        [("export", "to be built"), ("engine", "to be built"), ("engine", "to be built")],
    )
    cold_project.runpytest_subprocess("test_it.py", "-k", "mlp or plain").assert_outcomes(passed=4)
    warm = command("needs", "test_it.py", "-k", "plain")
    assert warm.returncode == 0
    assert [line.split()[0] for line in warm.stdout.splitlines()] == ["kind", "export", "engine", "2"]
    assert "2 cached: " in warm.stdout

    shutil.rmtree(tmp_path / "user")
    other_machine = command("needs", "--json")
    assert (other_machine.returncode, {place for _, place in where(other_machine)}) == (0, {"in the store"})
    fetched = command("fetch", "test_it.py", "--json")
    assert (fetched.returncode, {place for _, place in where(fetched)}) == (0, {"cached"})
    shutil.rmtree(tmp_path / "store")
    cold_project.makeconftest(NO_BUILD)
    cold_project.runpytest_subprocess("test_it.py", "-k", "mlp or plain").assert_outcomes(passed=4)


def test_tests_of_what_is_not_there_are_named_beside_the_others(command, cold_project):
    cold_project.makepyfile(
        test_it="""
        import pytest
        from tiny import tiny_mlp

        @pytest.mark.ditto_engine("./no/such/model", options={"session": {"a": "b"}})
        def test_gone(ditto): pass

        @pytest.mark.ditto_engine(model=tiny_mlp, outputs=None)
        def test_plain(ditto): pass
        """
    )
    done = command("needs", "--json")
    assert (done.returncode, [place for _, place in where(done)]) == (1, ["bad input", "to be built", "to be built"])
    assert "model './no/such/model' is not there" in json.loads(done.stdout)["needs"][0]["what"]


def test_a_store_that_cannot_be_read_is_one_line(command, cold_project, monkeypatch):
    monkeypatch.setenv("DITTO_CACHE_DIR", "nosuch://bucket/ditto")
    done = command("needs", "test_it.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nosuch" in done.stderr


def test_an_object_that_is_damaged_in_the_store_is_not_brought(command, cold_project, tmp_path):
    cold_project.runpytest_subprocess("test_it.py", "-k", "plain").assert_outcomes(passed=1)
    shutil.rmtree(tmp_path / "user")
    for path in (tmp_path / "store").rglob("objects/*"):
        path.write_bytes(bytes(path.stat().st_size))
    done = command("fetch", "test_it.py", "-k", "plain")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ditto: what the store holds is damaged; the tests build it and replace it there\n"


def test_tests_that_cannot_be_collected_are_one_line(command, cold_project):
    done = command("needs", "nothing.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pytest could not collect the tests: ERROR: file or directory not found: nothing.py" in done.stderr
    cold_project.makepyfile(test_broken="def (")
    for option in ("-q", "--continue-on-collection-errors"):  # neither "nothing is needed" nor a run of the tests
        done = command("needs", option)
        assert (done.returncode, done.stderr) == (
            2,
            "ditto: pytest could not collect the tests: ERROR test_broken.py\n",
        )
