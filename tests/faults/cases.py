"""One fault a case: what is put into a real engine, where it is to be blamed, and what its cause is called."""

from dataclasses import dataclass

import numpy as np

from tests.faults import cache, graph, ids, mask, norm, rope, weights

LAYER = "model.layers.1"
ATTENTION = f"{LAYER}.self_attn"
MLP = f"{LAYER}.mlp"
NORM = f"{LAYER}.input_layernorm"
PROBS, CONTEXT = f"{ATTENTION}:probs", f"{ATTENTION}:context"
Q_ROPE, K_ROPE, V_STATES = (f"{ATTENTION}:{port}" for port in ("q_rope", "k_rope", "v_states"))
MASK = "model.layers.0:in.attention_mask"
EMBED, TABLE = "model.embed_tokens", "model.rotary_emb"
GPT = "transformer.h.1"

ALONE = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
PADDED = [ALONE, [20, 21, 22, 23, 24, 25, 26]]
TWO = [ALONE, [20 + 7 * token for token in ALONE]]
LARGE = [5, 300, 6, 390, 310, 7]
NAN = float("nan")
SINE = (f"{TABLE}:out.1",)
LINEAR = tuple(f"self_attn.{name}_proj" for name in "qkvo")
LINEAR = (*LINEAR, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn:probs", "self_attn:context")
PRODUCTS = ("lm_head", *(f"model.layers.{i}.{name}" for i in range(2) for name in LINEAR))


@dataclass(frozen=True)
class Case:
    """``also``: other sites that the fault touches. ``step``: the first that shows it."""

    name: str
    fault: object
    site: str
    kind: str
    rule: str
    model: str = "llama"
    dtype: str = "float32"
    step: int = 0
    prompts: object = None
    also: tuple = ()


def unscaled(base):
    """Rotary frequencies of a base."""
    return lambda f: base ** -(np.arange(f.size) / f.size)


def low_halved(f):
    """The lower half of the frequencies is halved."""
    return f * np.where(np.arange(f.size).reshape(f.shape) < f.size // 2, 1.0, 0.5)


def half(f):
    """Frequencies in float16."""
    return f.astype(np.float16)


FULL = "model.rotary_emb@full_attention"
EMBEDDINGS = [
    Case("table zero", weights.zeroed(EMBED), EMBED, "weights zeroed", "embedding.zeroed"),
    Case("table scaled", weights.scaled(EMBED, 1.01), EMBED, "weight scaled", "embedding.scale_missing"),
    Case(
        "no embedding scale",
        graph.constant_changed(EMBED, "Mul", lambda s: s * 0 + 1),
        EMBED,
        "embedding scale missing",
        "embedding.scale_missing",
        "gemma3",
    ),
    Case("table int8", weights.table_quantized(EMBED), EMBED, "weights quantized", "embedding.quantized"),
    Case("int32", ids.as_int32(), EMBED, "int64 read as int32", "embedding.other_rows"),
    Case("8 bits", ids.changed("Mod", 256), EMBED, "ids truncated", "embedding.other_rows", "many_ids", prompts=LARGE),
    Case(
        "16 bits",
        ids.changed("Mod", 2**16),
        EMBED,
        "ids truncated",
        "embedding.other_rows",
        "large_vocabulary",
        prompts=[5, 66_000, 6, 69_990, 65_536, 7],
    ),
    Case(
        "32 bits",
        ids.low_word(),
        EMBED,
        "ids truncated",
        "embedding.other_rows",
        "clamped_ids",
        prompts=[5, 2**32 + 300, 6, 1000, 2**40 + 310, 7],
    ),
    Case(
        "offset wraps",
        ids.offset_wraps(14),
        EMBED,
        "table offset wraps",
        "embedding.offset_wrapped",
        "width_96",
        prompts=[5, 200, 6, 170, 240, 7],
    ),
    Case("shift", ids.changed("Add", 1), EMBED, "ids shifted", "embedding.other_rows"),
    Case("one unknown id", ids.replaced(14, 0), EMBED, "other ids", "embedding.other_rows"),
    Case("one id after another", ids.replaced(7, 9), EMBED, "other ids", "embedding.other_rows"),
    Case("small vocabulary", ids.changed("Min", 11), EMBED, "ids replaced", "embedding.other_rows"),
    Case("scrambled", ids.scrambled(), EMBED, "other ids", "embedding.other_rows"),
    Case(
        "wpe counts padding",
        rope.positions_from_zero(),
        "transformer.wpe",
        "padding positions",
        "embedding.other_rows",
        "gpt2",
        prompts=PADDED,
    ),
    Case(
        "wpe from one",
        ids.positions_shifted(1),
        "transformer.wpe",
        "positions shifted",
        "embedding.other_rows",
        "gpt2",
    ),
    Case(
        "wpe ends",
        ids.changed("Min", 6, "transformer.wpe"),
        "transformer.wpe",
        "positions bounded",
        "embedding.other_rows",
        "gpt2",
    ),
]

LINEARS = [
    Case("scale", weights.scaled(f"{MLP}.down_proj", 1.01), f"{MLP}.down_proj", "weight scaled", "linear.scaled"),
    Case(
        "tiny scale", weights.scaled(f"{MLP}.down_proj", 1.00001), f"{MLP}.down_proj", "weight scaled", "linear.scaled"
    ),
    Case("zero", weights.zeroed(f"{ATTENTION}.v_proj"), f"{ATTENTION}.v_proj", "weights zeroed", "linear.zeroed"),
    Case(
        "transpose",
        weights.transposed(f"{ATTENTION}.q_proj"),
        f"{ATTENTION}.q_proj",
        "weight transposed",
        "linear.transposed",
    ),
    Case("nan", weights.not_a_number(f"{MLP}.up_proj"), f"{MLP}.up_proj", "weights not finite", "linear.not_finite"),
    Case(
        "gate and up",
        weights.exchanged(f"{MLP}.gate_proj", f"{MLP}.up_proj"),
        f"{MLP}.gate_proj",
        "weights of another layer",
        "linear.other_weight",
    ),
    Case(
        "layers",
        weights.exchanged(f"{ATTENTION}.o_proj", "model.layers.0.self_attn.o_proj"),
        f"{ATTENTION}.o_proj",
        "weights of another layer",
        "linear.other_weight",
    ),
    Case(
        "rows", weights.rows_changed(f"{MLP}.up_proj", [7]), f"{MLP}.up_proj", "weight rows changed", "linear.some_rows"
    ),
    Case(
        "order",
        weights.interleaved(f"{ATTENTION}.q_proj", 4),
        f"{ATTENTION}.q_proj",
        "fused weight order",
        "linear.permuted",
    ),
    Case(
        "fused order",
        weights.interleaved(f"{GPT}.attn.c_attn", 3),
        f"{GPT}.attn.c_attn",
        "fused weight order",
        "linear.permuted",
        "gpt2",
    ),
    Case("int8", weights.quantized(f"{MLP}.up_proj"), f"{MLP}.up_proj", "weights quantized", "linear.quantized"),
    Case("int4", weights.quantized(f"{MLP}.up_proj", 4, 32), f"{MLP}.up_proj", "weights quantized", "linear.quantized"),
    Case("zero points", weights.affine(f"{MLP}.up_proj"), f"{MLP}.up_proj", "weights quantized", "linear.quantized"),
    Case(
        "bias",
        weights.bias_scaled(f"{GPT}.mlp.c_fc", 0),
        f"{GPT}.mlp.c_fc",
        "bias missing",
        "linear.bias_lost",
        "biased",
    ),
    Case(
        "bias twice",
        weights.bias_scaled(f"{GPT}.mlp.c_fc", 2),
        f"{GPT}.mlp.c_fc",
        "bias scaled",
        "linear.bias_lost",
        "biased",
    ),
    Case(
        "tf32",
        graph.products_rounded(10),
        "model.layers.0.self_attn.q_proj",
        "TF32",
        "linear.reduced_precision",
        also=PRODUCTS,
    ),
    Case(
        "bfloat16",
        graph.products_rounded(7, [f"{MLP}.gate_proj"]),
        f"{MLP}.gate_proj",
        "bfloat16 products",
        "linear.reduced_precision",
    ),
    Case(
        "half sums",
        graph.half_accumulation("model.layers.0.mlp.down_proj"),
        "model.layers.0.mlp.down_proj",
        "narrow accumulation",
        "linear.low_accumulation",
        "wide",
        "float16",
    ),
]

NORMS = [
    Case("norm zero", weights.zeroed(NORM), NORM, "weights zeroed", "norm.scaled"),
    Case("epsilon", graph.constant_changed(NORM, "Add", lambda e: e * 100), NORM, "norm epsilon", "norm.epsilon"),
    Case("epsilon outside", norm.epsilon_outside(NORM, 1e-2), NORM, "norm epsilon", "norm.outside"),
    Case("sum of squares", norm.mean_scaled(NORM, 64.0), NORM, "weight scaled", "norm.scaled"),
    Case(
        "norm offset",
        lambda edit: edit.change_weight(NORM, lambda w: w - 1),
        NORM,
        "norm weight offset",
        "norm.variant",
        "gemma3",
    ),
    Case("norm weight ignored", weights.ignored(NORM), NORM, "norm weight ignored", "norm.variant"),
    Case("mean subtracted", norm.centred(NORM), NORM, "norm kind", "norm.variant"),
    Case("norm missing", norm.missing(NORM), NORM, "norm missing", "norm.variant"),
    Case("norm only multiplies", norm.only_multiplies(NORM), NORM, "norm missing", "norm.variant"),
    Case("norm bias", norm.without_bias(f"{GPT}.ln_1"), f"{GPT}.ln_1", "bias missing", "norm.variant", "biased"),
    Case("norm scaled", weights.scaled(NORM, 1.01), NORM, "weight scaled", "norm.scaled"),
    Case(
        "norms exchanged",
        weights.exchanged(NORM, f"{LAYER}.post_attention_layernorm"),
        NORM,
        "weights of another layer",
        "norm.other_weight",
    ),
    Case(
        "norm overflow",
        norm.half_square("model.layers.0.input_layernorm"),
        "model.layers.0.input_layernorm",
        "norm overflow",
        "norm.overflow",
        "loud",
        "float16",
    ),
]

ROTATIONS = [
    Case("rope factor", rope.frequencies(lambda f: f / 8), TABLE, "RoPE scaling factor", "rope.frequencies", also=SINE),
    Case(
        "rope factor in float16",
        rope.frequencies(lambda f: f / 8),
        TABLE,
        "RoPE scaling factor",
        "rope.frequencies",
        dtype="float16",
        also=SINE,
    ),
    Case("rope base", rope.frequencies(unscaled(5e5)), TABLE, "RoPE base", "rope.frequencies", also=SINE),
    Case(
        "rope unscaled",
        rope.frequencies(unscaled(1e4)),
        TABLE,
        "RoPE scaling ignored",
        "rope.frequencies",
        "llama31",
        also=SINE,
    ),
    Case(
        "rope of the other layers",
        rope.frequencies(unscaled(1e4)),
        FULL,
        "RoPE base",
        "rope.frequencies",
        "gemma3",
        also=(f"{FULL}:out.1",),
    ),
    Case("rope base near", rope.frequencies(unscaled(10005.0)), TABLE, "RoPE base", "rope.frequencies", also=SINE),
    Case("rope table half", graph.through(TABLE, graph.HALF), TABLE, "narrow cast", "generic.narrow_format"),
    Case("rope low half", rope.frequencies(low_halved), TABLE, "RoPE scaling differs", "rope.frequencies", also=SINE),
    Case("rope amplitude", rope.amplified(1.1), TABLE, "RoPE amplitude", "rope.amplitude", also=SINE),
    Case(
        "rope counts padding",
        rope.positions_from_zero(),
        TABLE,
        "padding positions",
        "rope.shifted",
        prompts=PADDED,
        also=SINE,
    ),
    Case("rope from one", ids.positions_shifted(1), TABLE, "positions shifted", "rope.shifted", also=SINE),
    Case("rope tables", rope.tables_exchanged(), TABLE, "RoPE direction", "rope.exchanged", also=SINE),
    Case("rope ends", ids.positions_changed("Min", 6), TABLE, "positions bounded", "rope.shifted", also=SINE),
    Case("rope far", ids.positions_shifted(5), TABLE, "positions shifted", "rope.shifted", also=SINE),
    Case("rope cast", rope.frequencies(half), TABLE, "narrow cast", "rope.frequencies", also=SINE),
    Case("no rope", rope.missing(Q_ROPE), Q_ROPE, "RoPE missing", "rope.rotation"),
    Case("rope backwards", rope.backwards(Q_ROPE), Q_ROPE, "RoPE direction", "rope.rotation"),
    Case("sine for cosine", rope.exchanged(Q_ROPE), Q_ROPE, "RoPE direction", "rope.rotation"),
    Case("half a rotation", rope.half(Q_ROPE), Q_ROPE, "RoPE half", "rope.rotation"),
    Case("pairs", rope.interleaved(Q_ROPE, 16), Q_ROPE, "RoPE interleaved", "rope.rotation"),
    Case("pairs grouped", rope.interleaved(Q_ROPE, 16, grouped=True), Q_ROPE, "RoPE interleaved", "rope.rotation"),
    Case("query heads", graph.reordered_heads(Q_ROPE, [1, 0, 3, 2]), Q_ROPE, "head order", "rope.head_order"),
]

ATTENTIONS = [
    Case("key heads", graph.tiled_heads(PROBS, [0, 2, 1, 3]), PROBS, "head grouping", "attention.key_grouping"),
    Case("value heads", graph.tiled_heads(CONTEXT, [0, 2, 1, 3]), CONTEXT, "head grouping", "attention.value_grouping"),
    Case(
        "attention scale",
        graph.constant_changed(PROBS, "Mul", lambda s: s * 4),
        PROBS,
        "attention scale",
        "attention.scale",
    ),
    Case("softcap", graph.without_softcap(PROBS), PROBS, "softcap missing", "attention.cap_missing", "gemma2"),
    Case(
        "other softcap", graph.softcap_changed(PROBS, 30.0), PROBS, "softcap differs", "attention.other_cap", "gemma2"
    ),
    Case("capped", graph.capped(PROBS, 5.0), PROBS, "softcap differs", "attention.other_cap"),
    Case("no probabilities", graph.scaled(PROBS, 0), PROBS, "all zero", "generic.all_zero"),
    Case("probabilities", graph.scaled(PROBS, 0.9), PROBS, "softmax not normalized", "attention.not_normalized"),
    Case(
        "mask twice",
        mask.added_twice("model.layers.0.self_attn:probs"),
        "model.layers.0.self_attn:probs",
        "fully masked row",
        "attention.masked_row",
        prompts=PADDED,
    ),
    Case("anchor", mask.anchored_top_left(), MASK, "mask anchor", "mask.anchor", step=1),
    Case("future", mask.sees_ahead(), MASK, "mask off by one", "mask.off_by_one"),
    Case("self", mask.without_self(), MASK, "mask off by one", "mask.off_by_one"),
    Case("blind", mask.blinds_first(3), MASK, "fully masked row", "mask.blind_rows"),
    Case("far ahead", mask.sees_ahead(2), MASK, "mask shifted", "mask.off_by_one"),
    Case("far behind", mask.sees_ahead(-3), MASK, "mask shifted", "mask.off_by_one"),
    Case("mask inverted", graph.scaled(MASK, -1), MASK, "mask inverted", "mask.inverted"),
    Case("padding inverted", mask.padding_inverted(), MASK, "mask inverted", "mask.inverted", prompts=PADDED),
    Case("padding of row", mask.padding_of_rows([1, 0]), MASK, "rows displaced", "mask.other_rows", prompts=PADDED),
    Case(
        "softmax off by one",
        graph.one_more_in_softmax(PROBS),
        PROBS,
        "softmax not normalized",
        "attention.not_normalized",
    ),
    Case("acausal", mask.sees_ahead(1000), MASK, "causal mask missing", "mask.not_causal"),
    Case("no mask", graph.scaled(MASK, 0), MASK, "causal mask missing", "mask.not_causal", prompts=PADDED),
    Case(
        "scores overflow", graph.scaled(PROBS, NAN), PROBS, "not finite", "generic.not_finite", "far_apart", "float16"
    ),
    Case("padding seen", mask.ignores_padding(), MASK, "padding not masked", "mask.padding", prompts=PADDED),
    Case(
        "no window",
        mask.window(lambda w: np.sign(w) * 10000),
        MASK,
        "sliding window ignored",
        "mask.window",
        "mistral",
    ),
    Case("short window", mask.window(lambda w: w - 3), MASK, "sliding window size", "mask.window", "mistral"),
]

CACHES = [
    Case("past scale", cache.scaled(1, "value", 0.99), V_STATES, "KV cache scale", "cache.past_scaled", step=1),
    Case("past lost", cache.scaled(1, "value", 0), V_STATES, "KV cache lost", "cache.past_lost", step=1),
    Case("past repeats", cache.repeats_last(1, "key"), K_ROPE, "stale KV cache", "cache.past_stale", step=1),
    Case("past late", cache.late_by_one(1, "key"), K_ROPE, "stale KV cache", "cache.past_stale", step=1),
    Case("new repeats", cache.new_repeats_last(1, "key"), K_ROPE, "stale KV cache", "cache.new_stale", step=1),
    Case(
        "past of row",
        cache.of_other_row(1, "key", [1, 0]),
        K_ROPE,
        "KV cache of another row",
        "cache.past_stale",
        step=1,
        prompts=PADDED,
    ),
    Case(
        "past of layer",
        cache.of_other_layer(1, "value", 0),
        V_STATES,
        "KV cache of another layer",
        "cache.past_stale",
        step=1,
    ),
    Case(
        "past of first row",
        cache.of_other_row(1, "value", [0, 0]),
        V_STATES,
        "KV cache of another row",
        "cache.past_stale",
        step=1,
        prompts=TWO,
    ),
    Case("past cast", cache.past_through(1, "key", graph.BRAIN), K_ROPE, "narrow cast", "cache.past_cast", step=1),
    Case("keys are values", cache.of_values(1), K_ROPE, "keys and values exchanged", "cache.past_stale", step=1),
    Case("fitting grid", cache.rounded(1, "value", 0.03), V_STATES, "quantized KV cache", "cache.quantized"),
    Case("no new value", cache.new_scaled(1, "value", 0), V_STATES, "all zero", "generic.all_zero"),
    Case("cache grid", cache.rounded(1, "value", 1.0), V_STATES, "quantized KV cache scale", "cache.quantized"),
    Case("new scale", cache.new_scaled(1, "value", 0.99), V_STATES, "KV cache scale", "cache.new_scaled"),
]

ACTIVATION = "activation.activation"
INNER = f"{MLP}.down_proj:in"
ANYWHERE = [
    Case("residual", graph.operand_alone(LAYER, 1), LAYER, "residual missing", "generic.residual"),
    Case("residual half", graph.term_scaled(LAYER, 1, 0.5), LAYER, "residual scaled", "generic.residual"),
    Case("gate ignored", graph.operand_alone(INNER, 1), INNER, "operand ignored", "generic.factor_missing"),
    Case("clip", graph.clipped(INNER, -0.5, 0.5), INNER, "saturation", "generic.saturated"),
    Case("cast", graph.through(f"{MLP}.act_fn"), f"{MLP}.act_fn", "narrow cast", "generic.narrow_format"),
    Case("cut", graph.cut_to_brain(INNER), INNER, "narrow cast", "generic.narrow_format"),
    Case("float8", graph.through(INNER, graph.EIGHT), INNER, "narrow cast", "generic.narrow_format"),
    Case("only high", graph.clipped(INNER, -1e9, 0.5), INNER, "saturation", "generic.saturated"),
    Case("beyond float16", graph.none, INNER, "overflow", "generic.overflow", "beyond_half", "float16"),
    Case("positions", graph.rolled(INNER, 1), INNER, "positions displaced", "generic.displaced"),
    Case("batch rows", graph.rolled(INNER, 0), INNER, "rows displaced", "generic.displaced", prompts=TWO),
    Case("negated", graph.scaled(INNER, -1), INNER, "sign", "generic.constant_factor"),
    Case("factor", graph.scaled(INNER, 1.01), INNER, "constant factor", "generic.constant_factor"),
    Case("probabilities negated", graph.scaled(PROBS, -1), PROBS, "softmax not normalized", "attention.not_normalized"),
    Case("residual poison", graph.scaled(LAYER, NAN), LAYER, "not finite", "generic.not_finite"),
    Case("cosine poison", graph.scaled(TABLE, NAN), TABLE, "not finite", "generic.not_finite"),
    Case("nothing", graph.scaled(INNER, 0), INNER, "all zero", "generic.all_zero"),
    Case("poison", graph.not_a_number(INNER, 128), INNER, "not finite", "generic.not_finite"),
    Case(
        "other gelu",
        graph.replaced(f"{MLP}.act_fn", "Gelu", approximate="tanh"),
        f"{MLP}.act_fn",
        "activation kind",
        ACTIVATION,
    ),
    Case(
        "erf",
        graph.gelu(f"{GPT}.mlp.act", "none"),
        f"{GPT}.mlp.act",
        "activation kind",
        "activation.activation",
        "gpt2",
    ),
]

CASES = [*EMBEDDINGS, *LINEARS, *NORMS, *ROTATIONS, *ATTENTIONS, *CACHES, *ANYWHERE]


def unnamed(name, fault, site, **fields):
    return Case(name, fault, site, "", "", **fields)


BOTH = tuple(f"model.layers.{i}.self_attn:probs" for i in range(2))
UP, ACT = f"{MLP}.up_proj", f"{MLP}.act_fn"
NAMELESS = [
    unnamed("mask too weak", graph.floored(MASK, -5.0), BOTH[0], also=BOTH),
    unnamed("mask nearly strong enough", graph.floored(MASK, -20.0), BOTH[0], also=BOTH, prompts=PADDED),
    unnamed("leaky relu", graph.replaced(ACT, "LeakyRelu", alpha=0.001), ACT),
    unnamed("swish of 1.7", graph.gate_scaled(ACT, 1.7), ACT),
    unnamed("noise in float16", weights.noisy(UP, 3e-3), UP, dtype="float16"),
    unnamed("groups of 16 in float16", weights.quantized(UP, 8, 16), UP, dtype="float16"),
    unnamed("low-rank update", weights.low_rank(UP, 0.05), UP),
    unnamed("inputs permuted", weights.inputs_rolled(UP), UP),
    unnamed("inputs lost", weights.inputs_lost(UP, 32), UP),
    unnamed("logits of no token", graph.added("logits", np.where(np.arange(256) > 250, -1e4, 0)), "lm_head"),
    unnamed("row of the table", weights.rows_scaled(EMBED, [7], 3.0), EMBED),
    unnamed("softmax over queries", graph.softmax_over(PROBS, 2), PROBS),
    unnamed("small probabilities lost", graph.flushed(PROBS, 0.05), PROBS, model="mistral"),
    unnamed("heads of context", graph.reordered_heads(CONTEXT, [1, 0, 3, 2], axis=2), CONTEXT),
    unnamed("residual of layer before", graph.operand_is(LAYER, 0, "model.layers.0"), LAYER),
    unnamed("one query for all heads", graph.reordered_heads(Q_ROPE, [0, 0, 0, 0]), Q_ROPE),
    unnamed("past of other head", cache.past_heads(1, "value", [1, 0]), V_STATES, step=1),
]
"""Faults for which no rule has a true name."""
