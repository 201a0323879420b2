"""Tokens that a server is forced to choose, and tensors that another thread's stream has written."""

from __future__ import annotations

import torch

NO_END = -1
FORCED = 1e4
LOGITS = "logits"


def laid_out(rows: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """Return rows [batch, length, …] with the tokens where the tap's ``axes`` have them: [batch, heads, length, …]."""
    place = next((i for i, axis in enumerate(axes) if axis in ("length", "total")), 1)
    return rows.movedim(1, place) if rows.ndim == len(axes) else rows


def device() -> str:
    """Return where a server's tensors are."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def settle() -> None:
    """Wait for the GPU: each thread has a stream of its own, and none waits for another's."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def one_hot(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return scores [rows, vocabulary] of which ``tokens`` [rows] have the highest by far."""
    forced = torch.full_like(scores, -FORCED)
    index = tokens.to(scores.device, torch.int64).reshape(-1, *[1] * (scores.ndim - 1))
    return forced.scatter_(-1, index.expand(*scores.shape[:-1], 1), FORCED)
