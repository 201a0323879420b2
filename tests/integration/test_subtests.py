"""pytest reports a subtest while its test runs; the test's comparisons and its dump are counted and settled once."""

from __future__ import annotations

TEST = """
import pytest
from tiny import tiny_llama

@pytest.mark.ditto_engine(model=tiny_llama, tolerance=1e-9, localize_failed=0)
def test_parts(ditto, subtests):
    for wrong in (True, False, True):
        with subtests.test(wrong=wrong):
            run = ditto.generate([3, 1, 4], max_new_tokens=2)
            if wrong:
                run.assert_close()
"""


def test_a_comparison_is_told_and_kept_once(project):
    project.makepyfile(test_x=TEST)
    result = project.runpytest_inprocess("-p", "no:cacheprovider", "--ditto-dump-dir=dump")
    result.stdout.fnmatch_lines(["ditto-engine: 3 comparisons, *(test_x.py::test_parts)"])
    text = result.stdout.str()
    assert (text.count("AssertionError: engine diverges at"), text.count("--- ditto-engine ---")) == (2, 3)
    assert "nothing asserted it" not in text
    assert len(list(project.path.glob("dump/**/comparison.json"))) == 3


def test_bad_input_of_a_subtest_is_one_line_and_the_exit_code(project):
    project.makepyfile(test_x=TEST.replace("[3, 1, 4]", "[3, 1, 4000]"))
    result = project.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == 4
    result.stdout.fnmatch_lines(["bad input in 1 test: exit code 4"])
