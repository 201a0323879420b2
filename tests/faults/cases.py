"""One fault a case: what is put into a real engine, where it is to be blamed, and what its cause is called."""

import numpy as np

from tests.faults import cache, graph, ids, mask, rope, weights
from tests.faults.case import (
    CONTEXT,
    EMBED,
    GPT,
    K_ROPE,
    LAYER,
    MASK,
    MLP,
    NAN,
    PADDED,
    PROBS,
    Q_ROPE,
    SINE,
    TABLE,
    TWO,
    V_STATES,
    Case,
)
from tests.faults.product_cases import EMBEDDINGS, LINEARS, NORMS


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
ROTATIONS = [
    Case("rope factor", rope.frequencies(lambda f: f / 8), TABLE, "RoPE scaling factor", "mutants.fits", also=SINE),
    Case(
        "rope factor in float16",
        rope.frequencies(lambda f: f / 8),
        TABLE,
        "RoPE scaling factor",
        "mutants.fits",
        dtype="float16",
        also=SINE,
    ),
    Case("rope base", rope.frequencies(unscaled(5e5)), TABLE, "RoPE base", "mutants.ids", also=SINE),
    Case(
        "rope unscaled",
        rope.frequencies(unscaled(1e4)),
        TABLE,
        "RoPE scaling ignored",
        "mutants.settings",
        "llama31",
        also=SINE,
    ),
    Case(
        "rope of the other layers",
        rope.frequencies(unscaled(1e4)),
        FULL,
        "RoPE base",
        "mutants.settings",
        "gemma3",
        also=(f"{FULL}:out.1",),
    ),
    Case("rope base near", rope.frequencies(unscaled(10005.0)), TABLE, "RoPE base", "mutants.ids", also=SINE),
    Case("rope table half", graph.through(TABLE, graph.HALF), TABLE, "narrow cast", "mutants.formats"),
    Case("rope low half", rope.frequencies(low_halved), TABLE, "RoPE scaling differs", "mutants.ids", also=SINE),
    Case("rope amplitude", rope.amplified(1.1), TABLE, "RoPE amplitude", "mutants.constants", also=SINE),
    Case(
        "rope counts padding",
        rope.positions_from_zero(),
        TABLE,
        "padding positions",
        "mutants.ids",
        prompts=PADDED,
        also=SINE,
    ),
    Case("rope from one", ids.positions_shifted(1), TABLE, "positions shifted", "mutants.ids", also=SINE),
    Case("rope tables", rope.tables_exchanged(), TABLE, "RoPE direction", "mutants.operations", also=SINE),
    Case("rope ends", ids.positions_changed("Min", 6), TABLE, "positions bounded", "mutants.ids", also=SINE),
    Case("rope far", ids.positions_shifted(5), TABLE, "positions shifted", "mutants.ids", also=SINE),
    Case("rope cast", rope.frequencies(half), TABLE, "narrow cast", "mutants.formats", also=SINE),
    Case("no rope", rope.missing(Q_ROPE), Q_ROPE, "RoPE missing", "mutants.tensors"),
    Case("rope backwards", rope.backwards(Q_ROPE), Q_ROPE, "RoPE direction", "mutants.operations"),
    Case("sine for cosine", rope.exchanged(Q_ROPE), Q_ROPE, "RoPE direction", "mutants.tensors"),
    Case("half a rotation", rope.half(Q_ROPE), Q_ROPE, "RoPE half", "mutants.operations"),
    Case("pairs", rope.interleaved(Q_ROPE, 16), Q_ROPE, "RoPE interleaved", "mutants.layouts"),
    Case("pairs grouped", rope.interleaved(Q_ROPE, 16, grouped=True), Q_ROPE, "RoPE interleaved", "mutants.layouts"),
    Case("query heads", graph.reordered_heads(Q_ROPE, [1, 0, 3, 2]), Q_ROPE, "head order", "mutants.layouts"),
]

ATTENTIONS = [
    Case("key heads", graph.tiled_heads(PROBS, [0, 2, 1, 3]), PROBS, "head grouping", "mutants.layouts"),
    Case("value heads", graph.tiled_heads(CONTEXT, [0, 2, 1, 3]), CONTEXT, "head grouping", "mutants.layouts"),
    Case(
        "attention scale",
        graph.constant_changed(PROBS, "Mul", lambda s: s * 4),
        PROBS,
        "attention scale",
        "mutants.operations",
    ),
    Case("softcap", graph.without_softcap(PROBS), PROBS, "softcap missing", "mutants.operations", "gemma2"),
    Case("other softcap", graph.softcap_changed(PROBS, 30.0), PROBS, "softcap differs", "mutants.constants", "gemma2"),
    Case("capped", graph.capped(PROBS, 5.0), PROBS, "softcap differs", "mutants.fits"),
    Case("no probabilities", graph.scaled(PROBS, 0), PROBS, "all zero", "guards.zero"),
    Case("probabilities", graph.scaled(PROBS, 0.9), PROBS, "softmax not normalized", "mutants.fits"),
    Case(
        "mask twice",
        mask.added_twice("model.layers.0.self_attn:probs"),
        "model.layers.0.self_attn:probs",
        "fully masked row",
        "guards.masked_row",
        prompts=PADDED,
    ),
    Case("anchor", mask.anchored_top_left(), MASK, "mask anchor", "mutants.masks", step=1),
    Case("future", mask.sees_ahead(), MASK, "mask off by one", "mutants.masks"),
    Case("self", mask.without_self(), MASK, "mask off by one", "mutants.masks"),
    Case("blind", mask.blinds_first(3), MASK, "fully masked row", "mutants.masks"),
    Case("far ahead", mask.sees_ahead(2), MASK, "mask shifted", "mutants.masks"),
    Case("far behind", mask.sees_ahead(-3), MASK, "mask shifted", "mutants.masks"),
    Case("mask inverted", graph.scaled(MASK, -1), MASK, "mask inverted", "mutants.masks"),
    Case("padding inverted", mask.padding_inverted(), MASK, "mask inverted", "mutants.masks", prompts=PADDED),
    Case("padding of row", mask.padding_of_rows([1, 0]), MASK, "rows displaced", "mutants.masks", prompts=PADDED),
    Case(
        "softmax off by one",
        graph.one_more_in_softmax(PROBS),
        PROBS,
        "softmax not normalized",
        "mutants.operations",
    ),
    Case("acausal", mask.sees_ahead(1000), MASK, "causal mask missing", "mutants.masks"),
    Case("no mask", graph.scaled(MASK, 0), MASK, "causal mask missing", "mutants.masks", prompts=PADDED),
    Case("scores overflow", graph.scaled(PROBS, NAN), PROBS, "not finite", "guards.not_finite", "far_apart", "float16"),
    Case("padding seen", mask.ignores_padding(), MASK, "padding not masked", "mutants.masks", prompts=PADDED),
    Case(
        "no window",
        mask.window(lambda w: np.sign(w) * 10000),
        MASK,
        "sliding window ignored",
        "mutants.settings",
        "mistral",
    ),
    Case("short window", mask.window(lambda w: w - 3), MASK, "sliding window size", "mutants.masks", "mistral"),
]

CACHES = [
    Case("past scale", cache.scaled(1, "value", 0.99), V_STATES, "KV cache scale", "cache.read_back", step=1),
    Case("past lost", cache.scaled(1, "value", 0), V_STATES, "KV cache lost", "cache.read_back", step=1),
    Case("past repeats", cache.repeats_last(1, "key"), K_ROPE, "stale KV cache", "cache.read_back", step=1),
    Case("past late", cache.late_by_one(1, "key"), K_ROPE, "stale KV cache", "cache.read_back", step=1),
    Case("new repeats", cache.new_repeats_last(1, "key"), K_ROPE, "stale KV cache", "cache.repeated", step=1),
    Case(
        "past of row",
        cache.of_other_row(1, "key", [1, 0]),
        K_ROPE,
        "KV cache of another row",
        "cache.read_back",
        step=1,
        prompts=PADDED,
    ),
    Case(
        "past of layer",
        cache.of_other_layer(1, "value", 0),
        V_STATES,
        "KV cache of another layer",
        "cache.read_back",
        step=1,
    ),
    Case(
        "past of first row",
        cache.of_other_row(1, "value", [0, 0]),
        V_STATES,
        "KV cache of another row",
        "cache.read_back",
        step=1,
        prompts=TWO,
    ),
    Case("past cast", cache.past_through(1, "key", graph.BRAIN), K_ROPE, "narrow cast", "cache.read_back", step=1),
    Case("keys are values", cache.of_values(1), K_ROPE, "keys and values exchanged", "cache.read_back", step=1),
    Case("fitting grid", cache.rounded(1, "value", 0.03), V_STATES, "quantized KV cache", "cache.quantized"),
    Case("no new value", cache.new_scaled(1, "value", 0), V_STATES, "all zero", "guards.zero"),
    Case("cache grid", cache.rounded(1, "value", 1.0), V_STATES, "quantized KV cache scale", "cache.quantized"),
    Case("new scale", cache.new_scaled(1, "value", 0.99), V_STATES, "KV cache scale", "mutants.fits"),
]

INNER = f"{MLP}.down_proj:in"
ANYWHERE = [
    Case("residual", graph.operand_alone(LAYER, 1), LAYER, "residual missing", "mutants.operations"),
    Case("residual half", graph.term_scaled(LAYER, 1, 0.5), LAYER, "residual scaled", "mutants.fits"),
    Case("gate ignored", graph.operand_alone(INNER, 1), INNER, "operand ignored", "mutants.operations"),
    Case("clip", graph.clipped(INNER, -0.5, 0.5), INNER, "saturation", "mutants.fits"),
    Case("cast", graph.through(f"{MLP}.act_fn"), f"{MLP}.act_fn", "narrow cast", "mutants.formats"),
    Case("cut", graph.cut_to_brain(INNER), INNER, "narrow cast", "mutants.formats"),
    Case("float8", graph.through(INNER, graph.EIGHT), INNER, "narrow cast", "mutants.formats"),
    Case("only high", graph.clipped(INNER, -1e9, 0.5), INNER, "saturation", "mutants.fits"),
    Case("beyond float16", graph.none, INNER, "overflow", "guards.not_finite", "beyond_half", "float16"),
    Case("positions", graph.rolled(INNER, 1), INNER, "positions displaced", "mutants.layouts"),
    Case("batch rows", graph.rolled(INNER, 0), INNER, "rows displaced", "mutants.layouts", prompts=TWO),
    Case("negated", graph.scaled(INNER, -1), INNER, "sign", "mutants.operations"),
    Case("factor", graph.scaled(INNER, 1.01), INNER, "constant factor", "mutants.fits"),
    Case("probabilities negated", graph.scaled(PROBS, -1), PROBS, "softmax not normalized", "mutants.operations"),
    Case("residual poison", graph.scaled(LAYER, NAN), LAYER, "not finite", "guards.not_finite"),
    Case("cosine poison", graph.scaled(TABLE, NAN), TABLE, "not finite", "guards.not_finite"),
    Case("nothing", graph.scaled(INNER, 0), INNER, "all zero", "guards.zero"),
    Case("poison", graph.not_a_number(INNER, 128), INNER, "not finite", "guards.not_finite"),
    Case(
        "other gelu",
        graph.replaced(f"{MLP}.act_fn", "Gelu", approximate="tanh"),
        f"{MLP}.act_fn",
        "activation kind",
        "mutants.operations",
    ),
    Case(
        "erf",
        graph.gelu(f"{GPT}.mlp.act", "none"),
        f"{GPT}.mlp.act",
        "activation kind",
        "mutants.operations",
        "gpt2",
    ),
]


BOTH = tuple(f"model.layers.{i}.self_attn:probs" for i in range(2))
UP, ACT = f"{MLP}.up_proj", f"{MLP}.act_fn"


def by_code(name, fault, site, kind, family, **fields):
    return Case(name, fault, site, kind, f"mutants.{family}", **fields)


CODE = [
    by_code("mask too weak", graph.floored(MASK, -5.0), MASK, "other constant", "masks"),
    by_code("mask of -1", graph.floored(MASK, -1.0), MASK, "other constant", "masks", prompts=PADDED),
    by_code("mask of -10", graph.floored(MASK, -10.0), MASK, "other constant", "masks", model="mistral"),
    by_code("leaky relu", graph.replaced(ACT, "LeakyRelu", alpha=0.001), ACT, "activation kind", "fits"),
    by_code("swish of 1.7", graph.gate_scaled(ACT, 1.7), ACT, "activation kind", "fits"),
    by_code("inputs permuted", weights.inputs_rolled(UP), UP, "other layout", "layouts"),
    by_code("inputs lost", weights.inputs_lost(UP, 32), UP, "part of a tensor", "ranges"),
    by_code("softmax over queries", graph.softmax_over(PROBS, 2), PROBS, "operation differs", "operations"),
    by_code(
        "heads of context", graph.reordered_heads(CONTEXT, [1, 0, 3, 2], axis=2), CONTEXT, "other layout", "layouts"
    ),
    by_code("residual of layer before", graph.operand_is(LAYER, 0, "model.layers.0"), LAYER, "other tensor", "tensors"),
    by_code(
        "one query for all heads", graph.reordered_heads(Q_ROPE, [0, 0, 0, 0]), Q_ROPE, "part of a tensor", "ranges"
    ),
    by_code("past of other head", cache.past_heads(1, "value", [1, 0]), V_STATES, "other layout", "layouts", step=1),
    by_code("offset of probabilities", graph.added(PROBS, np.float32(0.01)), PROBS, "other constant", "fits"),
    by_code("scores cast", graph.input_through(PROBS), PROBS, "narrow cast", "formats"),
    by_code(
        "no tanh",
        graph.left_out(f"{GPT}.mlp.act", "Tanh"),
        f"{GPT}.mlp.act",
        "operation missing",
        "operations",
        model="gpt2",
    ),
    by_code(
        "constant of gelu",
        graph.constant_changed(f"{GPT}.mlp.act", "Mul", lambda c: c * 1.1, skip=2),
        f"{GPT}.mlp.act",
        "other constant",
        "constants",
        model="gpt2",
    ),
    by_code("no final softcap", graph.without_last_softcap, "logits", "setting differs", "settings", model="gemma2"),
]
"""Faults that no rule names, and a change of the model's own code does."""

CASES = [*EMBEDDINGS, *LINEARS, *NORMS, *ROTATIONS, *ATTENTIONS, *CACHES, *ANYWHERE, *CODE]


def unnamed(name, fault, site, **fields):
    return Case(name, fault, site, "", "", **fields)


NAMELESS = [
    unnamed("mask nearly strong enough", graph.floored(MASK, -20.0), BOTH[0], also=BOTH, prompts=PADDED),
    unnamed("noise in float16", weights.noisy(UP, 3e-3), UP, dtype="float16"),
    unnamed("groups of 16 in float16", weights.quantized(UP, 8, 16), UP, dtype="float16"),
    unnamed("low-rank update", weights.low_rank(UP, 0.05), UP),
    unnamed("logits of no token", graph.added("logits", np.where(np.arange(256) > 250, -1e4, 0)), "lm_head"),
    unnamed("row of the table", weights.rows_scaled(EMBED, [7], 3.0), EMBED),
    unnamed("small probabilities lost", graph.flushed(PROBS, 0.05), PROBS, model="mistral"),
]
"""Faults that nothing has a true name for."""
