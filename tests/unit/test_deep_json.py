"""JSON that is nested deeper than a parser goes: every file that we read says so in one line."""

import pytest

from ditto_core.align.alignment import Alignment
from ditto_core.align.file import OnnxFile
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.tolerance_files import load_tolerance
from ditto_core.debug.tactics import read_folder
from ditto_core.dumps import open_dump
from ditto_core.dumps.namemap import NameMap
from ditto_core.engines.engine import Engine
from ditto_core.errors import DittoError, UsageError
from ditto_core.fuzz import read as read_corpus
from ditto_core.gates import GateResult
from ditto_core.gates.baseline import Baseline
from ditto_core.gates.suite import load_suite
from ditto_core.model.own_code import code_elsewhere
from ditto_core.pair.answers import read_samples
from ditto_core.report import history
from ditto_core.report.source import open_comparisons
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.stepping.floor import read_floor
from ditto_core.trace import Trace

DEEP = '{"a": ' + "[" * 100_000

READERS = {
    "map.json": Alignment.load,
    "comparison.json": Comparison.load,
    "run.json": open_comparisons,
    "outputs.json": open_dump,
    "names.json": NameMap.load,
    "corpus.json": lambda path: read_corpus(path, ["a"]),
    "gate.json": GateResult.load,
    "baseline.json": Baseline.load,
    "suite.jsonl": load_suite,
    "samples.jsonl": read_samples,
    "history.jsonl": history.read,
    "tactics.json": lambda path: read_folder(path.parent),
    "genai_config.json": lambda path: OnnxFile(path.parent),
    "engine.json": lambda path: Engine.load(path.parent),
    "digests.json": lambda path: Engine.load(path.parent),
    "manifest.json": lambda path: Trace.open(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_json_that_is_nested_too_deeply_is_one_line(tmp_path, name):
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(DittoError) as raised:
        READERS[name](tmp_path / name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("read", [load_tolerance, NameMap.load])
def test_toml_that_is_nested_too_deeply_is_one_line(tmp_path, read):
    (tmp_path / "deep.toml").write_text(f"a = {'[' * 50_000}{']' * 50_000}")
    with pytest.raises(DittoError, match="nested too deeply"):
        read(tmp_path / "deep.toml")


@pytest.mark.parametrize("field", ["site", "value", "axes", "aliases"])
@pytest.mark.parametrize("value", [5, None, [[]], [5]])
def test_a_tap_whose_names_are_none(field, value):
    with pytest.raises(TypeError):
        Tap.from_json({"site": "a", "value": "b", field: value})


@pytest.mark.parametrize("field", ["label", "backend", "dtype", "model"])
def test_a_session_whose_facts_are_no_texts(field):
    plain = {"label": "a", "backend": "b", "dtype": "float32", "model": "m", "facts": {}}
    assert SessionInfo.from_json(plain).label == "a"
    with pytest.raises(TypeError, match=field):
        SessionInfo.from_json({**plain, field: {"a": 1}})


def test_a_map_with_a_number_that_no_float_holds():
    place = {"value": "v", "columns": None, "layout": "a b -> a b", "error": 10**400}
    binding = {"roles": {}, "cache": [], "dtypes": {}, "ranks": {}}
    plain = dict.fromkeys(("file", "digest", "dtype", "quantization", "tolerance", "hidden", "absent", "ambiguous"), "")
    with pytest.raises(UsageError, match="too large"):
        Alignment.from_json({**plain, "inputs": binding, "outputs": {"y": place}, "sites": {}})


def test_a_noise_floor_that_is_nested_too_deeply_is_said_and_not_used(tmp_path):
    (tmp_path / "floor.json").write_text(DEEP)
    said = []
    assert read_floor(tmp_path / "floor.json", said.append) is None
    assert "damaged" in said[0]


TWICE = '{"a": 1, "b": [{"c": 2, "c": 3}]}'


@pytest.mark.parametrize("name", ["map.json", "names.json", "outputs.json", "suite.jsonl", "samples.jsonl"])
def test_json_that_has_a_key_twice_is_refused_since_either_may_be_meant(tmp_path, name):
    (tmp_path / name).write_text(TWICE)
    with pytest.raises(DittoError, match="the key 'c' is there twice"):
        READERS[name](tmp_path / name)


def test_a_checkpoints_configuration_means_what_transformers_reads(tmp_path):
    (tmp_path / "config.json").write_text('{"auto_map": {}, "auto_map": {"AutoConfig": "other/repo--code.Config"}}')
    assert list(code_elsewhere(tmp_path)) == ["other/repo--code.Config"]
