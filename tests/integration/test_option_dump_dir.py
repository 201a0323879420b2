"""--ditto-dump-dir and --ditto-dump: one folder a test, failures only or all."""

from __future__ import annotations

import pytest

from ditto_core.compare.comparison import Comparison
from ditto_core.trace import Trace
from pytest_ditto.bench import dump_folder
from pytest_ditto.pytest_options import PytestOptions
from tests.integration.conftest import AGREES, DIVERGES

BOTH = AGREES + DIVERGES.replace("import pytest\nfrom tiny import tiny_llama\n", "")


def dumped(project: pytest.Pytester) -> dict[str, set[str]]:
    """Return what lies in each test's folder, by the test's name."""
    folders = sorted((project.path / "dump").iterdir()) if (project.path / "dump").exists() else []
    return {folder.name.split("-")[1]: {p.name for p in folder.iterdir()} for folder in folders}


def test_failed_tests_leave_their_dump_and_passed_ones_nothing(project):
    project.makepyfile(test_it=BOTH)
    result = project.runpytest_inprocess("--ditto-dump-dir=dump")
    result.assert_outcomes(passed=1, failed=1)
    assert dumped(project) == {"test_diverges": {"engine", "reference", "comparison.json", "floor.json"}}
    folder = next((project.path / "dump").iterdir())
    result.stdout.fnmatch_lines([f"E * dump: {folder}", f"E * next: ditto compare {folder}/engine {folder}/reference"])


def test_all_keeps_every_dump_step_by_step(project):
    project.makepyfile(test_it=BOTH)
    project.runpytest_inprocess("--ditto-dump-dir=dump", "--ditto-dump=all").assert_outcomes(passed=1, failed=1)
    assert set(dumped(project)) == {"test_agrees", "test_diverges"}
    folder = next((project.path / "dump").glob("*test_agrees*"))
    engine, reference = (Trace.open(folder / side) for side in ("engine", "reference"))
    assert engine.steps == reference.steps == 3
    assert {p.name for p in (folder / "engine").iterdir()} == {
        "manifest.json",
        *(f"step{i}.{kind}" for i in range(3) for kind in ("safetensors", "txt")),
    }
    assert Comparison.load(folder / "comparison.json").steps == 3


def test_a_second_run_replaces_the_dump_of_the_first(project):
    project.makepyfile(test_it=BOTH)
    project.runpytest_inprocess("--ditto-dump-dir=dump", "--ditto-dump=all")
    project.runpytest_inprocess("--ditto-dump-dir=dump").assert_outcomes(passed=1, failed=1)
    assert set(dumped(project)) == {"test_diverges"}


def test_tests_of_one_name_have_folders_of_their_own(project):
    body = "        ditto.generate([3, 1, 4, 1, 5], max_new_tokens=1)\n"
    project.makepyfile(
        test_it="import pytest\nfrom tiny import tiny_llama\n"
        "pytestmark = pytest.mark.ditto_engine(model=tiny_llama)\n"
        f"class TestA:\n    @pytest.mark.parametrize('x', ['a/b', 'a b'])\n    def test_x(self, ditto, x):\n{body}"
        f"class TestB:\n    def test_x(self, ditto):\n{body}{body}"
    )
    project.runpytest_inprocess("--ditto-dump-dir=dump", "--ditto-dump=all").assert_outcomes(passed=3)
    folders = sorted(p.name for p in (project.path / "dump").iterdir())
    assert len(folders) == 3
    second = next((project.path / "dump").glob("*TestB*"))
    assert {p.name for p in second.iterdir()} == {"engine", "reference", "comparison.json", "floor.json", "run1"}
    assert {p.name for p in (second / "run1").iterdir()} == {"engine", "reference", "comparison.json", "floor.json"}


def test_folder_names_are_safe_short_and_unique(tmp_path):
    options = PytestOptions(dump_dir=tmp_path)
    ids = ["a/test_b.py::test_c[x y]", "a/test_b.py::test_c[x/y]", "a/test_b.py::test_c[../../x]", "é" * 500, "x" * 500]
    names = [dump_folder(options, nodeid) for nodeid in ids]
    assert len(set(names)) == len(ids)
    for name in names:
        assert name.parent == tmp_path
        assert len(name.name) < 128
        assert name.name.isascii()
        assert not name.name.startswith(".")
    assert names[0].name.startswith("a-test_b.py-test_c-x-y-")
    assert dump_folder(PytestOptions(), "x") is None
