"""The export of a large checkpoint points into the checkpoint's own files, and the engine computes the same."""

from contextlib import closing

import pytest
from safetensors import safe_open

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import BuildError
from ditto_core.graphs.files import read_graph, read_initializer, weights_files
from ditto_core.model import export, hollow, loading
from ditto_core.model.loading import tiny_decoder
from ditto_core.model.mapped import Links, unchanged
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec

SHARDS = 3


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    tiny_decoder("qwen3").half().save_pretrained(folder, max_shard_size="50KB")  # its embeddings are tied
    assert len(list(folder.glob("*.safetensors"))) >= SHARDS
    return folder


@pytest.fixture
def linked(monkeypatch):
    """Small models are linked too, and norms' weights are as large as those that are."""
    monkeypatch.setattr(loading, "LARGE", 0)
    monkeypatch.setattr(export, "LINKED", 0)
    monkeypatch.setattr(hollow, "LARGE", 16)


def test_a_checkpoint_in_the_engines_dtype_is_linked_and_not_copied(checkpoint, tmp_path, linked):
    spec = EngineSpec.of(str(checkpoint), dtype="float16")
    exported = Workspace(Cache(tmp_path / "cache")).export(spec)
    shards = {path.name for path in checkpoint.glob("*.safetensors")}
    graph = read_graph(exported.onnx_path)
    assert shards <= weights_files(graph)
    for name in shards:
        assert (exported.directory / name).samefile(checkpoint / name)
    own = exported.directory / "model.onnx.data"
    assert not own.exists() or own.stat().st_size < 0.05 * sum((checkpoint / name).stat().st_size for name in shards)
    held = {}
    for name in shards:
        with safe_open(checkpoint / name, "pt") as file:
            held |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
    for tensor in graph.graph.initializer:
        key = tensor.name.removeprefix("module.")
        if key in held:
            assert (read_initializer(tensor, exported.directory) == held[key].numpy()).all()


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_an_engine_of_linked_weights_agrees_and_its_folder_holds_no_copy(checkpoint, tmp_path, linked, backend):
    pytest.importorskip(backend)
    spec = EngineSpec.of(str(checkpoint), backend=backend, dtype="float16")
    with closing(Pair(Workspace(Cache(tmp_path / "cache")), spec)) as pair:
        pair.generate([[3, 5, 7, 9, 11]], max_new_tokens=3).assert_close()
    shard = next(checkpoint.glob("*.safetensors"))
    if backend == "onnxruntime":
        assert shard.stat().st_nlink >= 3  # the checkpoint's, the export's, the engine's


def test_the_quantizer_refuses_linked_weights_in_one_line(checkpoint, tmp_path, linked):
    spec = EngineSpec.of(str(checkpoint), dtype="float16", options={"quantize": "int8"})
    with pytest.raises(BuildError, match="dtype='float32'") as caught:
        Workspace(Cache(tmp_path / "cache")).build(spec)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_whose_weights_were_written_to_in_memory_is_not_linked(checkpoint, tmp_path):
    with safe_open(next(checkpoint.glob("*.safetensors")), "pt") as opened:
        tensor = opened.get_tensor(next(iter(opened.keys())))
        assert Links(tmp_path).place(tensor) is not None
        tensor.view(-1)[0] += 1
        assert Links(tmp_path).place(tensor) is None


def test_files_on_another_file_system_or_replaced_are_not_linked(checkpoint, tmp_path):
    file = next(checkpoint.glob("*.safetensors"))
    with safe_open(file, "pt") as opened:
        tensor = opened.get_tensor(next(iter(opened.keys())))
        assert Links(tmp_path).place(tensor).file == tmp_path / file.name
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / file.name).write_bytes(b"")
        assert Links(tmp_path / "taken").place(tensor) is None
        file.rename(tmp_path / "moved")
        file.write_bytes((tmp_path / "moved").read_bytes())
        assert file not in [mapping.file for mapping in unchanged()]
