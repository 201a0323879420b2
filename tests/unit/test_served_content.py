"""What a server's engine is cached under, beside the model: the checkpoint that it is built from, and the GPU."""

from __future__ import annotations

import pytest

from ditto_core.backends.trtllm import detect
from ditto_core.backends.trtllm.backend import TrtllmBackend
from ditto_core.backends.vllm.backend import VllmBackend
from ditto_core.engines.keys import engine_key
from ditto_core.errors import ModelError
from ditto_core.spec import EngineSpec
from ditto_core.system.gpus import describe_gpu


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path_factory):
    found = detect.Installation("1.0.0", tmp_path_factory.mktemp("tensorrt_llm"))
    monkeypatch.setattr(detect, "require", lambda: found)


def key(**options):
    return engine_key(EngineSpec.of("model", backend="trtllm", options=options), TrtllmBackend(), "content")


def test_another_checkpoint_in_the_same_folder_is_another_engine(tmp_path):
    weights = tmp_path / "rank0.safetensors"
    weights.write_bytes(b"int8, first scales")
    before = key(builder="checkpoint", checkpoint=str(tmp_path))
    assert key(builder="checkpoint", checkpoint=str(tmp_path)) == before != key()
    weights.write_bytes(b"int8, other scales")
    assert key(builder="checkpoint", checkpoint=str(tmp_path)) != before


def test_a_checkpoint_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ModelError, match=r"no file below .*nowhere"):
        key(builder="checkpoint", checkpoint=str(tmp_path / "nowhere"))


def test_an_engine_is_of_one_kind_of_gpu():
    assert describe_gpu().items() <= TrtllmBackend().versions().items()


def test_another_checkpoint_that_vllm_serves_in_the_models_place_is_another_engine(tmp_path):
    def content():
        return VllmBackend().content(EngineSpec.of("model", backend="vllm", options={"checkpoint": str(tmp_path)}))

    (tmp_path / "config.json").write_text("{}")
    before = content()
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert content() != before
    assert VllmBackend().content(EngineSpec.of("model", backend="vllm")) == {}
