"""Attention functions for transformers models that name their tensors: ``q_rope``, ``k_rope``, ``probs``, ``context``.

transformers looks an attention implementation up by name (``AttentionInterface``). Ours calls the model file's own
eager function, or the stock sdpa function, and names what goes in and out of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ditto_core.recording import tap

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
        kind = "rope" if "position_embeddings" in inspect.signature(module.forward).parameters else "states"
        tap(f"q_{kind}", query)
        tap(f"k_{kind}", key)
        tap("v_states", value)
        context, probs = inner(module, query, key, value, attention_mask, **kwargs)
        if probs is not None:
            tap("probs", probs)
        return tap("context", context), probs

    return forward


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """Return the function that transformers itself would use for ``module`` under the implementation ``name``."""
    if name == "eager":
        for cls in type(module).__mro__:
            function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
            if function is not None:
                return function  # type: ignore[no-any-return]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
