"""What a tired user types: exit code 2, one line, nothing half-written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ditto_core.cli import main
from ditto_core.engines.engine import Engine
from ditto_core.model.beside import check_model_kept
from ditto_core.spec import EngineSpec
from tests.unit.test_gate_result import answers, result

SUITE = '{"text": [1, 2, 3]}\n'
GATE = ("gate", "run", "--model", "no/such/model", "--suite", "suite.jsonl")
CALIBRATE = ("calibrate", "--model", "no/such/model", "--suite", "suite.jsonl")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run a command that must be refused, in a folder with a file of each kind; return its line without `ditto: `."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DITTO_CACHE_DIR", str(tmp_path / "cache"))
    save_file({"x": torch.ones(3)}, "dump.safetensors")
    Path("folder").mkdir()
    Path("suite.jsonl").write_text(SUITE)
    Path("bytes.json").write_bytes(b"\xff\xfe")
    Path("five.json").write_text("5")
    Path("no.toml").write_text("x")
    Path("ends.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result(answers()).save(Path("gate.json"))

    def run(*arguments):
        before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
        monkeypatch.setattr("sys.argv", ["ditto", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main()
        out, err = capsys.readouterr()
        assert done.value.code == 2
        assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
        assert not out
        (line,) = err.splitlines()
        return line.removeprefix("ditto: ")

    return run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((*GATE, "--output", "folder"), "cannot write folder: Is a directory"),
        ((*GATE, "--output", "suite.jsonl/x.json"), "cannot write suite.jsonl/x.json: File exists"),
        ((*GATE, "--output", "suite.jsonl"), "output suite.jsonl would overwrite the suite: name another file"),
        (
            (*GATE, "--baseline", "five.json", "--output", "five.json"),
            "output five.json would overwrite the baseline",
        ),
        ((*CALIBRATE, "--output", "suite.jsonl"), "output suite.jsonl would overwrite the suite: name another file"),
        (
            ("gate", "merge", "gate.json", "--output", "./gate.json"),
            "would overwrite the shard gate.json: name another",
        ),
        ((*GATE, "--baseline", "folder", "--update-baseline"), "folder: Is a directory"),
        ((*GATE, "--samples", "-1"), "the number of samples is -1, expected at least 1, or 0 for all"),
        ((*GATE, "--limit", "kl_mean=x"), "the limit of kl_mean is 'x', expected a number, or 'none' to report"),
        ((*GATE, "--seed", "-1"), "a gate's seed is -1, expected 0 or more"),
        ((*GATE, "--shard", "0/0"), "shard 0/0 does not exist, expected 1/1 to 1/1"),
        (("gate", "check", "bytes.json"), "bytes.json is no gate result ("),
        (("gate", "check", "five.json"), "expected what `ditto gate run` and `ditto gate merge` write"),
        (("gate", "check", "absent.json"), "absent.json is no gate result (No such file or directory)"),
        (("gate", "check", "gate.json", "--max-age=-1d"), "cannot read the time '-1d', expected a number and s, m, h"),
        (("gate", "merge", "gate.json", "--output", "folder"), "cannot write folder: Is a directory"),
        ((*GATE, "--output", "suite.jsonl"), "output suite.jsonl would overwrite the suite: name another file"),
        ((*GATE, "--baseline", "five.json", "--output", "five.json"), "output five.json would overwrite the baseline"),
        ((*GATE, "--baseline", "suite.jsonl", "--update-baseline"), "suite.jsonl would overwrite the suite: name"),
        (("gate", "merge", "gate.json", "--output", "gate.json"), "--output gate.json would overwrite the shard"),
        ((*CALIBRATE, "--output", "folder"), "cannot write folder: Is a directory"),
        ((*CALIBRATE, "--output", "no.toml"), "no.toml cannot be read as TOML"),
        (
            ("compare", "dump.safetensors", "dump.safetensors", "--json", "folder"),
            "cannot write folder: Is a directory",
        ),
        (("align", "no/such/model", "no.onnx", "--map", "folder"), "cannot write folder: Is a directory"),
        (("align", "no/such/model", "no.onnx", "--json", "folder"), "cannot write folder: Is a directory"),
        (
            ("compare", "five.json", "dump.safetensors", "--json", "five.json"),
            "--json five.json would overwrite the engine's dump: name another file",
        ),
        (
            ("compare", "dump.safetensors", "five.json", "--json", "folder/../five.json"),
            "--json folder/../five.json would overwrite the reference's dump: name another file",
        ),
        (
            ("compare", "a.onnx", "b.onnx", "--runner", "trt"),
            "--runner is for dumps: two ONNX files are aligned value by value, within a bound of their dtype",
        ),
        (
            ("compare", "a.onnx", "b.onnx", "--tolerance", "**=0.5"),
            "--tolerance is for dumps: two ONNX files are aligned value by value, within a bound of their dtype",
        ),
        (
            ("align", "a.onnx", "b.onnx", "--map", "names.json"),
            "--map is of a model's sites, a.onnx has none: --json writes the pairs of two files",
        ),
        (("align", "no/such/model", "five.json", "--map", "five.json"), "--map five.json would overwrite the file"),
        (("report", "five.json", "--html", "five.json"), "--html five.json would overwrite the comparison"),
        (
            ("report", "no.json", "--onnx", "five.json", "--model", "five.json"),
            "--onnx five.json would overwrite the model: name another file",
        ),
        (
            ("answers", "no/such/model", "suite.jsonl", "five.json", "--json", "five.json"),
            "--json five.json would overwrite the reference's samples: name another file",
        ),
        (
            ("compare", "folder", "five.json", "--json", "folder/new.json"),
            "--json folder/new.json lies in the engine's dump: name one outside of it",
        ),
        (
            ("compare", "five.json", "folder", "--calibrate", "folder/../folder/a/rules.toml"),
            "--calibrate folder/../folder/a/rules.toml lies in the reference's dump",
        ),
        (
            ("compare", "folder", "folder", "--tolerances", "no.toml", "--json", "no.toml"),
            "--json no.toml would overwrite the file of tolerances",
        ),
        (
            ("debug", "reduce", "no.onnx", "--inputs", "five.json", "--json", "five.json"),
            "--json five.json would overwrite the inputs",
        ),
        (
            ("debug", "precision", "no.onnx", "--inputs", "five.json", "--output", "five.onnx"),
            "--json five.json would overwrite the inputs",
        ),
        (("localize", "no/such/model", "--json", "folder"), "cannot write folder: Is a directory"),
        (("answers", "no/such/model", "five.json", "five.json", "--json", "folder"), "cannot write folder: Is a dir"),
        (("debug", "reduce", "no.onnx", "--output", "folder"), "cannot write folder: Is a directory"),
        (("debug", "precision", "no.onnx", "--json", "folder"), "cannot write folder: Is a directory"),
        (("compare", "dump.safetensors", "dump.safetensors", "--rtol", "-1"), "rtol is -1.0, expected a number of 0"),
        (("compare", "dump.safetensors", "dump.safetensors", "--atol", "nan"), "atol is nan, expected a number of 0"),
        (("build", "no/such/model", "--profile", "batch=1,1,²"), "--profile got 'batch=1,1,²', expected DIM=MIN,OPT"),
        (("build", "no/such/model", "--option", "threads=²"), "option threads is '²', expected 0 to 1024"),
        (("build", "nowhere"), "model 'nowhere' is neither a local directory nor a Hub id"),
        (("build", "dump.safetensors"), "dump.safetensors' is a file, expected a directory, a GGUF file or a Hub id"),
        (("build", "https://host/model"), "model 'https://host/model' is not there"),
        (("build", "ends.py:model"), "ends.py cannot be imported: it ends the program"),
        (("report", "bytes.json"), "bytes.json is not a comparison ("),
        (("report", "five.json"), "expected what ditto compare --json writes"),
    ],
)
def test_bad_input_is_one_line(refused, arguments, line):
    assert line in refused(*arguments)


def test_no_result_is_written_into_a_trace_or_an_engine(refused):
    for file in ("engine/manifest.json", "reference/manifest.json", "engine.json"):
        Path("folder", file).parent.mkdir(exist_ok=True)
        Path("folder", file).write_text("{}")
    for arguments, lies in (
        (
            ("report", "folder", "--json", "folder/engine/manifest.json"),
            "folder/engine/manifest.json lies in the engine's trace",
        ),
        (
            ("report", "folder/x.json", "--html", "folder/reference/r.html"),
            "folder/reference/r.html lies in the reference's trace",
        ),
        (("localize", "folder", "--json", "folder/engine.json"), "folder/engine.json lies in the engine"),
        (
            ("answers", "folder", "suite.jsonl", "suite.jsonl", "--json", "folder/a.json"),
            "folder/a.json lies in the engine",
        ),
    ):
        assert refused(*arguments).endswith(f"{lies}: name one outside of it")


OVER = ("no.onnx", "--json", "no.onnx")
UNTIL = ("--until", "1")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("localize", "folder", "--json", "folder/config.json"), "--json folder/config.json lies in the model"),
        (("localize", "ends.py:make", "--json", "ends.py"), "--json ends.py would overwrite the model"),
        (("answers", "folder", "suite.jsonl", "suite.jsonl", "--json", "folder/vocab.json"), "vocab.json lies in"),
        (("align", "folder", "no.onnx", "--map", "folder/config.json"), "--map folder/config.json lies in the model"),
        (("build", "folder", "folder/engine"), "OUTPUT_DIR folder/engine lies in the model: name one outside"),
        (("build", "folder", "--artifacts-dir", "folder"), "--artifacts-dir folder lies in the model"),
        (("fuzz", "folder", "--corpus", "folder"), "--corpus folder lies in the model"),
        (("gate", "run", "--model", "folder", "--output", "folder/config.json"), "config.json lies in the model"),
        (("calibrate", "--model", "folder", "--output", "folder/merges.txt"), "folder/merges.txt lies in the model"),
        (
            ("run", "--engine-dir", "other", "--inputs", "folder/x.safetensors", "--dump-dir", "folder"),
            "--inputs folder/x.safetensors lies in the --dump-dir",
        ),
        (("run", "--engine-dir", "folder", "--dump-dir", "folder/dump"), "--dump-dir folder/dump lies in the engine"),
        (
            ("run", "--engine-dir", "other", "--model", "folder", "--dump-dir", "folder/dump"),
            "--dump-dir folder/dump lies in the model",
        ),
        (("debug", "build", *OVER, *UNTIL), "--json no.onnx would overwrite the model"),
        (
            ("debug", "build", "no.onnx", *UNTIL, "--iter-artifact", "no.onnx"),
            "--iter-artifact no.onnx would overwrite",
        ),
        (("debug", "reduce", "no.onnx", "--iter-info", "no.onnx"), "--iter-info no.onnx would overwrite the model"),
        (("debug", "reduce", "no.onnx", "--save-debug-replay", "no.onnx"), "replay no.onnx would overwrite the model"),
        (("debug", "precision", "no.onnx", "--iter-artifact", "no.onnx"), "--iter-artifact no.onnx would overwrite"),
        (
            ("debug", "repeat", *UNTIL, "--json", "five.json", "--load-debug-replay", "five.json", "--check", "true"),
            "--json five.json would overwrite the replay",
        ),
        (
            ("debug", "bisect", "a", "b", "--json", "five.json", "--load-debug-replay", "five.json", "--check", "true"),
            "--json five.json would overwrite the replay",
        ),
        (("debug", "diff-tactics", "--good", "folder", "--json", "folder/a.json"), "a.json lies in the good builds"),
    ],
)
def test_no_command_writes_over_what_it_reads(refused, arguments, line):
    Path("no.onnx").write_text("x")
    assert line in refused(*arguments)


def test_no_command_writes_over_the_model_of_an_engine(refused, tmp_path):
    spec = EngineSpec.of(str(tmp_path / "folder"))
    Path("engine").mkdir()
    Engine(Path("engine"), spec, (), decoder=True).save_manifest()
    for arguments in (
        ("localize", "engine", "--json", "folder/config.json"),
        ("answers", "engine", "suite.jsonl", "suite.jsonl", "--json", "folder/config.json"),
        ("run", "--engine-dir", "engine", "--dump-dir", "folder/config.json"),
        ("run", "--engine-dir", "engine", "--dump-dir", "folder/a"),
    ):
        line = f"{arguments[-1]} lies in the engine's model: name one outside of it"
        assert refused(*arguments).endswith(line)


@pytest.mark.parametrize(
    "arguments",
    [
        ("gate", "run", "--model", ".", "--suite", "suite.jsonl", "--output"),
        ("gate", "run", "--model", ".", "--suite", "suite.jsonl", "--update-baseline", "--baseline"),
        ("calibrate", "--model", ".", "--suite", "suite.jsonl", "--output"),
        ("localize", ".", "--json"),
        ("answers", ".", "suite.jsonl", "suite.jsonl", "--json"),
        ("align", ".", "no.onnx", "--map"),
        ("fuzz", ".", "--corpus"),
    ],
)
def test_no_command_makes_a_file_of_the_model_that_it_reads(refused, arguments):
    Path("link.json").symlink_to("folder/config.json")
    for name in ("config.json", "new_config.json", "model.safetensors", "tokenizer.json", "code.py", "link.json"):
        assert refused(*arguments, name).endswith(f"{name} lies in the model: name one outside of it")


def test_what_a_model_does_not_read_may_lie_beside_it(tmp_path):
    for name in ("gate.json", "baseline.json", "rules.toml", "map.json", "a/report.html", "fuzz-corpus"):
        for _ in range(2):
            check_model_kept({"--output": tmp_path / name}, {"model": tmp_path})
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("{}")


def test_a_gate_table_with_a_value_of_the_wrong_type_names_it(refused):
    for value, line in [
        ("5", "pyproject.toml: tool.ditto_core.gates.nightly is 5, expected a table"),
        ('{model="m", samples="ten"}', "a gate's samples is 'ten', expected an integer"),
        ('{model="m", alpha="x"}', "a gate's alpha is 'x', expected a number"),
        ('{model="m", limits=[1]}', "a gate's limits is [1], expected a table"),
        ('{model="m", options="int8"}', "a gate's options is 'int8', expected a table"),
        ('{model="m", seed=true}', "a gate's seed is True, expected an integer"),
    ]:
        Path("pyproject.toml").write_text(f"[tool.ditto_core.gates]\nnightly = {value}\n")
        assert refused("gate", "run", "nightly").endswith(line)


def test_tolerances_that_are_no_table_are_refused(refused):
    Path("five.toml").write_text("tolerances = 5\n")
    line = refused("compare", "dump.safetensors", "dump.safetensors", "--tolerances", "five.toml")
    assert line == "five.toml: tolerances is 5, expected a table"


def test_a_report_of_a_run_takes_its_only_comparison_and_names_several(refused, monkeypatch, capsys):
    dumps = ["dump.safetensors"] * 2
    monkeypatch.setattr("sys.argv", ["ditto", "compare", *dumps, "--json", "new/one.json"])
    with pytest.raises(SystemExit):
        main()
    one = json.loads(Path("new/one.json").read_text())
    Path("run.json").write_text(json.dumps({"test_a": one}))
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["ditto", "report", "run.json"])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    assert "engine agrees" in capsys.readouterr().out
    Path("run.json").write_text(json.dumps({"test_a": one, "test_b": one}))
    line = refused("report", "run.json")
    assert line.startswith("run.json: it holds 2 comparisons")
    assert line.split(": ", 2)[2].startswith("'test_a', 'test_b'")
    assert "needs a suffix" in refused("report", "new/one.json", "--figure", "folder/errors")
