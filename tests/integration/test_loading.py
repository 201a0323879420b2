"""What the plugin costs a run that has no ditto test, and ways to load it and to leave it out."""

from __future__ import annotations

import json

import pytest

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript", "numpy", "safetensors", "rich", "filelock")

LIST_MODULES = f"""
import json, sys

def test_other(pytestconfig):
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    pytestconfig.rootpath.joinpath("loaded.json").write_text(json.dumps(loaded))
"""


@pytest.fixture(autouse=True)
def only_this_plugin(isolated_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other plugins that happen to be installed may import what they like."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS")


def test_a_run_without_ditto_tests_loads_nothing_heavy(pytester):
    pytester.makepyfile(LIST_MODULES)
    result = pytester.runpytest_subprocess("-p", "ditto-engine", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["ditto-engine: *; cache: *", "*plugins: *ditto-engine*"])
    assert json.loads((pytester.path / "loaded.json").read_text()) == []
    assert not [line for line in result.outlines if line.startswith("ditto-engine: 0")]


def test_collecting_ditto_tests_loads_nothing_heavy(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.ditto_engine("org/name", dtype=["float16", "float32"], tolerance={"**": 0.1}, reference="eager")
        def test_engine(ditto): pass
        """
    )
    pytester.makeconftest(
        f"""
        import json, sys

        def pytest_collection_finish(session):
            assert len(session.items) == 2
            loaded = [name for name in {HEAVY!r} if name in sys.modules]
            session.config.rootpath.joinpath("loaded.json").write_text(json.dumps(loaded))
        """
    )
    result = pytester.runpytest_subprocess("-p", "ditto-engine", "--collect-only", "-q")
    assert result.ret == pytest.ExitCode.OK
    assert json.loads((pytester.path / "loaded.json").read_text()) == []


def test_it_can_be_left_out(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    pytester.makepyfile(LIST_MODULES)
    result = pytester.runpytest_subprocess("-p", "no:ditto-engine")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("ditto-engine: *")
    unknown = pytester.runpytest_subprocess("-p", "no:ditto-engine", "--ditto-dump=all")
    assert unknown.ret == pytest.ExitCode.USAGE_ERROR


def test_it_loads_by_itself_where_it_is_installed(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest_subprocess("-p", "no:terminal", "--ditto-dump=all")
    assert result.ret == pytest.ExitCode.OK
