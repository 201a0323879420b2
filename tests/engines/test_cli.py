"""The commands as a user types them, on a tiny Llama saved as safetensors; each once in a process of its own."""

import json
import os
import re
import subprocess
import sys
from functools import partial

import pytest

from ditto_core.backends.registry import backend_names
from tests.commands import ditto
from tests.models import llama


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny-llama"
    llama().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def process(shared_cache_dir):
    def run(*arguments, **env):
        variables = {**os.environ, "DITTO_CACHE_DIR": str(shared_cache_dir), **env}
        line = [sys.executable, "-m", "ditto_core", *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, env=variables, check=False)

    return run


@pytest.fixture(scope="session")
def command(shared_cache_dir):
    return partial(ditto, DITTO_CACHE_DIR=str(shared_cache_dir))


@pytest.fixture(scope="session")
def engine_dir(process, model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("engines") / "engine"
    done = process(
        "build", model_dir, "--output-dir", out, "--add-output", "model.layers.*.mlp", "--add-output", "**.?_proj"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out)
    return out


def test_the_output_directory_may_follow_the_model(command, model_dir, tmp_path):
    words = ("--add-output", "model.layers.*.mlp", "--add-output", "**.?_proj")
    done = command("build", model_dir, tmp_path / "engine", *words)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "engine")), done.stderr
    assert (tmp_path / "engine" / "engine.onnx").is_file()
    two = command("build", model_dir, tmp_path / "a", "--output-dir", tmp_path / "b")
    assert (two.returncode, "two output directories" in two.stderr) == (2, True)


def dump(command, engine_dir, folder, ids="3,4,5"):
    done = command("run", "--engine-dir", engine_dir, "--input-ids", ids, "--max-output-len", "3", "--dump-dir", folder)
    assert done.returncode == 0, done.stderr
    return done


def test_run_dumps_every_step_as_safetensors_text_and_manifest(process, engine_dir, tmp_path):
    done = dump(process, engine_dir, tmp_path / "a")
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == ["manifest.json", *sorted(f"step{i}.{end}" for i in range(3) for end in ("safetensors", "txt"))]
    assert "model.layers.1.mlp" in (tmp_path / "a" / "step0.txt").read_text()
    assert len(json.loads(done.stdout)) == 3


def test_two_runs_of_one_engine_are_the_same(command, engine_dir, tmp_path):
    dump(command, engine_dir, tmp_path / "a")
    dump(command, engine_dir, tmp_path / "b")
    done = command("compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 0, done.stdout + done.stderr


def test_different_prompts_differ_with_exit_code_1(command, engine_dir, tmp_path):
    dump(command, engine_dir, tmp_path / "a")
    dump(command, engine_dir, tmp_path / "b", ids="3,4,6")
    assert command("compare", tmp_path / "a", tmp_path / "b").returncode == 1


def test_different_lengths_cannot_be_compared(command, process, engine_dir, tmp_path):
    dump(command, engine_dir, tmp_path / "a")
    dump(command, engine_dir, tmp_path / "b", ids="3,4")
    done = process("compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 2, done.stdout


def test_raw_names_and_aliases_name_outputs(command, model_dir, tmp_path):
    done = command("build", model_dir, "--output-dir", tmp_path / "e", TRTLLM_ADD_OUTPUT='{"fx:linear_3": "inter"}')
    assert done.returncode == 0, done.stderr
    taps = json.loads((tmp_path / "e" / "engine.json").read_text())["taps"]
    assert [tap["site"] for tap in taps] == ["inter"]


def test_artifacts_hold_the_graph_and_its_node_names(command, model_dir, tmp_path):
    done = command("build", model_dir, "--add-output", "model.layers.*", DEBUG_ARTIFACTS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    names = {p.name for p in folder.iterdir()}
    assert names >= {"graph_module.py", "graph.txt", "model.onnx", "provenance.json", "build_config.json"}
    assert (folder / "model.onnx").stat().st_size < 2_000_000
    assert "linear_3" in (folder / "graph.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "nowhere.py:model"], "nowhere.py cannot be imported"),
        (["fuzz", "nowhere.py:model"], "nowhere.py cannot be imported"),
        (["align", "nowhere.py:model", "model.onnx"], "nowhere.py cannot be imported"),
        (["build", "./nowhere"], "model './nowhere' is not there"),
        (["build", "{model}", "--dtype", "flaot16"], "unknown dtype 'flaot16'"),
        (["build", "{model}", "--dtype", "bfloat16"], "onnxruntime has no bfloat16 kernels"),
        (["build", "{model}", "--backend", "onnxruntme"], "did you mean 'onnxruntime'"),
        (["build", "{model}", "--add-output", "model.layer.*"], "selector 'model.layer.*' matches none of"),
        (["build", "{model}", "--add-output", "fx:linear_33333"], "matches none of the"),
        (["build", "{model}", "--option", "levle=all"], "onnxruntime has no option 'levle'; did you mean 'level'"),
        (["run", "--engine-dir", "{model}", "--input-ids", "1"], "holds no engine"),
        (["run", "--engine-dir", "{engine}", "--input-text", ""], "the prompt is empty"),
        (["run", "--engine-dir", "{engine}", "--input-text", "hello"], "no tokenizer at"),
        (["run", "--engine-dir", "{engine}", "--input-ids", "1,x"], "expected whole numbers"),
        (
            ["run", "--engine-dir", "{engine}", "--input-ids", "1", "--max-output-len", "9999"],
            "outside the engine's profile",
        ),
        (["compare", "{engine}/nowhere", "{engine}"], "does not exist"),
        (["compare", "{engine}", "{model}"], "is not a dump of a known format"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, model_dir, engine_dir, arguments, message):
    done = command(*(a.format(model=model_dir, engine=engine_dir) for a in arguments))
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.endswith("…")]
    assert len(lines) == 1
    assert message in lines[0]


def test_doctor_has_a_line_for_each_backend_and_all_about_one_on_request(command, process):
    done = process("doctor")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("backend ")] == backend_names()
    assert not any("container" in line for line in lines[2:] if "backend trtllm" not in line)
    about = command("doctor", "trtllm").stdout
    assert re.findall(r"^backend (\w+)", about, re.MULTILINE) == ["trtllm"]
    assert "python -m ditto_core.trtllm_build" in about
    assert "did you mean 'onnxruntime'" in command("doctor", "onnxruntme").stderr
