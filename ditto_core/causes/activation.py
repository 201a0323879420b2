"""Activation functions: which one the engine computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from ditto_core.causes.base import Evidence
from ditto_core.compare.blame import Cause


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def hard_swish(x: torch.Tensor) -> torch.Tensor:
    """SiLU by pieces."""
    return F.hardswish(x)


FUNCTIONS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("erf GELU", F.gelu),
    ("tanh GELU", tanh_gelu),
    ("quick GELU (sigmoid)", quick_gelu),
    ("SiLU", F.silu),
    ("ReLU", F.relu),
    ("squared ReLU", lambda x: F.relu(x).square()),
    ("sigmoid", torch.sigmoid),
    ("tanh", torch.tanh),
    ("hard swish", hard_swish),
    ("the identity", lambda x: x),
)


def activation(evidence: Evidence) -> Cause | None:
    """Name the function that the engine applies instead of the model's."""
    x = evidence.tensor(f"{evidence.site}:in")
    if evidence.port or x is None or list(evidence.module.parameters()) or x.shape != evidence.actual.shape:
        return None
    own = next((name for name, function in FUNCTIONS if same(evidence, function(x))), "")
    if not own:
        return None
    found = [name for name, function in FUNCTIONS if name != own and evidence.explains(function(x))]
    if not found:
        return None
    line = f"the engine computes {' or '.join(found)}, the model {own}"
    return evidence.cause("activation kind", 0.99, [line], f"export with {own}")


def same(evidence: Evidence, candidate: torch.Tensor) -> bool:
    """Tell whether a function is the model's own."""
    return evidence.distance_between(candidate, evidence.expected) < math.sqrt(evidence.blame.bound) / 100
