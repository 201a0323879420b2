"""Bad input that only shows when something is built or run: one line, exit code 4, nothing half-written."""

from __future__ import annotations

import pytest
import torch

HEAD = """import pytest
from tiny import tiny_llama, tiny_mlp

def unnamed(): return tiny_mlp()[0], list(tiny_mlp()[1].values())

def misnamed(): return tiny_mlp()[0], {"x": tiny_mlp()[1]["input"]}
"""


def case(arguments: str, body: str = "pass", model: str = "model=tiny_llama") -> str:
    """Return a file with one good and one bad test."""
    return f"{HEAD}\n@pytest.mark.ditto_engine({model}, {arguments})\ndef test_x(ditto):\n    {body}\n"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            case("outputs='model.layer.*'"),
            "selector 'model.layer.*' matches none of 85 sites; closest: model.layers.1, model.layers.0, *",
        ),
        (case("outputs='fx:mm_defalt'"), "*'fx:mm_defalt' matches no*"),
        (case("observer=False", model="'./no/such/model'"), "model './no/such/model' is not there"),
        (case("observer=False", model="'.'"), "model directory '/*' holds no weights (*.safetensors, *.gguf, *.bin)"),
        (case("dtype='bfloat16'"), "backend onnxruntime has no bfloat16, expected float32, float16, float64"),
        (case("", "ditto.run()"), "tiny_llama is a decoder: call generate(prompts) instead of run(inputs)"),
        (
            case("observer=False", model="model=unnamed"),
            "factory 'unnamed' returned example inputs that are not named *",
        ),
        (
            case("observer=False", model="model=misnamed"),
            "factory 'misnamed' returned example inputs x, not those of Sequential.forward(input): *",
        ),
        (case("options={'levl': 'all'}"), "onnxruntime has no option 'levl'; did you mean 'level'? (known: *)"),
        (case("observer=False", "ditto.generate('')"), "the prompt is empty, expected at least one token"),
        (case("observer=False", "ditto.generate([[1], []])"), "prompt 1 is empty, expected at least one token"),
        (case("observer=False", "ditto.generate([])"), "no prompt given, expected at least one"),
        (case("observer=False", "ditto.generate([999])"), "token id 999 is outside the vocabulary of 256"),
        (case("observer=False", "ditto.generate([1], max_new_tokens=0)"), "max_new_tokens is 0, expected at least 1"),
        (
            case("profile={'length': (1, 4, 8)}", "ditto.generate([1] * 9)"),
            "step needs length 9, outside the engine's profile 1..8; build with profile={'length': (1, 4, 9)}",
        ),
        (
            case("profile={'past': (0, 4, 8)}", "ditto.generate([1] * 4, max_new_tokens=7)"),
            "step needs past 9, outside the engine's profile 0..8; build with profile={'past': (0, 4, 9)}",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(project, copied_cache, source, line):
    engines = set(copied_cache.glob("*/*/entry.json"))
    project.makepyfile(test_x=source, test_y="def test_good(): pass")
    result = project.runpytest_inprocess("--ditto-dump-dir=dump")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == 1
    assert outcomes.get("errors", 0) + outcomes.get("failed", 0) == 1
    result.stdout.fnmatch_lines(["____* test_x *____", line.replace("[", "[[]"), "bad input in 1 test: exit code 4"])
    assert not any(line.startswith((">", "E  ")) or "Traceback" in line for line in result.outlines)
    assert not (project.path / "dump").exists()
    assert not list(copied_cache.glob("*/.*.tmp"))
    new = set(copied_cache.glob("*/*/entry.json")) - engines
    assert all("profile" in source for _ in new), "only the profile makes another engine"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("threads='x'", "threads is 'x', expected an integer"),
        ("observer='x'", "observer is 'x', expected True or False"),
        ("backend=5", "backend is 5, expected a name such as 'onnxruntime'"),
        ("options=5", "options is 5, expected a table such as {'quantize': 'int8'}"),
    ],
)
def test_an_argument_of_the_wrong_type_is_one_line_when_tests_are_collected(project, arguments, line):
    project.makepyfile(test_x=case(arguments))
    result = project.runpytest_inprocess("--ditto-strict")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_x.py::test_x: {line}"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()


LISTS = """
@pytest.mark.ditto_engine(model=tiny_llama, outputs="model.norm", observer=False, {lists})
def test_x(ditto):
    ditto.generate([3, 1, 4]).assert_close()
"""


def test_in_a_list_what_a_backend_cannot_do_is_a_counted_skip(project):
    lists = 'backend=["onnxruntime", "tensorrt"], dtype=["float32", "bfloat16"]'
    project.makepyfile(test_x=HEAD + LISTS.format(lists=lists))
    result = project.runpytest_inprocess("--ditto-backend=onnxruntime", "-rs")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=1)
    line = "backend onnxruntime has no bfloat16, expected float32, float16, float64"
    result.stdout.fnmatch_lines([f"skipped 1: {line}", f"SKIPPED [[]1] test_x.py:*: {line}"], consecutive=False)
    required = project.runpytest_inprocess("--ditto-backend=onnxruntime", "--ditto-require-backends")
    assert required.ret == pytest.ExitCode.USAGE_ERROR
    required.assert_outcomes(passed=1, errors=1)
    required.stdout.fnmatch_lines([line])


def test_a_list_of_nothing_that_a_backend_can_do_is_an_error(project):
    project.makepyfile(test_x=HEAD + LISTS.format(lists='dtype=["bfloat16"]'))
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["backend onnxruntime has no bfloat16, expected float32, float16, float64"])


@pytest.mark.parametrize(
    ("name_map", "line"),
    [
        (5, "name map is 5, expected a file, or names by pattern"),
        ({"mlp.{i}": 5}, "name map: 'mlp.{i}' is 5, expected a name"),
        (
            {"mpl.{i}": "model.layers.{i}.mlp"},
            "name map: 'mpl.{i}' matches none of 1 names on *d.pt; did you mean *",
        ),
    ],
)
def test_a_wrong_name_map_of_a_dump_is_one_line(project, name_map, line):
    torch.save({"mlp.0": torch.zeros(1, 1, 64)}, project.path / "d.pt")
    arguments = f"observer=False, reference='d.pt', name_map={name_map!r}"
    project.makepyfile(test_x=case(arguments, "ditto.generate([3])"))
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["____* test_x *____", line, "bad input in 1 test: exit code 4"])


def test_a_dump_of_another_batch_is_one_line(project):
    torch.save({"logits": torch.zeros(2, 1, 256)}, project.path / "d.pt")
    project.makepyfile(test_x=case("observer=False, reference='d.pt'", "ditto.generate([3])"))
    result = project.runpytest_inprocess()
    line = "*d.pt has logits of shape [[]2, 1, 256], expected 1 rows, one a prompt of the run"
    result.stdout.fnmatch_lines(["____* test_x *____", line])
    assert result.ret != pytest.ExitCode.OK
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("shards='x'", "marker ditto_gate: shards is 'x', expected an integer"),
        ("shards=0", "marker ditto_gate: shards is 0, expected at least 1"),
        ("jobs='x'", "marker ditto_gate: jobs is 'x', expected an integer"),
        ("output=5", "marker ditto_gate: output is 5, expected a path"),
        ("output='.'", "cannot write *: Is a directory"),
        ("limits={5: 1}", "a gate has no metric 5 (known: *)"),
    ],
)
def test_a_wrong_gate_is_one_line_before_it_runs(project, arguments, line):
    gate = f"@pytest.mark.ditto_engine(model=tiny_llama)\n@pytest.mark.ditto_gate({arguments})\n"
    project.makepyfile(test_x=f"{HEAD}\n{gate}def test_x(ditto_gate): pass\n")
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["____* test_x *____", line, "bad input in 1 test: exit code 4"])
    assert "Captured stdout" not in result.stdout.str()


def test_full_trace_shows_where_it_comes_from(project):
    project.makepyfile(test_x=case("dtype='bfloat16'"))
    result = project.runpytest_inprocess("--full-trace")
    result.stdout.fnmatch_lines(["E * backend onnxruntime has no bfloat16*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_damaged_cache_entry_is_rebuilt_and_said_so(own_project, own_cache):
    own_project.makepyfile(test_x=case("observer=False", "ditto.generate([3, 1, 4]).assert_close()"))
    own_project.runpytest_inprocess().assert_outcomes(passed=1)
    (engine,) = own_cache.glob("engine/*/engine.onnx")
    content = engine.read_bytes()
    engine.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    result = own_project.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["note: cache entry engine/* is damaged (*engine.onnx*); it is rebuilt"])
    assert engine.read_bytes() == content


def test_real_failures_do_not_hide_behind_exit_code_4(project):
    project.makepyfile(test_x="def test_wrong(): assert 0")
    assert project.runpytest_inprocess().ret == pytest.ExitCode.TESTS_FAILED


def test_full_cache_directory_is_one_line_and_exit_code_4(own_project, own_cache):
    own_project.makepyfile(test_x=case("observer=False"))
    own_project.makeconftest(
        """
        import errno, os, pytest
        from ditto_core.backends.onnxruntime import OnnxRuntimeBackend

        @pytest.fixture(autouse=True)
        def full_disk(monkeypatch):
            def build(self, request):
                (request.directory / "half").write_text("")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(request.directory / "engine.onnx"))
            monkeypatch.setattr(OnnxRuntimeBackend, "build", build)
        """
    )
    result = own_project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines([f"the cache directory {own_cache} is full: free space (`ditto cache prune`) or *"])
    assert not list((own_cache / "engine").iterdir())
