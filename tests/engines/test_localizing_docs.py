"""docs/localizing.md: its examples run, its sample is what a faulty engine prints, its table is the registry."""

import runpy
from pathlib import Path

import pytest

from ditto_core.causes import KINDS
from ditto_core.report.localization import localization_text
from tests.engines.test_causes import run as run_case
from tests.engines.test_docs import python_blocks, run
from tests.faults.cases import CASES

PAGE = "docs/localizing.md"
TEXT = (Path(__file__).parents[2] / PAGE).read_text()
LOCALIZE, REPLACE, RELATIONS, TWO_RUNS, OWN_CAUSES = python_blocks(PAGE)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (LOCALIZE, "no site of 45 adds more"),
        (REPLACE, "the model's tensor at model.layers.1.mlp.act_fn "),
        (TWO_RUNS, ""),
        (OWN_CAUSES, ""),
    ],
)
def test_its_scripts_run(tmp_path, shared_cache_dir, monkeypatch, capsys, script, says):
    monkeypatch.setenv("DITTO_CACHE_DIR", str(shared_cache_dir))
    (tmp_path / "script.py").write_text(script)
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith(says)


def test_its_tests_pass(tmp_path, shared_cache_dir):
    (tmp_path / "test_engine.py").write_text(RELATIONS)
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_engine.py"], tmp_path, shared_cache_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_its_sample_is_what_a_wrong_base_prints(workspace, tmp_path):
    case = next(case for case in CASES if case.name == "rope base")
    printed = localization_text(run_case(workspace, tmp_path, case)).splitlines()
    sample = TEXT.split("```\nblame ")[1].split("```")[0].splitlines()
    assert [f"blame {sample[0]}", *sample[1:]] == printed


def test_its_table_lists_every_cause():
    table = TEXT.split("| cause | what the engine does |\n| --- | --- |\n")[1].split("\n\n")[0].splitlines()
    assert table == [f"| {kind} | {meaning} |" for kind, meaning in KINDS.items()]
