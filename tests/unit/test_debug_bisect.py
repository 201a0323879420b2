"""``ditto debug bisect``: the first of a row of values with which a command fails."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from ditto_core.cli import application
from ditto_core.debug.bisect import bisect
from ditto_core.debug.check import CommandCheck
from ditto_core.debug.iterations import IterationOptions
from ditto_core.errors import UsageError


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(script):
    return IterationOptions(check=CommandCheck(("sh", "-c", script)))


def searched(count, script, skip=(125,)):
    lines = []
    found = bisect([str(i) for i in range(count)], options(script), lines.append, skip)
    return found, lines


@pytest.mark.parametrize("first_bad", [1, 2, 7, 14, 15])
def test_the_first_bad_value_is_found_in_log2_checks(first_bad):
    found, _ = searched(16, f"test {{}} -lt {first_bad}")
    assert (found.good, found.bad, found.unjudged) == (str(first_bad - 1), str(first_bad), ())
    assert found.judged <= 2 + 4


def test_values_that_cannot_be_judged_are_gone_around_and_named():
    found, _ = searched(8, "case {} in 3|4) exit 125;; esac; test {} -lt 4")
    assert (found.good, found.bad, found.unjudged) == ("2", "5", ("3", "4"))
    found, _ = searched(8, "case {} in 3) exit 4;; esac; test {} -lt 5", skip=(4, 5))
    assert (found.good, found.bad, found.unjudged) == ("4", "5", ())


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("true {}", "last value, 3, passes"),
        ("false {}", "first value, 0, fails"),
        ("exit 125; {}", "first value, 0, cannot"),
        ("true", "{}"),
    ],
)
def test_a_search_that_would_find_nonsense_is_refused(script, told, inside):
    with pytest.raises(UsageError) as raised:
        searched(4, script)
    assert told in str(raised.value)
    assert [*inside.iterdir()] == []


@pytest.mark.parametrize("values", [[], ["a"], ["a", "a"]])
def test_a_row_of_one_is_refused(values):
    with pytest.raises(UsageError):
        bisect(values, options("test {}"), print)


def test_what_was_judged_before_an_interruption_is_not_judged_again(inside):
    script = "echo {} >> seen; test {} -lt 5"
    with pytest.raises(KeyboardInterrupt):
        bisect([*"01234567"], options(script), interrupt)
    found = bisect([*"01234567"], options(script), print)
    assert (found.good, found.bad) == ("4", "5")
    seen = (inside / "seen").read_text().split()
    assert len(seen) == len(set(seen))


def interrupt(line):
    if line.startswith("2:"):
        raise KeyboardInterrupt


def test_the_command(inside):
    words = ["debug", "bisect", "1.20", "1.21", "1.22", "1.23", "--json", "found.json", "--check"]
    done = CliRunner().invoke(application(), [*words, "sh", "-c", "case {} in 1.20|1.21) ;; *) exit 1;; esac"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("first bad: 1.22, last good: 1.21 (4 checks")
    assert json.loads((inside / "found.json").read_text())["bad"] == "1.22"


def interactive(answers, *words):
    return CliRunner().invoke(application(), ["debug", "bisect", *"01234567", "--interactive", *words], input=answers)


def test_a_person_is_asked_about_each_value_until_the_answer_is_one():
    done = interactive("good\nb\nwell\ng\n\ng\nbad\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("first bad: 6, last good: 5 (5 checks")
    assert re.findall(r"Is (\d) good\? \[g\]ood", done.stderr) == [*"0733556"]


def test_a_person_may_skip_a_value_whatever_the_skip_codes_are():
    done = interactive("g\nb\ns\nb\ng\n", "--skip-code", "4")
    assert done.stdout.startswith("first bad: 4, last good: 2 "), done.output
    assert "between them, not judged: 3" in done.stdout


def test_a_person_sees_the_whole_output_of_the_check_and_overrules_its_status():
    done = interactive("p\nf\nf\nf\nf\n", "--check", "sh", "-c", "seq 100; echo this is {}; exit 125")
    assert done.stdout.startswith("first bad: 1, last good: 0 "), done.output
    shown = done.stderr.split("Is 0 good?")[0].splitlines()
    assert shown[:102] == [*map(str, range(1, 101)), "this is 0", "exit status 125"]


def test_without_a_person_the_question_is_an_error_and_the_answers_so_far_are_kept(inside):
    done = interactive("g\nb\ng\n")
    assert isinstance(done.exception, UsageError)
    assert "--interactive" in str(done.exception)
    assert interactive("b\nb\n").stdout.startswith("first bad: 4, last good: 3 (2 checks")
