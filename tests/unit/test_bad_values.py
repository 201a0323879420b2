"""Values and files that cannot be are one line of the project's own errors, wherever they come in."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import onnx
import pytest
import torch

from ditto_core import EngineSpec, Tolerance, assert_close
from ditto_core.align.file import OnnxFile
from ditto_core.backends.outputs_file import SESSION_FILE, read_outputs, write_outputs
from ditto_core.backends.registry import get_backend
from ditto_core.cache import Cache
from ditto_core.debug.tactics import read_folder
from ditto_core.dumps.base import natural
from ditto_core.engines.copied import DIGESTS_FILE
from ditto_core.engines.engine import MANIFEST_FILE, Engine
from ditto_core.errors import BuildError, CacheError, ModelError, TraceError, UsageError
from ditto_core.graphs.files import read_model
from ditto_core.graphs.graph import Graph
from ditto_core.model.checkpoint import load_tokenizer
from ditto_core.model.loading import load_model, tiny_decoder
from ditto_core.sites import Tap
from ditto_core.spec import ModelSource
from ditto_core.stepping.prompts import encode

WEIGHTS = "model.safetensors"


def one_line(error, call, told=""):
    with pytest.raises(error, match=told) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_decoder("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.001, 0.5])
def test_truncated_weights(checkpoint, tmp_path, share):
    for name in ("config.json", WEIGHTS):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[: int(len(whole) * share)])
    one_line(ModelError, lambda: load_model(ModelSource(str(tmp_path))), "damaged")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"garbage" * 10, pickle.dumps({"a": os.getpid}), b"PK\x03\x04" + b"\0" * 90])
def test_pickled_weights_that_are_damaged_or_hold_code(checkpoint, tmp_path, content):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError) as raised:
        load_model(ModelSource(str(tmp_path)))
    assert "\n" not in str(raised.value)
    assert "weights_only" not in str(raised.value)  # torch advises to run what the file says


@pytest.mark.parametrize(
    "manifest", ["{}", "[]", "{", '{"taps": []}', '{"taps": [{}], "spec": {}}', '{"taps": 5, "spec": 5}', "[" * 100000]
)
def test_the_manifest_of_an_engine(tmp_path, manifest):
    (tmp_path / MANIFEST_FILE).write_text(manifest)
    one_line(BuildError, lambda: Engine.load(tmp_path), MANIFEST_FILE)


@pytest.fixture
def copied(tmp_path):
    """A folder as ``Engine.copy_to`` writes it."""
    spec = EngineSpec.of("model", backend="onnxruntime")
    (tmp_path / "built").mkdir()
    engine = Engine(tmp_path / "built", spec, (), decoder=False)
    engine.save_manifest()
    (engine.directory / "engine.onnx").write_bytes(b"graph")
    return engine.copy_to(tmp_path / "copy").directory


def test_a_copy_that_fails_is_one_line_and_leaves_nothing_in_the_way(copied, tmp_path):
    engine = Engine.load(copied)
    (copied / "gone").symlink_to("nowhere")
    one_line(TraceError, lambda: engine.copy_to(tmp_path / "again"), "cannot write .*again: .*No such file")
    assert not (tmp_path / "again").exists()
    (copied / "gone").unlink()
    assert Engine.load(engine.copy_to(tmp_path / "again").directory).spec == engine.spec


HARM = {
    "the content of engine.onnx changed": lambda folder: (folder / "engine.onnx").write_bytes(b"grape"),
    "engine.onnx has 3 bytes, expected 5": lambda folder: (folder / "engine.onnx").write_bytes(b"gra"),
    "engine.onnx is missing": lambda folder: (folder / "engine.onnx").unlink(),
    f"the content of {MANIFEST_FILE} changed": lambda folder: flip(folder / MANIFEST_FILE),
    f"{DIGESTS_FILE} cannot be read": lambda folder: (folder / DIGESTS_FILE).write_bytes(b'{"files": {}}'),
}


def flip(path):
    path.write_bytes(path.read_bytes().replace(b"float32", b"float16"))


@pytest.mark.parametrize(("told", "harm"), HARM.items(), ids=HARM)
def test_a_copied_engine_that_was_damaged(copied, told, harm):
    Engine.load(copied)
    harm(copied)
    one_line(BuildError, lambda: Engine.load(copied), f"is damaged .{told}")


def test_a_copied_engine_whose_digests_were_removed_or_that_has_another_file(copied):
    (copied / "notes.txt").write_text("mine")
    assert Engine.load(copied).spec.backend == "onnxruntime"
    flip(copied / MANIFEST_FILE)
    (copied / DIGESTS_FILE).unlink()
    assert Engine.load(copied).spec.dtype == "float16"


@pytest.mark.parametrize("text", ["[", "[]", "{}", '{"outputs": 5}', "[" * 100_000, None])
def test_the_outputs_beside_an_engine_that_are_damaged(tmp_path, text):
    if text is not None:
        (tmp_path / SESSION_FILE).write_text(text)
    one_line(BuildError, lambda: read_outputs(tmp_path, ["y"], ()), f"{SESSION_FILE} is damaged")


def test_an_engine_that_lacks_an_output_or_a_tap(tmp_path):
    write_outputs(tmp_path, ["y"])
    assert read_outputs(tmp_path, {"y": 0, "v": 1}, (Tap("mlp", value="v"),)) == ["y"]
    one_line(BuildError, lambda: read_outputs(tmp_path, ["v"], ()), "no output 'y'")
    one_line(BuildError, lambda: read_outputs(tmp_path, ["y"], (Tap("mlp", value="v"),)), "no output 'v'")


def test_a_backend_that_fails_to_open_an_engine_names_both(tmp_path):
    engine = Engine(tmp_path, EngineSpec.of("model", backend="openai"), (), decoder=False)
    one_line(BuildError, engine.open, f"the openai engine in {tmp_path} cannot be opened .FileNotFoundError")


def fails():
    raise ValueError("no weights\nanywhere")


def ends():
    raise SystemExit(3)


def needs(size):
    return size


@pytest.mark.parametrize(
    ("factory", "told"),
    [(fails, "'fails' failed: no weights at .*test_bad_values.py"), (ends, "'ends' failed: 3 at"), (needs, "'size'")],
)
def test_a_factory_that_fails(factory, told):
    one_line(ModelError, lambda: load_model(ModelSource.of(factory)), told)


def test_a_damaged_tokenizer_counts_as_none_with_a_warning(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.warns(UserWarning, match="its tokenizer is left out"):
        assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("token", [-1, 1 << 63, 10**40])
def test_token_ids_that_int64_does_not_hold(token):
    one_line(UsageError, lambda: encode([1, token]), "outside the vocabulary$")


def test_numbers_of_other_scripts_and_of_any_length_in_names():
    assert sorted(["b10", "b2", "²", "9" * 5000], key=natural) == ["9" * 5000, "b2", "b10", "²"]


def test_what_contains_itself_or_is_too_deep():
    itself, mapping, deep = [1], {}, 1.0
    itself.append(itself)
    mapping["x"] = mapping
    for _ in range(5000):
        deep = [deep]
    for value in (itself, mapping, deep):
        one_line(UsageError, lambda value=value: assert_close(value, value))


def test_tensors_of_a_function_transform():
    one_line(UsageError, lambda: torch.vmap(lambda x: (assert_close(x, x), x)[1])(torch.ones(3)), "vmap")


@pytest.mark.parametrize(
    "fields", [{"backend": 5}, {"dtype": 5}, {"outputs": 5}, {"options": {5: 6}}, {"profile": 5}, {"dynamic": 5}]
)
def test_fields_of_a_spec(fields):
    one_line(UsageError, lambda: EngineSpec.of("model", **fields), next(iter(fields)))


@pytest.mark.parametrize("threads", ["2", "²", -1, 10**12, 1.5, None])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "onnx-file"])
def test_numbers_of_threads(backend, threads):
    spec = EngineSpec.of("model", backend=backend, options={"threads": threads})
    one_line(UsageError, lambda: get_backend(backend).check(spec), f"threads is {re.escape(repr(threads))}, expected 0")


@pytest.mark.parametrize("table", [{5: 1}, [1], {"finite": "yes"}, {"a": True}, {"a": {"bound": 1, "prepare": 5}}])
def test_tables_of_tolerances(table):
    one_line(UsageError, lambda: Tolerance.of(table))


def test_places_of_a_cache_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (Path("/proc/cache"), tmp_path / "file", tmp_path / "file" / "cache"):
        if root.parent.exists():
            one_line(CacheError, lambda root=root: Cache(root).state("floors", "x.json"), str(root))


def test_a_file_that_a_build_misses_is_not_blamed_on_the_cache(tmp_path):
    def build(folder):
        (folder / "nowhere" / "x").read_text()

    with pytest.raises(FileNotFoundError):
        Cache(tmp_path).get_or_build("engines", "key", build, describe={})


def onnx_file(folder, location):
    weights = onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=location)
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [onnx.helper.make_tensor_value_info("y", 1, [1])], [weights])
    (folder / "model.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return folder / "model.onnx"


@pytest.mark.parametrize("location", ["/etc/passwd", "../outside.bin", "deep/../../outside.bin"])
@pytest.mark.parametrize("read", [OnnxFile, Graph.load, Graph.read, read_model], ids=lambda read: read.__qualname__)
def test_weights_outside_of_a_models_folder(tmp_path, read, location):
    (tmp_path / "outside.bin").write_bytes(b"\0" * 4)
    (tmp_path / "model").mkdir()
    path = onnx_file(tmp_path / "model", location)
    one_line(UsageError, lambda: read(path), "expected a file in its folder")


@pytest.mark.parametrize("text", ["[]", '{"model": []}', '{"model": {"decoder": 5}}', "{", "[" * 100000])
def test_the_configuration_beside_an_engine_file(tmp_path, text):
    (tmp_path / "genai_config.json").write_text(text)
    one_line(UsageError, lambda: OnnxFile(tmp_path), "genai_config.json")


def test_a_file_that_is_no_graph(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"garbage")
    one_line(UsageError, lambda: Graph.read(tmp_path / "model.onnx"), "not an ONNX model")


@pytest.mark.parametrize("layer", [5, None, [1]])
def test_layers_that_are_none(tmp_path, layer):
    (tmp_path / "a.json").write_text(json.dumps({"Layers": [layer]}))
    one_line(UsageError, lambda: read_folder(tmp_path), "a.json")
