"""Faults in real ONNX Runtime engines: the blamed site is right, and the cause is named."""

from dataclasses import dataclass, field

import pytest

from ditto_core.localize import EVERYTHING
from ditto_core.options import PairOptions
from ditto_core.pair import Pair
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, graph, weights
from tests.models import DECODERS, MORE

LAYER = "model.layers.1"
ATTENTION = f"{LAYER}.self_attn"
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26]]
ALONE = PROMPTS[0]
SINE = ("model.rotary_emb:out.1",)
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEAR = (*LINEAR, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn:probs", "self_attn:context")
PRODUCTS = ("lm_head", *(f"model.layers.{i}.{name}" for i in range(2) for name in LINEAR))


@dataclass(frozen=True)
class Case:
    """A fault, where it should be blamed, at which step, and what its cause is called."""

    name: str
    fault: object
    site: str
    kind: str
    model: str = "llama"
    dtype: str = "float32"
    step: int = 0
    prompts: object = field(default_factory=lambda: ALONE)
    also: tuple = ()


CASES = [
    Case("scale", weights.scaled(f"{LAYER}.mlp.down_proj", 1.01), f"{LAYER}.mlp.down_proj", "weight scaled"),
    Case("small scale", weights.scaled(f"{LAYER}.mlp.down_proj", 1.00001), f"{LAYER}.mlp.down_proj", "weight scaled"),
    Case("zero", weights.zeroed(f"{ATTENTION}.v_proj"), f"{ATTENTION}.v_proj", "weights zeroed"),
    Case("transpose", weights.transposed(f"{ATTENTION}.q_proj"), f"{ATTENTION}.q_proj", "weight transposed"),
    Case("nan", weights.not_a_number(f"{LAYER}.mlp.up_proj"), f"{LAYER}.mlp.up_proj", "weights not finite"),
    Case(
        "gate and up",
        weights.exchanged(f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
        f"{LAYER}.mlp.gate_proj",
        "weights of another layer",
    ),
    Case(
        "layers",
        weights.exchanged(f"{ATTENTION}.o_proj", "model.layers.0.self_attn.o_proj"),
        f"{ATTENTION}.o_proj",
        "weights of another layer",
    ),
    Case("rows", weights.rows_changed(f"{LAYER}.mlp.up_proj", [7]), f"{LAYER}.mlp.up_proj", "weight rows changed"),
    Case("order", weights.interleaved(f"{ATTENTION}.q_proj", 4), f"{ATTENTION}.q_proj", "fused weight order"),
    Case(
        "fused order",
        weights.interleaved("transformer.h.1.attn.c_attn", 3),
        "transformer.h.1.attn.c_attn",
        "fused weight order",
        "gpt2",
    ),
    Case("int8", weights.quantized(f"{LAYER}.mlp.up_proj"), f"{LAYER}.mlp.up_proj", "weights quantized"),
    Case("int4", weights.quantized(f"{LAYER}.mlp.up_proj", 4, 32), f"{LAYER}.mlp.up_proj", "weights quantized"),
    Case(
        "bias", weights.without_bias("transformer.h.1.mlp.c_fc"), "transformer.h.1.mlp.c_fc", "bias missing", "biased"
    ),
    Case("rope factor", graph.rope_frequencies(lambda f: f / 8), "model.rotary_emb", "RoPE scaling factor", also=SINE),
    Case(
        "rope base",
        graph.rope_frequencies(lambda f: 500000.0 ** -(graph.np.arange(len(f.ravel())) / len(f.ravel()))),
        "model.rotary_emb",
        "RoPE base",
        also=SINE,
    ),
    Case(
        "rope scaling",
        graph.rope_frequencies(lambda f: 10000.0 ** -(graph.np.arange(len(f.ravel())) / len(f.ravel()))),
        "model.rotary_emb",
        "RoPE scaling ignored",
        "llama31",
        also=SINE,
    ),
    Case("rope missing", graph.rope_missing(f"{ATTENTION}:q_rope"), f"{ATTENTION}:q_rope", "RoPE missing"),
    Case("rope sign", graph.rope_backwards(f"{ATTENTION}:q_rope"), f"{ATTENTION}:q_rope", "RoPE direction"),
    Case(
        "padding in rope",
        graph.positions_from_zero(""),
        "model.rotary_emb",
        "padding positions",
        prompts=PROMPTS,
        also=SINE,
    ),
    Case(
        "padding in wpe",
        graph.positions_from_zero(""),
        "transformer.wpe",
        "padding positions",
        "gpt2",
        prompts=PROMPTS,
    ),
    Case("key heads", graph.tiled_heads(f"{ATTENTION}:probs", [0, 2, 1, 3]), f"{ATTENTION}:probs", "head grouping"),
    Case(
        "value heads", graph.tiled_heads(f"{ATTENTION}:context", [0, 2, 1, 3]), f"{ATTENTION}:context", "head grouping"
    ),
    Case(
        "attention scale",
        graph.constant_changed(f"{ATTENTION}:probs", "Mul", lambda s: s * 4),
        f"{ATTENTION}:probs",
        "attention scale",
    ),
    Case("anchor", graph.mask_anchored_top_left(), "model.layers.0:in.attention_mask", "mask anchor", step=1),
    Case("future", graph.mask_sees_ahead(), "model.layers.0:in.attention_mask", "mask off by one"),
    Case("self", graph.mask_without_self(), "model.layers.0:in.attention_mask", "mask off by one"),
    Case("acausal", graph.mask_sees_ahead(1000), "model.layers.0:in.attention_mask", "causal mask missing"),
    Case(
        "padding seen",
        graph.mask_ignores_padding(),
        "model.layers.0:in.attention_mask",
        "padding not masked",
        prompts=PROMPTS,
    ),
    Case(
        "mask twice",
        graph.mask_added_twice("model.layers.0.self_attn:probs"),
        "model.layers.0.self_attn:probs",
        "fully masked row",
        prompts=PROMPTS,
    ),
    Case(
        "window",
        graph.window(lambda w: graph.np.sign(w) * 10000),
        "model.layers.0:in.attention_mask",
        "sliding window ignored",
        "mistral",
    ),
    Case("past scale", graph.past_scaled(1, "value", 0.99), f"{ATTENTION}:v_states", "KV cache scale", step=1),
    Case("past stale", graph.past_stale(1, "key"), f"{ATTENTION}:k_rope", "stale KV cache", step=1),
    Case(
        "past of row",
        graph.past_of_other_row(1, "key", [1, 0]),
        f"{ATTENTION}:k_rope",
        "KV cache of another row",
        step=1,
        prompts=PROMPTS,
    ),
    Case(
        "past of layer",
        graph.past_of_other_layer(1, "value", 0),
        f"{ATTENTION}:v_states",
        "KV cache of another layer",
        step=1,
    ),
    Case("cache grid", graph.cache_rounded(1, "value", 1.0), f"{ATTENTION}:v_states", "quantized KV cache scale"),
    Case("int32", graph.ids_as_int32(), "model.embed_tokens", "int64 read as int32"),
    Case(
        "epsilon",
        graph.constant_changed(f"{LAYER}.input_layernorm", "Add", lambda e: e * 100),
        f"{LAYER}.input_layernorm",
        "norm epsilon",
    ),
    Case(
        "norm offset",
        lambda edit: edit.change_weight(f"{LAYER}.input_layernorm", lambda w: w - 1),
        f"{LAYER}.input_layernorm",
        "norm weight offset",
        "gemma3",
    ),
    Case(
        "embedding scale",
        graph.constant_changed("model.embed_tokens", "Mul", lambda s: s * 0 + 1),
        "model.embed_tokens",
        "embedding scale missing",
        "gemma3",
    ),
    Case(
        "overflow",
        graph.half_square("model.layers.0.input_layernorm"),
        "model.layers.0.input_layernorm",
        "norm overflow",
        "loud",
        "float16",
    ),
    Case("residual", graph.residual_missing(LAYER, 1), LAYER, "residual missing"),
    Case("clip", graph.clipped(f"{LAYER}.mlp.down_proj:in", -0.5, 0.5), f"{LAYER}.mlp.down_proj:in", "saturation"),
    Case("cast", graph.through(f"{LAYER}.mlp.act_fn"), f"{LAYER}.mlp.act_fn", "narrow cast"),
    Case("tf32", graph.tf32, "model.layers.0.self_attn.q_proj", "TF32", also=PRODUCTS),
    Case(
        "half sums",
        graph.half_accumulation("model.layers.0.mlp.down_proj"),
        "model.layers.0.mlp.down_proj",
        "float16 accumulation",
        "wide",
        "float16",
    ),
    Case("erf", graph.gelu("transformer.h.1.mlp.act", "none"), "transformer.h.1.mlp.act", "activation kind", "gpt2"),
    Case("softcap", graph.without_softcap(f"{ATTENTION}:probs"), f"{ATTENTION}:probs", "softcap missing", "gemma2"),
]


def run(workspace, directory, case):
    faulty = FaultyWorkspace(workspace.cache, case.fault, directory)
    spec = EngineSpec.of({**DECODERS, **MORE}[case.model], dtype=case.dtype, outputs=EVERYTHING)
    pair = Pair(faulty, spec, PairOptions(observer=False))
    found = pair.generate(case.prompts, max_new_tokens=3, localize=True).localization
    pair.close()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blamed_site_is_right_and_cause_is_named(workspace, tmp_path, case):
    found = run(workspace, tmp_path, case)
    assert found.first is not None
    assert (found.first.site, found.first.step) == (case.site, case.step)
    assert {item.site for item in found.blamed} == {case.site, *case.also}
    assert found.cause is not None
    assert (found.cause.kind, found.cause.site) == (case.kind, case.site), found.causes
