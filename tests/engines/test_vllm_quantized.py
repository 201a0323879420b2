"""Quantized checkpoints in the real vLLM, where it is installed (`make vllm`); skipped, and counted, elsewhere."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditto_core.errors import DittoError
from tests.vllm_pairs import PROMPTS, pair_of, saved_llama

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def int8(model, tmp_path):
    """The model's projections in int8, a scale for each output, activations by token: what llm-compressor writes."""
    weights = load_file(model / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[f"{name}_scale"] = scale
        weights[name] = (weights[name] / scale).round().to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors")
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {**quantization, "ignore": ["lm_head"], "quantization_status": "compressed"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


# the table is of trained models: these random weights lose 1e-2
QUANTIZED = {"logits": [{"metric": "kl_mean", "bound": 0.05}, {"metric": "top1_disagreement", "bound": 0.5}]}


AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()


def refused_without_avx512(said):
    """vLLM has some kernels for CPUs with AVX-512 only; on others what it lacks must be the message."""
    return contextlib.nullcontext() if AVX512 else pytest.raises(DittoError, match=said)


def int8_error(engine, weights):
    """Return the rel-L2 of one of vLLM's own layers against exact sums of its int8 numbers.

    Without VNNI a CPU adds two products in 16 bits, which saturate: 6e-2 here, and the logits show it.
    """
    layer = engine._module.model.layers[0].mlp.down_proj
    numbers, scales = (weights[f"model.layers.0.mlp.down_proj.{part}"].double() for part in ("weight", "weight_scale"))
    given = torch.randn(8, numbers.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = given.double().abs().amax(-1, keepdim=True) / 127
    exact = (given.double() / scale).round() @ numbers.T * scale * scales.T
    return float((layer(given)[0].double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("scale", [1, 30])
def test_an_int8_checkpoint_is_judged_by_its_logits(workspace, model, int8, scale):
    weights = load_file(int8 / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight_scale"] *= scale
    save_file(weights, int8 / "model.safetensors")
    options = {"checkpoint": str(int8), "compiled": "off"}
    pair = pair_of(workspace, model, dtype="bfloat16", tolerance=QUANTIZED, **options)
    error = int8_error(pair.sessions.engine, weights)
    run = pair.generate(PROMPTS, max_new_tokens=4)
    pair.close()
    assert bool(run) is (scale == 1 and error < 1e-2)
    assert run.engine.facts["quantization"] == "compressed-tensors"
    assert {verdict.metric for _, verdict in run.logits_verdicts} == {"kl_mean", "top1_disagreement"}
    assert max(step.kl_mean for step in run.logits) > 1e-5  # it is not the float engine


def test_an_fp8_cache_is_judged_by_the_logits(workspace, model):
    options = {"engine.kv_cache_dtype": "fp8", "compiled": "off"}
    pair = pair_of(workspace, model, dtype="bfloat16", **options)
    with refused_without_avx512("FP8 KV cache on CPU requires x86 with AVX-512"):
        run = pair.generate(PROMPTS, max_new_tokens=4)
    if not AVX512:
        return
    pair.close()
    assert run.engine.facts["keys and values"] == "fp8"
    assert {verdict.metric for _, verdict in run.logits_verdicts} == {"kl_mean", "top1_disagreement"}
    assert 1e-4 < max(step.kl_mean for step in run.logits) < 0.2


GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def int32(columns, order=range(8)):
    """Pack numbers of 4 bits [n, 8 k] as int32 [n, k]; ``order[i]`` is the column in bits 4 i and above."""
    parts = columns.reshape(columns.shape[0], -1, 8)
    packed = sum(parts[:, :, column] << (4 * i) for i, column in enumerate(order))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).contiguous()


def four_bits(weight):
    """Return numbers of 4 bits [in, out], 8 for zero, and scales [groups, out], powers of two, which bfloat16 holds."""
    groups = weight.T.reshape(-1, GROUP, weight.shape[0])
    scale = 2.0 ** (groups.abs().amax(1) / 7).log2().ceil()
    return (groups / scale[:, None]).round().to(torch.int64).reshape(weight.T.shape) + 8, scale


def gptq(numbers, scale):
    zeros = torch.full_like(scale, 7, dtype=torch.int64)  # one less than what stands for zero
    groups = (torch.arange(len(numbers)) // GROUP).to(torch.int32)
    return {"qweight": int32(numbers.T).T.contiguous(), "qzeros": int32(zeros), "g_idx": groups}


def awq(numbers, scale):
    zeros = torch.full_like(scale, 8, dtype=torch.int64)
    return {"qweight": int32(numbers, AWQ_ORDER), "qzeros": int32(zeros, AWQ_ORDER)}


FOUR_BITS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("form", FOUR_BITS)
def test_a_checkpoint_of_four_bits_is_the_model_whose_weights_are_of_four_bits(workspace, model, tmp_path, form, scale):
    pack, config = FOUR_BITS[form]
    whole, quantized = (shutil.copytree(model, tmp_path / name) for name in ("whole", "quantized"))
    weights = load_file(model / "model.safetensors")
    packed = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        numbers, scales = four_bits(packed.pop(name))
        weights[name] = ((numbers - 8) * scales.repeat_interleave(GROUP, 0)).T.contiguous()
        wrong = scale if name == "model.layers.1.mlp.down_proj.weight" else 1
        parts = {**pack(numbers, scales), "scales": (scales * wrong).to(torch.float16)}
        packed |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    save_file(weights, whole / "model.safetensors")
    save_file(packed, quantized / "model.safetensors")
    described = json.loads((model / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    options = {"checkpoint": str(quantized), "compiled": "off"}
    # nothing is lost in the weights: what remains is bfloat16's rounding
    pair = pair_of(workspace, whole, dtype="bfloat16", tolerance=QUANTIZED, **options)
    with refused_without_avx512("cpu_gemm_wna16"):  # the kernel
        run = pair.generate(PROMPTS, max_new_tokens=3)
    pair.close()
    if not AVX512:
        return
    assert bool(run) is (scale == 1)
    assert form in run.engine.facts["quantization"]
