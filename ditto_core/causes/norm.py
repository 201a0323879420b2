"""Normalization layers: a sum of squares that does not fit float16."""

from __future__ import annotations

import torch
from torch import nn

from ditto_core.causes.base import Evidence, first_cause, parameter
from ditto_core.causes.linear import rows
from ditto_core.compare.blame import Cause

LARGEST_HALF = 65504.0


def norm(evidence: Evidence) -> Cause | None:
    """Explain the output of a norm over the last dimension, from its captured input; other sites are ignored."""
    weight, given = parameter(evidence.module, "weight"), evidence.tensor(f"{evidence.site}:in")
    channels = isinstance(evidence.module, nn.GroupNorm | nn.modules.batchnorm._NormBase)
    if evidence.port or channels or "Norm" not in type(evidence.module).__name__:
        return None
    if weight is None or given is None or given.shape[-1:] != weight.shape:
        return None
    return first_cause(evidence, RULES)


def bias_of(evidence: Evidence) -> torch.Tensor:
    """Return the norm's bias, zero if it has none."""
    bias = parameter(evidence.module, "bias")
    return torch.zeros(evidence.actual.shape[-1], dtype=torch.float64) if bias is None else bias


def zeroed(evidence: Evidence) -> Cause | None:
    """The output is the bias alone."""
    x, bias = rows(evidence, evidence.captured[f"{evidence.site}:in"].double()), bias_of(evidence)
    if float(x.square().sum(-1).max()) > LARGEST_HALF or (rows(evidence, evidence.actual) - bias).any():
        return None
    if not (rows(evidence, evidence.expected) - bias).any():
        return None
    line = "the output is zero (the bias alone) for every token, the input is not"
    return evidence.cause("weights zeroed", 0.97, [line], "check that the weight was loaded into the engine")


def overflow(evidence: Evidence) -> Cause | None:
    """The sum of squares does not fit float16, and x / sqrt(inf) is zero."""
    x, bias = rows(evidence, evidence.captured[f"{evidence.site}:in"].double()), bias_of(evidence)
    actual, squares = rows(evidence, evidence.actual), x.square()
    gone = ((actual == bias).all(-1) | ~torch.isfinite(actual).all(-1)) & (squares.sum(-1) > 0)
    if not gone.any() or float(squares[gone].sum(-1).min()) < LARGEST_HALF:
        return None
    total, peak = float(squares[gone].sum(-1).max()), float(x[gone].abs().max())
    single = "; one square alone is too large" if peak * peak > LARGEST_HALF else ""
    line = (
        f"the output of {int(gone.sum())} tokens is zero or not finite; "
        f"max |x| = {peak:.4g}, sum x^2 = {total:.4g} > {LARGEST_HALF:.0f}, float16's largest{single}"
    )
    return evidence.cause("norm overflow", 0.97, [line], "keep this norm (its square and its sum) in float32")


RULES = (overflow, zeroed)
