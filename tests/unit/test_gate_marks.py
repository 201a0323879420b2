"""A gate as it is written down: the marker's arguments, tables of pyproject.toml, and shards that are put together."""

import math
from dataclasses import replace

import pytest

from ditto_core.errors import TraceError, UsageError
from ditto_core.gates.marker import MarkedGate, gathered, merged, shards_of
from ditto_core.gates.policy import Policy
from ditto_core.gates.settings import GateSettings, project_gate
from ditto_core.spec import EngineSpec, ModelSource
from tests.gate_suites import write_suite
from tests.unit.test_gate_result import answers, result

TABLE = """
[tool.ditto_core.gates.nightly]
model = "acme/llama"
suite = "tiny.jsonl"
samples = 3
baseline = "base.json"
limits = { kl_mean = 0.5, accuracy_drop = "none" }
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a suite and a table of one gate, and a folder without a pyproject.toml below it."""
    write_suite(tmp_path / "tiny.jsonl")
    (tmp_path / "pyproject.toml").write_text(TABLE)
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    return tmp_path


def test_the_nearest_project_has_the_gate_and_its_paths_start_there(project):
    settings = project_gate(project / "tests" / "deep", "nightly")
    assert (settings.baseline, settings.suite) == (project / "base.json", project / "tiny.jsonl")
    gate = settings.gate()
    assert (len(gate.suite.samples), gate.spec.model.label, gate.spec.outputs) == (3, "llama", ())
    assert dict(gate.policy.limits) == {"kl_mean": 0.5, "accuracy_drop": math.inf}
    assert settings.gate(EngineSpec.of("other/model")).spec.model.label == "model"


def test_settings_on_top_win_and_tables_merge():
    base = GateSettings({"threads": 2, "limits": {"kl_mean": 0.5}})
    over = base.over(threads=None, batch=4, limits={"kl_p99": 1.0}, suite="")
    assert over.values == {"threads": 2, "batch": 4, "limits": {"kl_mean": 0.5, "kl_p99": 1.0}}
    assert base.baseline is base.suite is None


def test_a_model_may_be_a_folder_of_the_project_or_a_source(project):
    (project / "weights").mkdir()
    (project / "weights" / "config.json").write_text("{}")
    gate = GateSettings({"model": "weights"}, project).gate()
    assert gate.spec.model.location == str(project / "weights")
    assert GateSettings({"model": ModelSource("acme/llama")}, project).gate().spec.model.location == "acme/llama"
    assert gate.suite.name == "classics"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"bacth": 1}, "no setting 'bacth'; did you mean 'batch'"),
        ({"threads": "2"}, "threads is '2', expected an integer"),
        ({"threads": True}, "threads is True, expected an integer"),
        ({"limits": 5}, "limits is 5, expected a table"),
        ({}, "names no model"),
        ({"model": "m", "limits": {"kl_mean": "much"}}, "the limit of kl_mean is 'much', expected a number"),
        ({"model": "m", "max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
    ],
)
def test_what_cannot_be_is_one_line(values, told):
    with pytest.raises(UsageError, match=told):
        GateSettings(values).gate()


def test_a_gate_that_no_project_has_names_those_that_it_has(project, tmp_path_factory):
    with pytest.raises(UsageError, match=r"has no gate 'nigthly'; did you mean 'nightly'\? \(known: nightly\)"):
        project_gate(project, "nigthly")
    (project / "pyproject.toml").unlink()
    with pytest.raises(UsageError, match=r"no pyproject.toml at or above .*\[tool.ditto_core.gates.nightly\]"):
        project_gate(project, "nightly")


def test_a_reference_may_be_an_engine_and_no_trace(tmp_path):
    spec = EngineSpec.of("acme/llama")
    gate = GateSettings({"model": "acme/llama", "reference": EngineSpec.of("acme/llama", dtype="float16")}).gate()
    assert (gate.reference.dtype, gate.reference.outputs) == ("float16", ())
    with pytest.raises(UsageError, match="a gate cannot run on the trace"):
        GateSettings({"model": "m", "reference": str(tmp_path)}).gate(spec)


def test_a_policy_has_no_settings_but_its_own():
    with pytest.raises(UsageError, match="no setting 'alhpa'; did you mean 'alpha'"):
        Policy.from_json({"alhpa": 0.1})


def test_arguments_of_the_nearest_marker_win():
    found = merged([(("nightly",), {"shards": 2}), ((), {"shards": 3, "output": "r.json"})])
    assert found == {"name": "nightly", "shards": 3, "output": "r.json"}
    with pytest.raises(UsageError, match="one positional argument, a gate's name, but got 2"):
        merged([(("a", "b"), {})])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"shrads": 2}, "no argument 'shrads'; did you mean 'shards'"),
        ({"model": "m"}, "no argument 'model'"),
        ({"jobs": "2"}, "jobs is '2', expected an integer"),
        ({"jobs": True}, "jobs is True, expected an integer"),
        ({"shards": 0}, "shards is 0, expected at least 1"),
    ],
)
def test_an_argument_that_the_marker_does_not_have_is_refused(tmp_path, arguments, told):
    with pytest.raises(UsageError, match=told):
        MarkedGate.of(arguments, tmp_path)


def test_a_marked_gate_is_the_projects_table_with_its_arguments_on_top(project):
    marked = MarkedGate.of({"name": "nightly", "samples": 2, "output": "out/r.json", "jobs": 2}, project)
    assert (marked.settings.values["samples"], marked.settings.values["suite"]) == (2, "tiny.jsonl")
    assert marked.output == project / "out" / "r.json"
    bare = MarkedGate.of({"samples": 2}, project)
    assert (bare.output, dict(bare.settings.values)) == (None, {"samples": 2})


def test_files_that_cannot_be_written_are_said_before_anything_runs(project):
    (project / "base.json").mkdir()
    marked = MarkedGate.of({"name": "nightly", "output": "r.json"}, project)
    marked.check_files(update=False)
    with pytest.raises(TraceError, match=r"base\.json"):
        marked.check_files(update=True)


def test_a_result_is_not_written_over_the_suite_or_the_baseline(project):
    (project / "tiny.jsonl").write_text("{}")
    (project / "base.json").write_text("{}")
    for name in ("tiny.jsonl", "base.json"):
        with pytest.raises(UsageError, match=rf"output .*{name} would overwrite the"):
            MarkedGate.of({"name": "nightly", "output": name}, project).check_files(update=False)
    onto = MarkedGate.of({"name": "nightly", "baseline": "tiny.jsonl"}, project)
    with pytest.raises(UsageError, match=r"baseline .*tiny\.jsonl would overwrite the suite"):
        onto.check_files(update=True)


@pytest.mark.parametrize(("count", "names"), [(1, []), (3, ["1/3", "2/3", "3/3"]), (0, []), ("2", [])])
def test_a_marker_asks_for_shards_by_number(count, names):
    assert shards_of({"shards": count}) == names
    assert shards_of({}) == []


def test_the_last_shard_puts_all_of_them_together(tmp_path):
    whole = result(answers(worse=1, both=5))
    parts = [replace(whole, records=whole.records[i::2], shard=f"{i + 1}/2") for i in range(2)]
    assert gathered(parts[0], 2, tmp_path) is None
    merged_again = gathered(parts[1], 2, tmp_path)
    assert (merged_again.records, merged_again.shard) == (whole.records, "")
