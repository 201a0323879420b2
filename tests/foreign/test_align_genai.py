"""Files that onnxruntime-genai's model builder makes: ``pip install 'pytest-ditto-engine[foreign]'``, else skipped."""

import runpy
import sys

import numpy as np
import onnx
import pytest
import torch

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai makes the files: install the extra 'foreign'")

from ditto_core.align.aligning import study
from ditto_core.align.file import OnnxFile
from ditto_core.align.making import align
from ditto_core.align.repair import all_faults
from ditto_core.graphs.files import read_model
from ditto_core.model.loading import load_model, tiny_decoder
from ditto_core.spec import EngineSpec, ModelSource

BUILDER = "onnxruntime_genai.models.builder"


@pytest.fixture
def built(tmp_path, monkeypatch):
    def make(family, precision="fp32", **config):
        source, target = tmp_path / family, tmp_path / f"{family}-{precision}"
        tiny_decoder(family, **config).save_pretrained(source)
        save_tokenizer(source)
        sizes = ["-i", source, "-m", "unused", "-o", target, "-p", precision, "-e", "cpu", "-c", tmp_path / "cache"]
        monkeypatch.setattr(sys, "argv", ["builder", *map(str, sizes)])
        runpy.run_module(BUILDER, run_name="__main__")
        return str(source), target

    return make


def save_tokenizer(path):
    """The builder wants a tokenizer beside the weights."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=fast, **names).save_pretrained(path)


def test_a_clean_file_agrees_in_prefill_and_decode(built, workspace):
    from ditto_core.pair.pair import Pair

    source, folder = built("llama")
    found = align(load_model(ModelSource.of(source)), OnnxFile(folder))
    assert (found.off, found.absent, found.ambiguous) == ({}, {}, {})
    pair = Pair(workspace, EngineSpec.of(source, engine=folder))
    comparison = pair.generate([5, 6, 7, 8, 9], max_new_tokens=5)
    pair.close()
    assert comparison
    assert {result.step for result in comparison.results} == {0, 1, 2, 3, 4}


def test_a_dropped_window_is_named_at_the_fused_attention(built):
    source, folder = built("mistral")
    model = load_model(ModelSource.of(source))
    seen = study(model, OnnxFile(folder))
    assert seen.probes[1].length > model.module.config.sliding_window
    windows = {
        attribute.i
        for node in OnnxFile(folder).model.graph.node
        for attribute in node.attribute
        if attribute.name == "local_window_size"
    }
    if windows != {-1}:
        pytest.skip("this version of onnxruntime-genai exports the window")
    (first,) = all_faults(seen, 1)
    assert first.fault.operator == "GroupQueryAttention"
    window = model.module.config.sliding_window
    assert first.fault.cause == f"window: local_window_size is -1, with {window} it is right"


def test_keys_and_values_exchanged_in_the_packed_weight_are_named_at_the_product(built, tmp_path):
    source, folder = built("llama")
    model = read_model(OnnxFile(folder).path)
    node = next(n for n in model.graph.node if n.name == "/model/layers.1/attn/qkv_proj/MatMul")
    tensor = next(t for t in model.graph.initializer if t.name == node.input[1])
    array = onnx.numpy_helper.to_array(tensor)
    config = load_model(ModelSource.of(source)).module.config
    width = config.num_key_value_heads * config.head_dim
    queries, keys, values = np.split(array, [-2 * width, -width], axis=1)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.concatenate([queries, values, keys], 1), tensor.name))
    onnx.save(model, str(tmp_path / "model.onnx"))
    (first,) = all_faults(study(load_model(ModelSource.of(source)), OnnxFile(tmp_path / "model.onnx")), 1)
    assert first.fault.node == node.name
    assert first.fault.cause.startswith("wiring: columns")


@torch.no_grad()
def test_every_weight_of_a_4_bit_file_is_found(built):
    from ditto_core.align.quantized import quantized

    source, folder = built("qwen3", "int4")
    whole = quantized(load_model(ModelSource.of(source)), OnnxFile(folder))
    assert (whole.weights.missing, whole.weights.wrong) == ((), {})
    assert whole.weights.worst < 0.2
    assert all_faults(whole.study) == []
