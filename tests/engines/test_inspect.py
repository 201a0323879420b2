"""`ditto inspect` on real engines of TensorRT-RTX and ONNX Runtime."""

import json

import pytest

from ditto_core.backends.tensorrt.library import load_library
from ditto_core.errors import BackendError
from ditto_core.spec import EngineSpec
from tests.commands import ditto
from tests.models import DECODERS

EVERYTHING = ("**", "**:**")


@pytest.fixture
def tensorrt_engine(workspace):
    """A Llama with every tap, built by TensorRT."""
    try:
        load_library()
    except BackendError as error:
        pytest.skip(f"TensorRT engines cannot be built here: {error}")
    return workspace.build(EngineSpec.of(DECODERS["llama"], backend="tensorrt", outputs=EVERYTHING))


def test_inspect_shows_what_is_in_an_engine_as_tables_and_as_json(tensorrt_engine):
    engine = tensorrt_engine
    shown = ditto("inspect", str(engine.directory))
    assert shown.returncode == 0, shown.stderr
    for title in ("facts", "inputs", "outputs", "profiles", "taps", "layers"):
        assert f"\n{title}" in shown.stdout
    assert "batch, 2, past, 16" in shown.stdout
    data = json.loads(ditto("inspect", str(engine.directory), "--json").stdout)
    assert [t["site"] for t in data["taps"]] == [tap.site for tap in engine.taps]
    assert data["engine"]["inputs"][0] == {"name": "input_ids", "dtype": "int64", "shape": ["batch", "length"]}
    assert any("model.layers.0.self_attn.q_proj" in layer["modules"] for layer in data["engine"]["layers"])
    assert data["engine"]["facts"]["tf32"] is False


def test_inspect_of_an_onnx_runtime_engine_shows_its_nodes(workspace):
    engine = workspace.build(EngineSpec.of(DECODERS["llama"], outputs="model.layers.*"))
    narrow = "".join(ditto("inspect", str(engine.directory), columns=60).stdout.split())
    assert "…" not in narrow  # nothing is cut off, such as the end of a source line
    data = json.loads(ditto("inspect", str(engine.directory), "--json").stdout)["engine"]
    assert {"name": "logits", "dtype": "float32", "shape": ["batch", "length", 256]} in data["outputs"]
    assert any(layer["kind"] == "MatMul" and layer["modules"] == ["lm_head"] for layer in data["layers"])


def test_inspect_of_a_directory_without_an_engine_exits_2(tmp_path):
    shown = ditto("inspect", str(tmp_path))
    assert shown.returncode == 2
    assert "holds no engine" in shown.stderr
