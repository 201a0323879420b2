"""Attention functions for transformers models that name their tensors: ``q_rope``, ``k_rope``, ``probs``, ``context``.

transformers looks an attention implementation up by name (``AttentionInterface``). Ours calls the model file's own
eager function, or the stock sdpa function, and names what goes in and out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ditto_core.model.listener import parameters_of
from ditto_core.model.recorder import tap

PREFIX = "ditto_"


def register() -> None:
    """Make ``ditto_eager`` and ``ditto_sdpa`` known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name in ("eager", "sdpa"):
        AttentionInterface.register(PREFIX + name, observed(name))
        AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])


def observed(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Wrap the attention function ``eager`` or ``sdpa`` so that its tensors become sites of the attention module.

    ``q_rope`` [batch, head, length, head_dim], ``k_rope`` and ``v_states`` [batch, kv_head, total, head_dim],
    ``probs`` [batch, head, length, total] (eager only), ``context`` [batch, length, head, head_dim].
    Without rotary embedding the first two are ``q_states`` and ``k_states``.
    """

    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inner = attention_function(name, module)
        kind = kind_of(module)
        query = tap(f"q_{kind}", query)
        key = tap(f"k_{kind}", key)
        value = tap("v_states", value)
        context, probs = inner(module, query, key, value, attention_mask, **kwargs)
        if probs is not None:
            seen = tap("probs", probs)
            if seen is not probs:
                context = other_context(context, probs, seen, value)
                probs = seen
        return tap("context", context), probs

    return forward


def kind_of(module: nn.Module) -> str:
    """Tell how an attention's queries and keys are called: ``rope`` where it rotates them, else ``states``."""
    return "rope" if "position_embeddings" in parameters_of(module) else "states"


def is_observed(module: nn.Module) -> bool:
    """Tell whether a transformers model computes attention by a function of this module."""
    return str(getattr(getattr(module, "config", None), "_attn_implementation", "")).startswith(PREFIX)


def other_context(context: torch.Tensor, probs: torch.Tensor, seen: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the context that other probabilities give; the very context where it is no plain product with the values.

    ``probs`` and ``seen`` are [batch, head, length, total], ``value`` [batch, kv_head, total, head_dim].
    """
    values = value.repeat_interleave(probs.shape[1] // value.shape[1], 1)
    usual = torch.matmul(probs, values).transpose(1, 2)
    if usual.shape != context.shape or not torch.allclose(usual, context, rtol=1e-2, atol=1e-3, equal_nan=True):
        return context
    return torch.matmul(seen, values).transpose(1, 2).contiguous()


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """Return the function that transformers itself would use for ``module`` under the implementation ``name``."""
    if name == "eager":
        for cls in type(module).__mro__:
            function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
            if function is not None:
                return function  # type: ignore[no-any-return]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
