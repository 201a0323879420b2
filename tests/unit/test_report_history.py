"""The history of a test over commits: one JSON line a commit, bars, a table, and a picture on the page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ditto_core.cli import application
from ditto_core.errors import UsageError
from ditto_core.report.history import SHOWN, Entry, bars, heights, markdown, of_test, picture, read, update
from ditto_core.report.html import html_report
from ditto_core.report.write import write_report
from tests.comparisons import faulty, passing


def at(run, commit, created=1.0):
    return replace(run, receipt=replace(run.receipt or receipt(), commit=commit, created=created))


def receipt():
    from ditto_core.system.receipt import Receipt

    return Receipt(0.0, "", "", "", "")


def entries(*errors, ok=True):
    return [Entry("t", f"{i:040x}", float(i), "a against b", ok, error, 1.0, "") for i, error in enumerate(errors)]


def test_a_line_a_test_and_commit_the_oldest_first(tmp_path):
    path = tmp_path / "history.jsonl"
    update(path, {"b": at(faulty(), "second", 2.0), "a": at(passing(), "second", 2.0)})
    update(path, {"a": at(passing(), "first", 1.0)})
    update(path, {"a": at(faulty(), "second", 3.0)})  # the same commit again
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["test"], line["commit"], line["ok"]) for line in lines] == [
        ("a", "first", True),
        ("b", "second", False),
        ("a", "second", False),
    ]
    bad = faulty().first_bad
    assert lines[2]["first_bad"] == f"{bad.site}, step {bad.step}"
    assert read(path) == update(path, {})


def test_the_error_is_the_outputs(tmp_path):
    run = passing()
    finals = [r for r in run.results if r.final] or list(run.results)
    entry = Entry.of("t", run)
    assert entry.error == max(r.metrics.rel_l2 for r in finals)
    assert entry.margin == max(r.verdict.margin for r in finals)
    assert Entry.of("t", replace(run, receipt=None)).commit == ""


def test_runs_of_no_known_commit_are_kept_apart(tmp_path):
    for created in (1.0, 2.0):
        found = update(tmp_path / "h.jsonl", {"a": at(passing(), "", created)})
    assert len(found) == 2


def test_heights_are_decades_of_one_at_least():
    assert heights(entries(1e-6, 1e-4, 1e-2)) == pytest.approx([0, 0.5, 1])
    assert heights(entries(1e-6, 1.1e-6)) == pytest.approx([0, math.log10(1.1)])
    assert heights(entries(0.0, math.inf, 1e-3)) == [0, 1, 0]
    assert heights(entries(math.nan)) == [1]
    assert bars(entries(1e-6, 1e-4, 1e-2)) in ("▁▄█", "▁▅█")


def test_markdown_has_the_newest_commit_first_and_escapes_names():
    known = [
        *entries(1e-6, 1e-5),
        Entry("x|`\x1b[31m", "c" * 40 + "+", 9.0, "", False, math.inf, math.inf, "a|b, step 0"),
    ]
    lines = markdown(known).splitlines()
    commits = [line.split("|")[1].strip() for line in lines if line.startswith("| ✅")]
    assert commits == ["✅ `0000000000`"] * 2
    assert "\x1b" not in markdown(known)
    assert any(line.startswith("| ❌ `cccccccccc+` | inf | inf | `a\\|b, step 0` |") for line in lines)


def test_only_the_latest_commits_are_shown():
    assert len(of_test(entries(*([1e-6] * (SHOWN + 5))), "t")) == SHOWN


def test_the_picture_has_a_point_a_commit_and_crosses_where_it_failed():
    drawn = picture([*entries(1e-6, 1e-4), *entries(1e-2, ok=False)])
    points = re.search(r'points="([^"]+)"', drawn)[1].split()
    assert [tuple(map(float, point.split(","))) for point in points] == [(6, 50), (160, 28), (314, 6)]
    assert drawn.count("<title>") == 3
    assert len(re.findall(r"l6 6m0 -6l-6 6", drawn)) == 1
    assert "<script" not in picture([replace(entries(1.0)[0], first_bad="<script>")])
    assert picture(entries(1.0))  # a single commit


def test_a_page_draws_the_test_that_it_shows(tmp_path):
    path = tmp_path / "h.jsonl"
    for i in range(3):
        write_report(
            "history", {"t": at(passing(), f"c{i}", float(i)), "other": at(passing(), f"c{i}", float(i))}, path
        )
    write_report("html", {"t": passing(), "new": passing()}, tmp_path / "r.html", path)
    page = (tmp_path / "r.html").read_text()
    assert page.count('<svg class="trend"') == 1
    assert "the last 3 commits" in page
    assert '<svg class="trend"' not in html_report({"t": passing()})


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"test": "t"}', json.dumps(entries(1.0)[0].to_json() | {"error": "much"}), "[" * 100000],
)
def test_a_line_that_is_no_entry_is_named(line, tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps(entries(1.0)[0].to_json()) + "\n" + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        update(path, {"a": passing()})
    assert path.read_text().endswith(line + "\n")


def test_the_command_adds_a_run_and_shows_what_is_known(tmp_path):
    write_report("json", {"t.py::test": at(passing(), "abc", 1.0)}, tmp_path / "run.json")
    words = ["report", str(tmp_path / "run.json"), "--history", str(tmp_path / "h.jsonl")]
    done = CliRunner().invoke(application(), words)
    assert done.exit_code == 0, done.output
    assert "`t.py::test`" in done.output
    write_report("json", {"t.py::test": at(faulty(), "def", 2.0), "u": passing()}, tmp_path / "run.json")
    assert CliRunner().invoke(application(), words).output.count("| ❌ `def`") == 1
    write_report("json", {"t.py::test": at(faulty(), "ghi", 3.0)}, tmp_path / "run.json")
    assert CliRunner().invoke(application(), [*words, "--html", str(tmp_path / "r.html")]).exit_code == 0
    assert "the last 3 commits" in (tmp_path / "r.html").read_text()
