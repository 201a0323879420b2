"""A plain ``assert run`` says what ``run.assert_close()`` says."""

from __future__ import annotations

DIVERGES = """
import pytest
from tiny import tiny_llama

@pytest.mark.ditto_engine(model=tiny_llama, tolerance=1e-4, localize_failed=0)
def test_diverges(ditto):
    run = ditto.generate([3, 1, 4, 1, 5], max_new_tokens=3)
    {line}
"""


def lines_of(project, line):
    project.makepyfile(test_x=DIVERGES.format(line=line))
    result = project.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    return [line.removeprefix("E").strip() for line in result.outlines if line.startswith("E  ")]


def test_the_message_is_that_of_assert_close(project):
    said, plain = (lines_of(project, line) for line in ("run.assert_close()", "assert run"))
    assert "engine diverges at " in said[0]
    assert len(said) > 3
    assert plain == said


def test_an_assertion_about_something_else_keeps_its_message(project):
    assert lines_of(project, "assert run.steps == 99")[0].startswith("assert 3 == 99")


def test_a_table_keeps_its_lines_where_the_terminal_lacks_its_bars(project, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    project.makepyfile(test_x=DIVERGES.format(line="run.assert_close()"))
    result = project.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["* engine diverges at *", "rel_l2 by depth at step 0, *", "margin * worst step *"])
