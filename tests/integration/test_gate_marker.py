"""The marker ``ditto_gate``: one test, several shards, a baseline, the project's table, and what is wrong with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.gate_suites import tiny_suite, write_suite

ROOT = Path(__file__).parents[2]
GATE = """
import pytest
from tiny import tiny_llama

@pytest.mark.ditto_engine(model=tiny_llama, reference="eager:float32", options={options})
@pytest.mark.ditto_gate({arguments})
def test_accuracy(ditto_gate):
    ditto_gate.assert_passed()
"""
COMMON = "suite='tiny.jsonl', max_new_tokens=3, resamples=300"
INT8 = {"quantize": "int8"}


@pytest.fixture
def gate(project):
    """Write the suite, and a test with a gate of these arguments."""
    write_suite(project.path / "tiny.jsonl", tiny_suite(5, 4, 1))

    def write(arguments="", options=None, common=COMMON):
        text = ", ".join(filter(None, (common, arguments)))
        project.makepyfile(test_answers=GATE.format(arguments=text, options=options or {}))
        return project

    return write


def test_a_healthy_engine_passes_and_its_verdict_is_the_last_word(gate):
    project = gate("output='gate.json'")
    result = project.runpytest_inprocess("--junitxml=junit.xml")
    result.assert_outcomes(passed=1)
    verdict = "gate tiny on onnxruntime float32 against eager float32: passed, 11 samples"
    result.stdout.fnmatch_lines([f"ditto-engine: {verdict}"])
    folder = project.path
    assert json.loads((folder / "gate.json").read_text())["summary"] == verdict
    assert '<property name="ditto_gate_kl_mean"' in (folder / "junit.xml").read_text()


def test_a_quantized_engine_fails_with_number_limit_and_table(gate):
    result = gate(options=INT8).runpytest_inprocess()
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "AssertionError: gate tiny on onnxruntime int8 against eager float32: FAILED, " in text
    assert "limit 0.0014" in text
    assert "90% interval" in text
    assert "kl_p99" in text
    assert "smallest detectable drop of accuracy on 5 samples" in text


def test_limits_of_the_marker_decide(gate):
    limits = "limits={'kl_mean': 9, 'top1_disagreement': 1, 'perplexity_ratio': 9, 'accuracy_drop': 1}"
    gate(limits, options=INT8).runpytest_inprocess().assert_outcomes(passed=1)


def test_two_workers_run_a_shard_each_and_the_last_one_judges(gate):
    result = gate("shards=2").runpytest_subprocess("-n", "2", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["ditto-engine: gate tiny on * passed, 11 samples"])
    assert "the last of 2 shards judges the gate" in result.stdout.str()


def test_a_gate_of_which_a_shard_is_left_out_fails_the_run(gate):
    result = gate("shards=2").runpytest_inprocess("-k", "shard1of2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*gate test_answers.py::test_accuracy FAILED: not all of its shards ran"])


def test_the_verdict_of_one_engine_is_not_that_of_another_of_the_same_test(gate):
    project = gate("shards=2")
    test = project.path / "test_answers.py"
    test.write_text(test.read_text().replace("=tiny_llama,", "=tiny_llama, dtype=['float32', 'float16'],"))
    result = project.runpytest_inprocess("-k", "not (float16 and shard2of2)")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lost = "test_answers.py::test_accuracy[[]onnxruntime-float16[]]"
    result.stdout.fnmatch_lines([f"*gate {lost} FAILED: not all of its shards ran"])


def test_a_baseline_is_written_used_and_asked_for(gate):
    project = gate("baseline='base.json'")
    missing = project.runpytest_inprocess()
    assert missing.ret == pytest.ExitCode.USAGE_ERROR
    assert "base.json is not there: write it anew with --update-baseline" in missing.stdout.str()
    project.runpytest_inprocess("--ditto-update-baseline").assert_outcomes(passed=1)
    assert len(json.loads((project.path / "base.json").read_text())["samples"]) == 11
    project.runpytest_inprocess().assert_outcomes(passed=1)


def test_the_project_s_table_is_used_by_name(gate):
    project = gate(common="'nightly'", options=INT8)
    table = "[tool.ditto_core.gates.nightly]\nsuite = 'tiny.jsonl'\nmax_new_tokens = 2\nlimits = {kl_mean = 0.5}\n"
    project.makepyprojecttoml(table)
    text = project.runpytest_inprocess().stdout.str()
    assert "gate tiny on onnxruntime int8" in text
    assert "0.5" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("suit='x'", "marker ditto_gate has no argument 'suit'; did you mean 'suite'?"),
        ("suite='nowhere.jsonl'", "nowhere.jsonl' is neither a JSONL file nor one of classics, classics-choice"),
        ("limits={'kl': 1}", "a gate has no metric 'kl'"),
        ("'nightly'", "no gate 'nightly'"),
        ("'a', 'b'", "takes one positional argument"),
    ],
)
def test_what_is_wrong_with_the_marker_is_one_line_and_exit_code_4(gate, arguments, message):
    project = gate(common=arguments)
    project.makepyprojecttoml("")
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stdout.str()


def test_the_fixture_without_its_marker_is_refused(project):
    project.makepyfile(
        """
        import pytest
        from tiny import tiny_llama

        @pytest.mark.ditto_engine(model=tiny_llama)
        def test_accuracy(ditto_gate): pass
        """
    )
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "add @pytest.mark.ditto_gate()" in result.stdout.str()


@pytest.mark.parametrize("page", ["README.md", "docs/gates.md"])
def test_the_example_of_the_page_runs(gate, page):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    (example,) = (block for block in blocks if "ditto_gate" in block)
    project = gate()
    (project.path / "tiny.jsonl").rename(project.path / "suite.jsonl")
    example = example.replace('"path-or-hub-id"', "model=tiny_llama")
    project.makepyfile(test_answers=f"from tiny import tiny_llama\n{example}")
    text = project.runpytest_inprocess().stdout.str()
    assert "ditto-engine: gate suite on onnxruntime int8 against" in text
