"""Convert batches of any layout to rows that are padded on the left, as the rest of this library expects."""

from __future__ import annotations

import torch


def new_tokens(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return which new positions are real, bool [batch, length], from an attention mask [batch, past + length]."""
    return mask[:, -length:].bool()


def prompts(input_ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the prompts [length] of left-padded ``input_ids`` [batch, length] without their padding, int32."""
    return [row[keep.bool()].to(torch.int32) for row, keep in zip(input_ids, mask, strict=True)]


def to_rows(tensor: torch.Tensor, real: torch.Tensor, padded: str = "right") -> torch.Tensor:
    """Lay out a tensor of a step as [batch, length, …], zeros on the padding; ``real`` is bool [batch, length].

    It may be packed [tokens, …] or [1, tokens, …], padded [batch, longest prompt, …] on the side ``padded``, or hold
    one token a row [batch, …] (TensorRT-LLM's logits without ``gather_context_logits``), which becomes [batch, 1, …].
    Anything else is returned as it is.
    """
    batch, length = real.shape
    tokens = int(real.sum())
    if tensor.shape[:2] == (1, tokens) and (batch, length) != (1, tokens):
        tensor = tensor[0]
    if tensor.shape[:2] == (batch, length):
        counts = real.sum(1, keepdim=True)
        there = torch.arange(length, device=real.device) < counts if padded == "right" else real
        return scatter(tensor[there.to(tensor.device)], real)
    if tensor.shape[:1] == (tokens,):
        return scatter(tensor, real)
    return tensor.unsqueeze(1) if tensor.shape[:1] == (batch,) else tensor


def scatter(packed: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Put packed tokens [tokens, …] where ``real`` [batch, length] is true."""
    out = packed.new_zeros((*real.shape, *packed.shape[1:]))
    out[real.to(packed.device)] = packed
    return out
