"""`ditto debug build`, `repeat` and `diff-tactics`: what is built, how it is sorted, and what tells good from bad."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from benchmarks import debug_cases as cases
from ditto_core.backends.tensorrt.fresh import timing_entries
from ditto_core.cli import application
from ditto_core.debug.tactics import diff_tactics
from ditto_core.errors import DittoError, UsageError


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = cases.chain(8, "middle")
    onnx.save(case.bad, "bad.onnx")
    onnx.save(case.good, "good.onnx")
    np.savez("inputs.npz", **case.feed)
    return tmp_path


def debug(*words):
    done = CliRunner().invoke(application(), ["debug", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def sorted_files(folder="ditto_debug_artifacts"):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())


def test_builds_of_onnx_runtime_are_compared_with_float64_sorted_and_do_not_spread():
    words = ["--until", 2, "--inputs", "inputs.npz", "--reference-precision", "float64", "--json", "r.json"]
    output = debug("build", "good.onnx", *words)
    assert sorted_files() == [f"good/polygraphy_debug{end}" for end in ("_0000.onnx", "_0001.onnx", *TACTICS)]
    found = json.loads(Path("r.json").read_text())
    assert (found["good"], found["bad"], found["distinct"]) == (2, 0, 1)
    assert found["spread"] == {"v7": "0.0"}
    assert "spread between builds: rel_l2 0.0e+00 at v7" in output


TACTICS = ("_tactics_0000.json", "_tactics_0001.json")


def test_a_build_that_is_off_ends_until_bad_and_the_artifact_is_the_optimized_model():
    output = debug("build", "bad.onnx", "--until", "bad", "--inputs", "inputs.npz", "--reference", "good.onnx")
    assert output.splitlines()[-1].startswith("0 good, 1 bad of 1")
    onnx.checker.check_model("ditto_debug_artifacts/bad/polygraphy_debug_0000.onnx")


def test_a_build_that_nothing_judges_is_an_error():
    with pytest.raises(DittoError, match="nothing judges the builds"):
        debug("build", "bad.onnx", "--until", 2)
    with pytest.raises(DittoError, match="did you mean 'tensorrt'"):
        debug("build", "bad.onnx", "--until", 2, "--backend", "tensort", "--check", "true")
    with pytest.raises(UsageError, match="has no option 'tf23'; did you mean 'tf32'"):
        debug("build", "bad.onnx", "--until", 2, "--backend", "tensorrt", "--option", "tf23=true", "--check", "true")
    with pytest.raises(
        UsageError, match="--option timing_cache is of no use here: each build begins with an empty one"
    ):
        debug("build", "bad.onnx", "--until", 2, "--backend", "tensorrt", "--option", "timing_cache=true")
    with pytest.raises(UsageError, match="--option level is of no use to onnxruntime here, expected --level"):
        debug("build", "bad.onnx", "--until", 2, "--option", "level=basic", "--check", "true")


def test_tensorrt_engines_are_built_without_a_gpu_and_sorted_by_the_check():
    pytest.importorskip("tensorrt_rtx_bindings")
    Path("check.py").write_text(
        "import json, os\nassert os.path.getsize('polygraphy_debug.engine') > 1000\n"
        "raise SystemExit(json.load(open('iteration.json'))['iteration'])\n"
    )
    words = ["--backend", "tensorrt", "--option", "tf32=true", "--until", "bad", "--inputs", "inputs.npz"]
    words += ["--check", sys.executable, "check.py"]
    debug("build", "good.onnx", *words)
    names = ["bad/polygraphy_debug_0001_rc1.engine", "bad/polygraphy_debug_tactics_0001_rc1.json"]
    assert [name for name in sorted_files() if name.startswith("bad/")] == names
    tactics = json.loads(Path("ditto_debug_artifacts", names[1]).read_text())
    assert tactics["library"] == "TensorRT-RTX"
    assert tactics["layers"]
    assert "TensorRT-RTX has no build-time tactics" in diff_tactics(*map(Path, FOLDERS)).note


FOLDERS = ("ditto_debug_artifacts/good", "ditto_debug_artifacts/bad")


def test_repeat_sorts_what_any_command_writes():
    Path("flaky.py").write_text(
        "import json\ni = json.load(open('iteration.json'))['iteration']\n"
        "open('out.txt', 'w').write(str(i))\nraise SystemExit(i % 2)\n"
    )
    output = debug("repeat", "--until", 3, "--artifacts", "out.txt", "--", sys.executable, "flaky.py")
    assert output.splitlines()[-1].startswith("2 good, 1 bad of 3")
    assert sorted_files() == ["bad/out_0001_rc1.txt", "good/out_0000_rc0.txt", "good/out_0002_rc0.txt"]
    assert Path("ditto_debug_artifacts/bad/out_0001_rc1.txt").read_text() == "1"


def test_ctrl_c_is_one_line_and_130():
    Path("stop.py").write_text("import os, signal\nos.kill(os.getppid(), signal.SIGINT)\nsignal.pause()\n")
    command = [sys.executable, "-m", "ditto_core", "debug", "repeat", "--until", "2", "--", sys.executable, "stop.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("ditto: interrupted; what was finished is kept")


def write_build(folder, name, layers, timings=()):
    path = Path(folder, f"{name}_tactics.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"library": "TensorRT", "layers": layers, "timings": dict(timings)}))


def test_what_every_bad_build_has_and_no_good_one_is_certain():
    write_build("good", "a", {"conv": "k1", "mm": "k5"}, {"key": "0x1"})
    write_build("good", "b", {"conv": "k2", "mm": "k6"}, {"key": "0x2"})
    write_build("bad", "c", {"conv": "k3", "mm": "k5"}, {"key": "0x1"})
    write_build("bad", "d", {"conv": "k3", "mm": "k7"}, {"key": "0x2", "other": "0x9"})
    found = diff_tactics(Path("good"), Path("bad"))
    assert [(c.key, c.tactic, c.bad) for c in found.suspects] == [
        ("conv", "k3", 2),
        ("mm", "k7", 1),
        ("other", "0x9", 1),
    ]
    assert [c.key for c in found.certain] == ["conv"]
    assert found.suspects[0].instead == ("k1", "k2")
    assert "certain layers: conv: k3 in 2 bad and 0 good, good builds use k1 or k2" in debug(
        "diff-tactics", "--good", "good", "--bad", "bad"
    )


def test_the_json_of_tensorrts_engine_inspector_is_read_too():
    for folder, tactic in (("good", "0x10"), ("bad", "0x20")):
        Path(folder).mkdir()
        layer = {"Name": "conv", "LayerType": "CaskConvolution", "TacticValue": tactic}
        Path(folder, "layers.json").write_text(json.dumps({"Layers": [layer]}))
    (choice,) = diff_tactics(Path("good"), Path("bad")).certain
    assert (choice.key, choice.tactic, choice.instead) == ("conv", "0x20", ("0x10",))


def test_folders_without_tactics_and_of_two_libraries_are_errors():
    Path("good").mkdir()
    with pytest.raises(UsageError, match=r"nowhere.* folder"):
        diff_tactics(Path("nowhere"), Path("good"))
    with pytest.raises(UsageError, match="holds no tactics"):
        diff_tactics(Path("good"), Path("good"))


def test_builds_of_two_searches_in_the_same_folders_are_said_to_be():
    words = ("--until", 1, "--inputs", "inputs.npz", "--reference", "good.onnx")
    for model in ("good.onnx", "bad.onnx"):
        debug("build", model, *words)
    assert "builds of 2 searches" in diff_tactics(*map(Path, FOLDERS)).note
    for file in Path("ditto_debug_artifacts").rglob("*"):
        if file.is_file():
            file.unlink()
    Path("flaky.py").write_text("import os\nraise SystemExit(int(os.environ['DITTO_ITERATION']))")
    debug("build", "good.onnx", "--until", 2, "--check", f"{sys.executable} flaky.py")
    assert (one := diff_tactics(*map(Path, FOLDERS))).suspects == ()
    assert "searches" not in one.note


class EditableTimingCacheStandIn:
    """TensorRT's editable timing cache cannot be had without a GPU; the calls are those of its Python API."""

    def queryKeys(self):
        return ["key a"]

    def query(self, key):
        return type("TimingCacheValue", (), {"tacticHash": 255})()


def test_entries_of_an_editable_timing_cache_are_key_and_tactic():
    assert timing_entries(EditableTimingCacheStandIn()) == {"key a": "0x00000000000000ff"}
    assert timing_entries(object()) == {}


def test_verdicts_against_another_reference_are_refused():
    words = ["--until", 1, "--inputs", "inputs.npz"]
    debug("build", "bad.onnx", *words, "--reference", "good.onnx", "--save-debug-replay", "r.jsonl")
    with pytest.raises(UsageError, match="is the replay of another search"):
        debug("build", "bad.onnx", *words, "--reference", "bad.onnx", "--load-debug-replay", "r.jsonl")


def test_the_folder_of_the_result_is_made():
    debug("build", "good.onnx", "--until", 1, "--json", "new/folder/r.json", "--check", "true")
    assert json.loads(Path("new/folder/r.json").read_text())["good"] == 1
