"""``@given`` with the ditto fixtures, and the fixture of relations."""

import pytest

WINDOWED = """
import pytest
from hypothesis import given, settings
from ditto_core.model.loading import tiny_decoder
from ditto_core.spec import EngineSpec
from pytest_ditto.strategies import token_ids

def windowed():
    return tiny_decoder("mistral", sliding_window=5)

def whole():
    return tiny_decoder("mistral", sliding_window=200)

diverging = pytest.mark.ditto_engine(
    model=windowed, reference=EngineSpec.of(whole, outputs="model.layers.*"), outputs="model.layers.*", observer=False
)
"""


@pytest.fixture
def hypothesis_project(project, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    return project


def test_one_engine_serves_all_examples_without_a_complaint(hypothesis_project):
    hypothesis_project.makepyfile(
        """
        import pytest, time
        from hypothesis import given, settings
        from tiny import tiny_llama
        from pytest_ditto.strategies import token_batches

        sessions, seen = set(), []

        @pytest.mark.ditto_engine(model=tiny_llama, outputs="model.layers.*", observer=False)
        class TestEngine:
            @settings(max_examples=8, database=None, derandomize=True)
            @given(rows=token_batches(256, max_rows=2, max_length=6))
            def test_agrees(self, ditto, rows):
                time.sleep(0.21 * (len(seen) < 2))  # longer than hypothesis allows a plain function
                sessions.add(id(ditto.sessions.engine))
                seen.append(rows)
                ditto.generate(rows, max_new_tokens=2).assert_close()
                assert len(ditto.comparisons) == 1

            def test_one_session(self):
                assert len(sessions) == 1
                assert len(seen) >= 8
        """
    )
    result = hypothesis_project.runpytest_inprocess("-W", "error::hypothesis.errors.HypothesisWarning")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["ditto-engine: 1 comparison,*"])


def test_a_fault_from_a_length_on_shrinks_to_that_length(hypothesis_project):
    hypothesis_project.makepyfile(
        WINDOWED
        + """
@diverging
@settings(max_examples=40, database=None, derandomize=True)
@given(ids=token_ids(256, max_length=16))
def test_diverges(ditto, ids):
    ditto.generate(ids, max_new_tokens=1).assert_close()
"""
    )
    result = hypothesis_project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    # A window of 5 keys is first felt by the sixth token.
    (line,) = [line for line in result.outlines if "ids=[" in line]
    assert len(line.split("[")[1].split("]")[0].split(",")) == 6
    assert result.outlines.count("ditto-engine: 1 comparison, 2 sites,") <= 1
    assert sum("ditto-engine" in line and "---" in line for line in result.outlines) == 1


def test_function_fixtures_of_others_and_a_deadline_of_ones_own_still_count(hypothesis_project):
    hypothesis_project.makepyfile(
        """
        import pytest, time
        from datetime import timedelta
        from hypothesis import given, settings, strategies as st
        from tiny import tiny_mlp

        engine = pytest.mark.ditto_engine(model=tiny_mlp, observer=False)

        @engine
        @given(x=st.integers())
        def test_other(ditto, tmp_path, x):
            pass

        @engine
        @settings(deadline=timedelta(milliseconds=1), database=None)
        @given(x=st.integers())
        def test_slow(ditto, x):
            time.sleep(0.01)
        """
    )
    result = hypothesis_project.runpytest_inprocess()
    result.assert_outcomes(failed=2)
    shown = result.stdout.str()
    assert "uses a function-scoped fixture 'tmp_path'" in shown
    assert "uses a function-scoped fixture 'ditto'" not in shown
    assert "which exceeds the deadline of 1.00ms" in shown


def test_relations_are_a_fixture(project):
    project.makepyfile(
        """
        import pytest
        from tiny import tiny_llama

        @pytest.mark.ditto_engine(model=tiny_llama, profile={"batch": (1, 2, 4), "length": (1, 4, 16)})
        def test_holds(ditto_relations):
            found = ditto_relations.assert_hold([5, 6, 7, 8, 9, 10])
            assert [relation.status for relation in found[-2:]] == ["same bits", "same bits"]
            assert "noise floor" in str(found[0])

        @pytest.mark.ditto_engine(model=tiny_llama, tolerance={"lm_head": 0.0})
        def test_broken(ditto_relations):
            ditto_relations.assert_hold([5, 6, 7, 8, 9, 10], "prefill_equals_steps")
        """
    )
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["E*1 of 1 relations are broken", "E*prefill = single steps: broken at lm_head, row 0*"]
    )
