"""Heads: projections split into them, and their order."""

from __future__ import annotations

import torch

from ditto_core.causes.base import Evidence
from ditto_core.compare.blame import Cause


def states(evidence: Evidence) -> torch.Tensor | None:
    """Return the engine's queries, keys or values of the new tokens before rotation, [batch, head, length, dim].

    They are the output of the head's norm where the model has one, else of the projection.
    """
    base = evidence.site.partition(":")[0]
    letter = evidence.port[0]
    dim = evidence.actual.shape[-1]
    normed = evidence.tensor(f"{base}.{letter}_norm")
    if normed is not None and normed.ndim == 4:
        return normed if normed.shape[1] == evidence.actual.shape[1] else normed.transpose(1, 2)
    flat = evidence.tensor(f"{base}.{letter}_proj")
    if flat is None or flat.ndim != 3 or flat.shape[-1] % dim:
        return None
    return flat.reshape(*flat.shape[:2], -1, dim).transpose(1, 2)


def broadcast_heads(evidence: Evidence) -> Cause | None:
    """The right heads in the wrong order."""
    order = match_heads(evidence.actual, evidence.expected)
    if order is None or not is_reordering(order):
        return None
    if not evidence.explains(evidence.expected[:, order]):
        return None
    line = f"heads are in the order {order.tolist()}"
    return evidence.cause("head order", 0.95, [line], "check how the heads are split or interleaved")


def match_heads(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | None:
    """Return for each head of ``actual`` the nearest head of ``expected``, [head]; None for NaN."""
    a, b = (tensor.transpose(0, 1).flatten(1) for tensor in (actual, expected))
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return None
    return torch.cdist(a, b).argmin(1)


def is_reordering(order: torch.Tensor) -> bool:
    """Tell whether ``order`` [n] has every index once, and not in its own place."""
    own = torch.arange(len(order))
    return not torch.equal(order, own) and torch.equal(order.sort().values, own)
