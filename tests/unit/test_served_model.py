"""A server's engine holds no weights: it serves the model that is named, which has to be what it was built of."""

import json
import shutil
from pathlib import Path

import pytest

from ditto_core.backends.base import BuildRequest
from ditto_core.backends.ranks import backend as ranks
from ditto_core.backends.registry import get_backend
from ditto_core.backends.served.source import model_facts, served_model
from ditto_core.backends.trtllm import backend as trtllm
from ditto_core.backends.vllm import backend as vllm
from ditto_core.errors import BuildError, ModelError
from ditto_core.model.loading import tiny_decoder
from ditto_core.spec import EngineSpec


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DITTO_CACHE_DIR", str(tmp_path / "cache"))


def write_model(folder, weights):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)


def request_of(model, directory):
    directory.mkdir(exist_ok=True)
    return BuildRequest(EngineSpec.of(model, backend="vllm"), Path(), (), ("logits",), True, directory)


def test_an_engine_serves_the_model_that_is_named_and_not_what_lies_where_it_was_built(tmp_path):
    latest, kept, directory = tmp_path / "latest", tmp_path / "step100", tmp_path / "engine"
    write_model(latest, b"first")
    request = request_of(str(latest), directory)
    vllm.VllmBackend().build(request)
    shutil.copytree(latest, kept)
    (latest / "model.safetensors").write_bytes(b"other")
    assert vllm.model_of(EngineSpec.of(str(kept), backend="vllm"), directory) == str(kept)
    with pytest.raises(BuildError, match=r"serves another model than .*/latest is now: build the engine again"):
        vllm.model_of(request.spec, directory)


@pytest.mark.parametrize(
    ("name", "manifest", "more"),
    [
        ("torch-tp", ranks.MANIFEST, {"shapes": {}}),
        ("trtllm", trtllm.MANIFEST, {"engine": "pytorch"}),
        ("vllm", vllm.MANIFEST, {}),
    ],
)
def test_every_server_refuses_a_model_that_was_overwritten(name, manifest, more, tmp_path):
    write_model(tmp_path / "m", b"first")
    spec = EngineSpec.of(str(tmp_path / "m"), backend=name)
    facts = model_facts(request_of(str(tmp_path / "m"), tmp_path / "engine"), name)
    (tmp_path / "engine" / manifest).write_text(json.dumps({**facts, **more}))
    (tmp_path / "m" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(BuildError, match="serves another model"):
        get_backend(name).open(spec, tmp_path / "engine", ())
    shutil.rmtree(tmp_path / "m")
    with pytest.raises(ModelError, match="is not there"):
        get_backend(name).open(spec, tmp_path / "engine", ())


def test_a_module_made_by_code_is_served_from_beside_the_engine_wherever_that_lies(tmp_path):
    request = request_of(lambda: tiny_decoder("llama", layers=1), tmp_path / "engine")
    facts = model_facts(request, "vllm")
    (tmp_path / "engine").rename(tmp_path / "copy")
    assert served_model(facts, request.spec, tmp_path / "copy") == str(tmp_path / "copy" / "model")
    assert (tmp_path / "copy" / "model" / "config.json").is_file()
