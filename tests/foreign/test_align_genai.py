"""Files that onnxruntime-genai's model builder makes: ``pip install 'pytest-ditto-engine[foreign]'``, else skipped."""

import runpy
import sys

import pytest
import torch

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai makes the files: install the extra 'foreign'")

from ditto_core.align.aligning import study
from ditto_core.align.fault import faults
from ditto_core.align.file import OnnxFile
from ditto_core.align.making import align
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
    assert faults(seen.matching)[0].operator == "GroupQueryAttention"


@torch.no_grad()
def test_every_weight_of_a_4_bit_file_is_found(built):
    from ditto_core.align.quantized import measure_costs

    source, folder = built("qwen3", "int4")
    costs = measure_costs(study(load_model(ModelSource.of(source)), OnnxFile(folder)))
    assert costs.missing == ()
    assert costs.worst_weight < 0.2
