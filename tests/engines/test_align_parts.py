"""Large files are aligned in the memory of a part: the file runs part by part, and values wait on disk."""

import foreign_files
import models
import numpy as np
import pytest
import torch

from ditto_core.align import parts
from ditto_core.align.aligning import study
from ditto_core.align.file import OnnxFile
from ditto_core.align.making import align
from ditto_core.align.parts import run_in_parts
from ditto_core.align.store import SMALL, Kept, Lazy, Store
from ditto_core.model.export import export
from ditto_core.model.loading import load_lean, load_model
from ditto_core.spec import EngineSpec, ModelSource

LLAMA = ModelSource.of(models.llama)


@pytest.fixture(scope="module")
def llama_file(workspace, tmp_path_factory):
    exported = workspace.export(EngineSpec.of(LLAMA)).onnx_path
    return OnnxFile(foreign_files.whole(exported, tmp_path_factory.mktemp("llama") / "model.onnx"))


@pytest.fixture
def feed():
    ids = torch.arange(3, 14).reshape(1, 11).numpy()
    empty = np.zeros((1, 2, 0, 16), np.float32)
    past = {f"past_key_values.{i}.{kind}": empty for i in range(2) for kind in ("key", "value")}
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(11)[None], **past}


def test_every_value_is_the_same_in_parts(llama_file, feed):
    def values(largest):
        return {name: array for name, (array,) in run_in_parts(llama_file, llama_file.copy(), [feed], bool, largest)}

    whole, cut = values(1 << 40), values(20_000)
    assert len(parts.parts(llama_file.copy(), 20_000)) > 10
    assert list(whole) == list(cut)
    for name, array in whole.items():
        np.testing.assert_array_equal(array, cut[name], err_msg=name)


def test_a_session_holds_the_weights_of_its_part_only(llama_file, feed, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        OnnxFile,
        "session",
        lambda self, model, of=OnnxFile.session: (sizes.append(held(model)), of(self, model))[1],
    )

    def held(model):
        return sum(parts.size_of(tensor) for tensor in model.graph.initializer)

    list(run_in_parts(llama_file, llama_file.copy(), [feed], lambda name: name == "logits", 40_000))
    largest = max(parts.size_of(tensor) for tensor in llama_file.model.graph.initializer)
    total = held(llama_file.model)
    assert len(sizes) > 4
    assert max(sizes) <= max(largest, 40_000) + 4096 < total / 2


def test_a_file_is_aligned_in_parts_as_in_one(llama_file, monkeypatch):
    whole = study(load_model(LLAMA), llama_file).matching
    monkeypatch.setattr(run_in_parts, "__defaults__", (20_000,))
    monkeypatch.setattr("ditto_core.align.nearest.CHUNK", 20_000)
    monkeypatch.setattr("ditto_core.align.store.SMALL", 1000)
    cut = study(load_model(LLAMA), llama_file).matching
    named = [i for i, site in enumerate(whole.sites) if site.sites]
    assert len(named) > 30
    for i in named:
        one, other = whole.of(i), cut.of(i)
        assert (one is None) == (other is None)
        if one is not None:
            assert whole.values[one.value].name == cut.values[other.value].name
            assert one.error == pytest.approx(other.error, rel=1e-6)


def test_what_a_store_keeps_on_disk_comes_back_and_is_not_held(monkeypatch):
    monkeypatch.setattr("ditto_core.align.store.RECENT", 3 * SMALL)
    store = Store()
    arrays = [np.random.default_rng(i).normal(size=(2, SMALL)).astype(np.float32)[:, :: i + 1] for i in range(4)]
    kept = [store.keep(array) for array in arrays]
    assert all(isinstance(each, Kept) and each.array is None for each in kept)
    for _ in range(2):
        for array, each in zip(arrays, kept, strict=True):
            np.testing.assert_array_equal(each.load(), array)
    assert sum(array.nbytes for array in store._recent.values()) <= 8 * SMALL  # the last one may be larger alone
    columns = Lazy(kept[:1]).columns(3, 9)
    assert columns.shapes == [(2, 6)]
    np.testing.assert_array_equal(columns[0], arrays[0][:, 3:9])


def test_a_checkpoint_in_half_precision_is_read_as_it_is_stored_and_aligned_in_float32(tmp_path, monkeypatch):
    torch.manual_seed(0)
    models.llama().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    source = ModelSource.of(str(tmp_path / "model"))
    (tmp_path / "onnx").mkdir()
    file = OnnxFile(export(load_model(source), tmp_path / "onnx").onnx_path)
    monkeypatch.setattr("ditto_core.model.loading.LARGE", 0)
    stored = load_lean(source)
    assert {p.dtype for p in stored.module.parameters()} == {torch.bfloat16}
    lean, whole = study(stored, file), study(load_model(source), file)
    assert [site.name for site in lean.matching.sites] == [site.name for site in whole.matching.sites]
    for one, other in zip(lean.matching.sites, whole.matching.sites, strict=True):
        np.testing.assert_array_equal(one.arrays[0], other.arrays[0], err_msg=one.name)
    found = align(stored, file)
    assert (found.off, found.absent, found.ambiguous) == ({}, {}, {})
