"""What a run says: header, failure message and table, summary, JUnit properties; sessions shared between tests."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.integration.conftest import AGREES, DIVERGES

SECOND = DIVERGES.replace("import pytest\nfrom tiny import tiny_llama\n", "")


def test_a_clean_run_is_quiet(project):
    project.makepyfile(AGREES)
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    ours = [line for line in result.outlines if "ditto-engine" in line and "plugins:" not in line]
    assert len(ours) == 2
    assert re.fullmatch(r"ditto-engine: onnxruntime [\d.]+.*, torch \S+, transformers \S+.*; cache: .+", ours[0])
    summary = (
        r"ditto-engine: 1 comparison, \d+ sites, worst margin 0\.\d+ at [\w.:]+, step \d \(test_\w+.py::test_agrees\)"
    )
    assert re.fullmatch(summary, ours[1])


def test_a_failure_is_at_most_ten_lines_with_the_verdict_first(project):
    project.makepyfile(DIVERGES)
    result = project.runpytest_inprocess()
    message = [line[1:].strip() for line in result.outlines if re.match(r"E\s", line)]
    assert len(message) <= 10
    first = r"AssertionError: engine diverges at \S+, step \d: rel_l2 \S+ > \S+ \(0\.0001 x noise floor \S+\)"
    assert re.fullmatch(first, message[0])
    starts = (
        "first bad site: ",
        "there: max abs ",
        "worst: ",
        "bad: ",
        "at the logits: ",
        "observer effect: ",
        "dump: ",
    )
    for start in (*starts, "next: "):
        assert sum(line.startswith(start) for line in message) == 1
    assert not any("comparison.py" in line for line in result.outlines), "our own frames stay hidden"


def test_a_failure_has_a_table_worst_first(project):
    project.makepyfile(DIVERGES)
    result = project.runpytest_inprocess()
    text = result.stdout.str()
    assert re.search(r"^-+ ditto-engine -+$", text, re.MULTILINE)
    assert re.search(r"^rel_l2 by depth at step \d, .*: +[ ▁▂▃▄▅▆▇█]+$", text, re.MULTILINE)
    margins = [float(m) for m in re.findall(r"^(\S+) ! +\d+ +\S+ +rel_l2 ", text, re.MULTILINE)]
    assert len(margins) == 15
    assert margins == sorted(margins, reverse=True)


def test_summary_shows_the_worst_first_and_what_nothing_asserted(project):
    unasserted = SECOND.replace("test_diverges", "test_forgets").replace(".assert_close()", "").replace("1e-4", "1e-5")
    project.makepyfile(test_it=AGREES + SECOND + unasserted)
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "=* ditto-engine =*",
            "* x bound  test_it.py::test_forgets  *first bad site * [[]the test passed: nothing asserted it]",
            "* x bound  test_it.py::test_diverges  onnxruntime float32: first bad site *, step 0",
            "ditto-engine: 3 comparisons, * sites, worst margin * (test_it.py::test_forgets)",
        ]
    )


def test_junit_has_the_numbers(project):
    project.makepyfile(DIVERGES)
    project.runpytest_inprocess("--junitxml=junit.xml")
    case = ElementTree.parse(project.path / "junit.xml").find(".//testcase")
    found = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert found["ditto_engine"] == "onnxruntime float32"
    assert found["ditto_reference"] == "eager float64"
    assert (found["ditto_steps"], found["ditto_comparisons"]) == ("3", "1")
    assert int(found["ditto_sites"]) > 20
    assert float(found["ditto_worst_margin"]) > 1
    assert re.fullmatch(r"\S+, step \d", found["ditto_first_bad"])


def test_comparisons_made_in_a_fixture_count(project):
    project.makepyfile(
        """
        import pytest
        from tiny import tiny_llama

        @pytest.fixture
        def run(ditto):
            return ditto.generate([3, 1, 4, 1, 5], max_new_tokens=3)

        @pytest.mark.ditto_engine(model=tiny_llama)
        def test_run(run):
            run.assert_close()
            run.assert_same_tokens()
        """
    )
    result = project.runpytest_inprocess()
    result.stdout.fnmatch_lines(["ditto-engine: 1 comparison, *"])


def test_tests_of_one_spec_share_sessions_and_another_spec_closes_them(project):
    project.makepyfile(
        """
        import pytest
        from ditto_core.errors import RunError
        from tiny import tiny_llama

        pytestmark = pytest.mark.ditto_engine(model=tiny_llama)
        seen = {}

        def test_first(ditto, ditto_engine, ditto_reference):
            assert ditto_engine is ditto.engine and ditto_reference is ditto.reference
            seen.update(pair=ditto, engine=ditto_engine, reference=ditto_reference)
            ditto.generate([3, 1, 4], max_new_tokens=1)
            assert len(ditto.comparisons) == 1

        @pytest.mark.ditto_engine(tolerance=9, threads=2)
        def test_same(ditto):
            assert ditto.engine is seen["engine"] and ditto.reference is seen["reference"]
            assert ditto is not seen["pair"] and not ditto.comparisons
            assert ditto.options.threads == 2 and ditto.options.tolerance.factor == 9

        @pytest.mark.ditto_engine(reference="eager:float32")
        def test_other(ditto):
            assert ditto.engine is not seen["engine"]
            assert ditto.reference.info.dtype == "float32"
            with pytest.raises(RunError):
                seen["engine"].step({}, print)
        """
    )
    project.runpytest_inprocess().assert_outcomes(passed=3)


def test_a_single_step_model_runs_on_its_example(project):
    project.makepyfile(
        """
        import pytest
        from tiny import tiny_mlp

        @pytest.mark.ditto_engine(model=tiny_mlp)
        def test_mlp(ditto):
            run = ditto.run()
            run.assert_close()
            assert run.steps == 1
        """
    )
    project.runpytest_inprocess().assert_outcomes(passed=1)


def test_workspace_fixture_needs_no_marker(project, warm_cache):
    project.makepyfile(
        f"""
        def test_cache(ditto_workspace):
            assert str(ditto_workspace.cache.root) == {str(warm_cache)!r}
        """
    )
    assert project.runpytest_inprocess().ret == pytest.ExitCode.OK
