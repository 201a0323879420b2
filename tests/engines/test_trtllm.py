"""Against the real TensorRT-LLM, where it is installed and has a GPU; skipped, and counted, everywhere else.

These are the things that the stand-in cannot prove: plugins, GenerationSession, ModelRunner, the PyTorch backend.
"""

import json

import pytest
import torch

from ditto_core.backends.trtllm import detect
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.spec import EngineSpec

FOUND = detect.find()
PROFILE = {"batch": (1, 1, 2), "length": (1, 8, 32), "past": (0, 8, 64)}
SITES = ["model.layers.*", "model.layers.*.self_attn.[qkv]_proj", "model.layers.*.mlp.*_proj", "model.norm", "lm_head"]
pytestmark = [
    pytest.mark.skipif(FOUND is None, reason="TensorRT-LLM is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="TensorRT-LLM needs a GPU"),
]
engines = pytest.mark.skipif(FOUND is not None and not FOUND.engines, reason="this TensorRT-LLM builds no engines")
pytorch = pytest.mark.skipif(FOUND is not None and not FOUND.pytorch, reason="this TensorRT-LLM has no PyTorch backend")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer Llama of 256 hidden units, heads of 64: the attention plugin has no kernels for smaller ones."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_decoder("llama", architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return folder


def pair_of(workspace, model, **options):
    spec = EngineSpec.of(str(model), backend="trtllm", dtype="float16", outputs=SITES, profile=PROFILE, options=options)
    return Pair(workspace, spec, PairOptions(device="cuda"))


def check(pair, prompts, steps):
    """Every site of every step is there, and the engine computes what the model computes."""
    comparison = pair.generate(prompts, max_new_tokens=steps)
    pair.close()
    assert comparison.missing == {}
    assert sorted({r.step for r in comparison.results}) == list(range(steps))
    assert {"model.layers.0", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"} <= {
        r.site for r in comparison.results
    }
    worst = max(comparison.results, key=lambda r: r.metrics.rel_l2)
    assert worst.metrics.rel_l2 < 5e-2, worst.site  # fp16: a wrong tensor is off by more than 0.5


@engines
def test_an_engine_from_the_model(workspace, model):
    check(pair_of(workspace, model), [[5, 6, 7], [9, 8, 7, 6, 5]], 4)


@engines
def test_an_engine_from_a_checkpoint(workspace, model, tmp_path):
    from ditto_core.backends.trtllm import calls

    converted = calls.FROM_HUGGING_FACE(hf_model_or_dir=str(model), dtype="float16")
    (tmp_path / "ckpt").mkdir()
    converted.save_checkpoint(str(tmp_path / "ckpt"))
    check(pair_of(workspace, model, builder="checkpoint", checkpoint=str(tmp_path / "ckpt")), [5, 6, 7], 3)


@engines
def test_an_engine_dumps_where_it_runs(workspace, model, tmp_path):
    from ditto_core.backends.trtllm.run_command import dump
    from ditto_core.dumps import open_dump

    engine = pair_of(workspace, model).engine
    tokens = dump(engine.directory, [[5, 6, 7]], 3, tmp_path / "dump")
    assert [len(row) for row in tokens] == [3]
    written = open_dump(tmp_path / "dump")
    assert written.steps == 3
    assert "transformer.layers.0.attention.qkv" in written.names(0)
    assert "self_attn" in json.dumps(json.loads((tmp_path / "dump" / "names.json").read_text()))


@pytorch
def test_the_pytorch_backend(workspace, model):
    check(pair_of(workspace, model, engine="pytorch"), [5, 6, 7], 4)
