"""Bad input that only shows when something is built or run: one line, exit code 4, nothing half-written."""

from __future__ import annotations

import pytest

HEAD = "import pytest\nfrom tiny import tiny_llama, tiny_mlp\n"


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
        (case("observer=False", model="'.'"), "model directory '.' holds no weights (*.safetensors, *.gguf, *.bin)"),
        (case("dtype='bfloat16'"), "backend onnxruntime has no bfloat16, expected float32, float16, float64"),
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
