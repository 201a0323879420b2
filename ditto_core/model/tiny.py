"""Tiny random decoders, for tests and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ditto_core.errors import UsageError, nearest

DECODER_FIELDS: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GPT2_FIELDS: Mapping[str, Any] = {
    "vocab_size": 256,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
}


def tiny_decoder(family: str, *, seed: int = 0, layers: int = 2, implementation: str = "eager", **config: Any) -> Any:
    """Make a random decoder of 64 hidden units from its configuration: llama, qwen3, gemma3, mistral or gpt2.

    ``config`` overrides configuration fields. Norm weights are random too, so that a wrong one is visible.
    Returns a ``transformers.PreTrainedModel`` in float32. Raises :class:`UsageError` for an unknown family.
    """
    import transformers

    if family not in FAMILIES:
        raise UsageError(f"unknown tiny model {family!r}, expected {', '.join(FAMILIES)}{nearest(family, FAMILIES)}")
    config_class, model_class, overrides = FAMILIES[family]
    fields = {**(GPT2_FIELDS if family == "gpt2" else DECODER_FIELDS), **overrides}
    fields[("n_layer" if family == "gpt2" else "num_hidden_layers")] = layers
    if family == "gemma3":
        fields["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    torch.manual_seed(seed)
    settings = getattr(transformers, config_class)(**{**fields, **config}, attn_implementation=implementation)
    model = getattr(transformers, model_class)(settings).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model
