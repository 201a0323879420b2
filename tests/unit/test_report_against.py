"""`ditto report NEW --against OLD`: which sites got worse, by how much."""

import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ditto_core.cli import application
from ditto_core.cli.report import command
from ditto_core.errors import UsageError
from ditto_core.report.against import Change, changes, markdown
from tests.comparisons import FLOOR, comparison, faulty, names, passing, with_nan

WRONG = "model.layers.1.mlp.down_proj"
AFTER = (WRONG, "model.layers.1.mlp", "model.layers.1")


def test_what_no_longer_holds_comes_first_with_both_errors_and_their_factor():
    found = changes(passing(), faulty())
    assert (found.held, found.holds, found.first_bad) == (True, False, f"{WRONG}, step 0")
    assert {change.site for change in found.worse} == set(AFTER)
    worst = found.worse[0]
    assert (worst.before, worst.now) == (FLOOR / 2, 1e-2)
    assert worst.factor == pytest.approx(1e-2 / (FLOOR / 2))
    assert not found.better
    assert {change.site for change in changes(faulty(), passing()).better} == set(AFTER)


def test_a_change_within_a_tenth_is_none_and_a_site_may_be_worse_though_all_hold():
    def scaled(factor):
        return comparison(names(1), 2, lambda step, i: FLOOR / 2 * (factor if i == 3 and step == 1 else 1))

    assert not changes(scaled(1.0), scaled(1.09)).worse
    (worse,) = changes(scaled(1.0), scaled(1.2)).worse
    assert (worse.site, worse.held, worse.holds) == (names(1)[3], True, True)
    assert worse.factor == pytest.approx(1.2)


def test_a_nan_is_worse_than_any_number_and_a_zero_better():
    assert Change("a", 1.0, math.nan, math.nan, True, False).factor == math.inf
    assert Change("a", math.nan, 1.0, 0.5, False, True).better
    assert Change("a", 0.0, 1e-9, 0.5, True, True).factor == math.inf
    assert Change("a", 0.0, 0.0, 0.0, True, True).factor == 1.0
    assert Change("a", 1.0, 0.0, 0.0, True, True).better
    first = changes(passing(), with_nan()).worse[0]
    assert (first.now, first.factor, first.holds) == (math.inf, math.inf, False)  # rel-L2 of a NaN


def test_sites_that_only_one_run_has_are_named():
    found = changes(comparison(names(2), 1, lambda *_: FLOOR), comparison(names(1), 1, lambda *_: FLOOR))
    assert len(found.gone) == 7
    assert "7 sites no longer compared: `model.layers.1.input_layernorm`" in markdown({"": found})


def test_markdown_leads_with_the_verdict_and_holds_a_row_for_each_site():
    text = markdown({"tests/test_a.py::test_x": changes(passing(), faulty())}).splitlines()
    assert text[0] == "❌ **`tests/test_a.py::test_x`: agrees → diverges: 3 sites worse, 0 better, of 15**"
    rows = [line for line in text if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(AFTER)
    assert rows[0].split(" | ")[1:4] == ["5.00e-07", "1.00e-02", "2e+04 x"]


def test_the_command_compares_the_tests_that_two_runs_have(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps({"a": passing().to_json(), "b": passing().to_json()}))
    new.write_text(json.dumps({"b": faulty().to_json(), "c": passing().to_json()}))
    command(new, against=old)
    shown = capsys.readouterr()
    assert shown.out.startswith("❌ **`b`: agrees → diverges")
    assert "old.json has a" in shown.err
    assert "new.json has c" in shown.err
    command(new, against=old, json=tmp_path / "c.json", markdown=tmp_path / "c.md")
    (worst, *_) = sorted(json.loads((tmp_path / "c.json").read_text())["b"]["sites"], key=lambda s: -s["now"])
    assert worst["site"] in AFTER
    assert (tmp_path / "c.md").read_text() == shown.out.removesuffix("\n")
    one = tmp_path / "one.json"
    passing().save(one)
    command(one, against=one)
    assert "agrees: 0 sites worse" in capsys.readouterr().out
    named = tmp_path / "named.json"
    named.write_text(json.dumps({"a": faulty().to_json()}))
    command(named, against=one)
    assert capsys.readouterr().out.startswith("❌ **`a`: agrees → diverges")
    command(old, against=named)
    assert capsys.readouterr().out.startswith("✅ **`a`: diverges → agrees")
    with pytest.raises(UsageError, match="no test in common"):
        command(new, against=one)
    with pytest.raises(UsageError, match="--against goes with"):
        command(new, against=old, html=tmp_path / "x.html")


def test_the_steps_of_the_ci_page_make_a_comment_of_two_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/ci.md").read_text()
    (workflow,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    first, *_ = (line for line in workflow.splitlines() if "pytest --" in line)
    assert "pytest --ditto-require-backends " in first
    (words,) = re.findall(r"run: ditto (.*)", workflow)
    monkeypatch.chdir(tmp_path)
    Path("main.json").write_text(json.dumps({"t.py::test_x": passing().to_json()}))
    Path("run.json").write_text(json.dumps({"t.py::test_x": faulty().to_json()}))
    assert CliRunner().invoke(application(), words.split()).exit_code == 0
    assert Path("comment.md").read_text().startswith("❌ **`t.py::test_x`: agrees → diverges")
