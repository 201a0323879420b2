"""Compound torch functions as elementary ones, so that each part of them can be wrong on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

T = torch.Tensor


def softmax(x: T, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> T:
    """exp(x - max) / sum, along ``dim``."""
    x = x if dtype is None else x.to(dtype)
    powers = torch.exp(x - x.amax(dim, keepdim=True))
    return powers / powers.sum(dim, keepdim=True)


def rsqrt(x: T) -> T:
    """1 / sqrt(x)."""
    return torch.reciprocal(torch.sqrt(x))


def linear(x: T, weight: T, bias: T | None = None) -> T:
    """x W^T + b."""
    product = torch.matmul(x, weight.transpose(0, 1))
    return product if bias is None else product + bias


def addmm(bias: T, x: T, weight: T, *, beta: float = 1, alpha: float = 1) -> T:
    """beta b + alpha x W."""
    product = torch.mm(x, weight)
    product = product if alpha == 1 else product * alpha
    return bias + product if beta == 1 else bias * beta + product


def baddbmm(bias: T, batch1: T, batch2: T, *, beta: float = 1, alpha: float = 1) -> T:
    """beta b + alpha x y, by batch."""
    return bias * beta + torch.bmm(batch1, batch2) * alpha


def layer_norm(x: T, shape: Any, weight: T | None = None, bias: T | None = None, eps: float = 1e-5) -> T:
    """Normalize over the last axes: less the mean, by the root of the mean square."""
    axes = tuple(range(-len(shape), 0))
    scaled = rms_norm(x - x.mean(axes, keepdim=True), shape, weight, eps)
    return scaled if bias is None else scaled + bias


def rms_norm(x: T, shape: Any, weight: T | None = None, eps: float | None = None) -> T:
    """Divide by the root of the mean square over the last axes."""
    axes = tuple(range(-len(shape), 0))
    least = torch.finfo(x.dtype).eps if eps is None else eps
    unit = x * rsqrt(x.pow(2).mean(axes, keepdim=True) + least)
    return unit if weight is None else unit * weight


def batch_norm(
    x: T,
    mean: T | None,
    variance: T | None,
    weight: T | None = None,
    bias: T | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> T:
    """Normalize by recorded statistics along axis 1."""
    if training or mean is None or variance is None:
        return torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, False)
    shape = [1, -1] + [1] * (x.ndim - 2)
    unit = (x - mean.view(shape)) * rsqrt(variance.view(shape) + eps)
    unit = unit if weight is None else unit * weight.view(shape)
    return unit if bias is None else unit + bias.view(shape)


def attention(
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    """softmax(q k^T scale + mask) v, for queries and keys [..., length, dim]."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if hides else scores + attn_mask
    return torch.matmul(softmax(scores, -1), value)


def dropout(x: T, p: float = 0.5, training: bool = True, inplace: bool = False) -> T:
    """Nothing, for models that are not trained."""
    return x


ELEMENTARY: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.softmax: softmax,
    torch.softmax: softmax,
    torch.Tensor.softmax: softmax,
    torch.rsqrt: rsqrt,
    torch.Tensor.rsqrt: rsqrt,
    F.linear: linear,
    torch.addmm: addmm,
    torch.baddbmm: baddbmm,
    torch.Tensor.baddbmm: baddbmm,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.batch_norm: batch_norm,
    F.scaled_dot_product_attention: attention,
    F.dropout: dropout,
}
"""What stands for what, with the same parameters."""
