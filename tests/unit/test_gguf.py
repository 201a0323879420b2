"""GGUF files: the one that is named is the one that is read."""

from importlib import metadata
from string import ascii_lowercase

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ditto_core.cache import Cache
from ditto_core.engines.keys import dequantized_key
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import ModelError
from ditto_core.model.checkpoint import load_tokenizer, locate
from ditto_core.model.loading import load_model
from ditto_core.spec import ModelSource
from tests.models import llama

SHAPES = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
SHAPES |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96), "attn_norm": (64,), "ffn_norm": (64,)}
OUTSIDE = {"token_embd.weight": (32, 64), "output_norm.weight": (64,), "output.weight": (32, 64)}


def write_llama(path, value, words=()):
    """Write a Llama of one block whose tensors hold one number; with ``words``, of two letters, it has a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(32)
    if words:
        write_tokenizer(writer, words)
    for name, shape in {**OUTSIDE, **{f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()}}.items():
        writer.add_tensor(name, np.full(shape, value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer, words):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", "</s>", *ascii_lowercase, *words])
    writer.add_token_types([3, 3] + [1] * (26 + len(words)))
    writer.add_token_merges([f"{first} {second}" for first, second in words])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


@pytest.fixture
def files(tmp_path):
    return [write_llama(tmp_path / name, value) for name, value in (("a.gguf", 0.25), ("b.gguf", 0.5))]


def test_of_two_files_in_a_folder_each_is_read_where_it_is_named(files, tmp_path):
    workspace = Workspace(Cache(tmp_path / "cache"))
    sources = [ModelSource(str(path)) for path in files]
    assert [locate(source) for source in sources] == files
    for source, value in zip(sources, (0.25, 0.5), strict=True):
        for module in (load_model(source).module, workspace.model(source).module):
            assert torch.equal(module.lm_head.weight, torch.full((32, 64), value))
    assert len({workspace.digest(source) for source in sources}) == 2


def test_a_file_beside_safetensors_is_read_where_it_is_named(files, tmp_path):
    llama().save_pretrained(tmp_path)
    assert float(load_model(ModelSource(str(files[0]))).module.lm_head.weight[0, 0]) == 0.25
    assert locate(ModelSource(str(tmp_path))) == tmp_path


def test_a_folder_with_the_ending_of_a_file_is_a_folder(tmp_path):
    folder = tmp_path / "a.gguf"
    llama().save_pretrained(folder)
    source = ModelSource(str(folder))
    assert Workspace(Cache(tmp_path / "cache")).model(source).location == locate(source) == folder


def test_a_folder_of_one_file_is_that_file_and_of_several_none(files, tmp_path):
    with pytest.raises(ModelError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\): give one"):
        locate(ModelSource(str(tmp_path)))
    files[0].unlink()
    assert locate(ModelSource(str(tmp_path))) == files[1]


@pytest.mark.parametrize("size", [12, 2000, 100_000])
def test_a_file_that_was_cut_is_told_to_be_damaged(files, size):
    files[0].write_bytes(files[0].read_bytes()[:size])
    with pytest.raises(ModelError, match=r"a\.gguf' could not be loaded: its weights are damaged: ") as refused:
        load_model(ModelSource(str(files[0])))
    assert "\n" not in str(refused.value)


def test_the_tokenizer_of_a_file_is_its_own_whatever_is_beside_it(tmp_path):
    with_words = write_llama(tmp_path / "a.gguf", 0.25, ["ab", "bc"])
    without = write_llama(tmp_path / "b.gguf", 0.25)
    alone = load_tokenizer(with_words)("abc").input_ids
    other = Tokenizer(models.WordLevel({"u": 0, "abc": 1}, unk_token="u"))
    PreTrainedTokenizerFast(tokenizer_object=other, unk_token="u").save_pretrained(tmp_path)
    assert load_tokenizer(with_words)("abc").input_ids == alone != [1]
    assert load_tokenizer(without) is None


def test_where_there_are_no_links_a_file_is_copied(files, monkeypatch):
    def refuse(*paths):
        raise OSError("links are not supported here")

    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    assert float(load_model(ModelSource(str(files[1]))).module.lm_head.weight[0, 0]) == 0.5


@pytest.mark.parametrize("package", ["transformers", "gguf"])
def test_what_another_version_made_of_a_file_is_not_taken(monkeypatch, package):
    key, version = dequantized_key("digest"), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0" if name == package else version(name))
    assert dequantized_key("digest") != key


def test_a_file_whose_reader_is_missing_says_what_to_install(files, tmp_path, monkeypatch):
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version("no-gguf" if name == "gguf" else name))
    with pytest.raises(ModelError, match=r"needs the package no-gguf: pip install 'pytest-ditto-engine\[gguf\]'$"):
        Workspace(Cache(tmp_path / "cache")).model(ModelSource(str(files[0])))
