"""A cache that names what it gives, for decoders whose attention is their own code.

What goes through transformers' ``AttentionInterface`` is named there (``attention``). BLOOM, Falcon, GPT-Neo and MPT
compute attention themselves; their keys and values are seen where the cache joins the past and the new ones.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ditto_core.model.attention import kind_of
from ditto_core.model.recorder import running, tap


class ObservedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [batch, kv_head, total, head_dim] are sites of the module that asks, as in ``attention``."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to the past; return past and new ones, or what a recorder puts in their place."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        module = running()
        if module is None:
            return keys, values
        return tap(f"k_{kind_of(module)}", keys), tap("v_states", values)
