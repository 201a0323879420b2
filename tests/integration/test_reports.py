"""``--ditto-report``, the job summary and GitHub's annotations."""

from __future__ import annotations

import json

import pytest

from ditto_core.compare.comparison import Comparison
from tests.integration.conftest import AGREES, DIVERGES

EXACT = DIVERGES.replace("tolerance=1e-4", "tolerance={'**': 0}")
"""No engine has an error of exactly 0."""


def test_reports_hold_every_comparison(project):
    project.makepyfile(test_a=AGREES, test_b=EXACT)
    result = project.runpytest_inprocess(
        "--ditto-report=json:out/all.json", "--ditto-report=html:out/all.html", "--ditto-report=markdown:all.md"
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["ditto-engine: json report: *all.json", "ditto-engine: html report: *all.html"])
    data = json.loads((project.path / "out" / "all.json").read_text())
    runs = {name: Comparison.from_json(run) for name, run in data.items()}
    assert {name: bool(run) for name, run in runs.items()} == {
        "test_a.py::test_agrees": True,
        "test_b.py::test_diverges": False,
    }
    html = (project.path / "out" / "all.html").read_text()
    assert "✗ test_b.py::test_diverges" in html
    assert "| ❌ | `test_b.py::test_diverges` |" in (project.path / "all.md").read_text()


def test_report_keeps_the_dump_of_a_failed_test_only(project):
    project.makepyfile(test_a=AGREES, test_b=EXACT)
    project.runpytest_inprocess("--ditto-report=json:all.json", "--ditto-dump-dir=dump")
    dumps = {name: run["dump"] for name, run in json.loads((project.path / "all.json").read_text()).items()}
    assert dumps["test_a.py::test_agrees"] == ""
    assert dumps["test_b.py::test_diverges"].startswith(str(project.path / "dump"))


def test_workers_of_xdist_gather_in_one_report(project):
    project.makepyfile(test_a=AGREES, test_b=AGREES)
    result = project.runpytest_subprocess("-n2", "--ditto-report=json:all.json")
    result.assert_outcomes(passed=2)
    assert len(json.loads((project.path / "all.json").read_text())) == 2


def test_run_without_comparisons_says_so(project):
    project.makepyfile("def test_nothing(): pass")
    result = project.runpytest_inprocess("--ditto-report=html:all.html")
    result.stdout.fnmatch_lines(["ditto-engine: no html report, nothing was compared"])
    assert not (project.path / "all.html").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("htm:x.html", "expected KIND:PATH, the kind one of history, html, json, markdown; did you mean 'html'?"),
        ("x.html", "expected KIND:PATH"),
        ("html:", "expected KIND:PATH"),
        ("html:.", "expected a file: * is a folder"),
    ],
)
def test_bad_report_is_one_line(project, text, expected):
    result = project.runpytest_inprocess(f"--ditto-report={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --ditto-report is '{text}', {expected.replace('[', '[[]')}*"])


def test_environment_and_ini_hold_lines(pytester, isolated_environment, monkeypatch):
    from pytest_ditto.pytest_options import OPTIONS

    pytester.makeini("[pytest]\nditto_engine_reports =\n    json:a.json\n    html:b.html\n")
    root = pytester.path
    assert pytester.parseconfigure().stash[OPTIONS].reports == (("json", root / "a.json"), ("html", root / "b.html"))
    monkeypatch.setenv("DITTO_REPORT", "markdown:c.md")
    assert pytester.parseconfigure().stash[OPTIONS].reports == (("markdown", root / "c.md"),)


def test_job_summary_and_annotation_on_github(project, monkeypatch):
    summary = project.path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    project.makepyfile(test_b=EXACT)
    result = project.runpytest_inprocess()
    assert "| ❌ | `test_b.py::test_diverges` |" in summary.read_text()
    (line,) = [line for line in result.outlines if line.startswith("::error ")]
    assert line.startswith("::error file=test_b.py,line=4,title=test_b.py%3A%3Atest_diverges::")
    assert "::engine diverges at" in line


def test_annotations_are_left_to_a_plugin_that_writes_them(project, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    project.makepyfile(test_b=EXACT, pytest_github_actions_annotate_failures="")
    result = project.runpytest_inprocess("-p", "pytest_github_actions_annotate_failures")
    result.assert_outcomes(failed=1)
    assert not [line for line in result.outlines if line.startswith("::error ")]


def test_verbose_shows_every_site_and_passing_comparisons_too(project):
    project.makepyfile(test_a=AGREES, test_b=EXACT)
    short = project.runpytest_inprocess("-rA")
    assert short.stdout.str().count("rel_l2 by depth at step") == 1
    short.stdout.fnmatch_lines(["margin *fails *worst step *site*", "*! * of * rel_l2 *"])
    long = project.runpytest_inprocess("-v", "-rA")
    assert long.stdout.str().count("rel_l2 by depth at step") == 2
    assert "more site" not in long.stdout.str()
