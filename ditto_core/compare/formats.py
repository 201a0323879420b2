"""Number formats, as functions from float64 tensors to the float64 values that the format holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Products that a kernel may sum before it rounds the sum."""

LARGEST_SUM = 1 << 30
"""Roundings up to which a sum is computed again."""

Quantizer = Callable[[torch.Tensor], torch.Tensor]


def round_bits(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to ``bits`` stored mantissa bits, to nearest even; the exponent keeps its range."""
    mantissa, exponent = torch.frexp(tensor)
    scale = 2.0 ** (bits + 1)
    return torch.ldexp((mantissa * scale).round() / scale, exponent)


def integers(tensor: torch.Tensor, bits: int, *, group: int = 0, per_tensor: bool = False) -> torch.Tensor:
    """Round symmetrically to signed integers with one scale a row, a group of a row, or the whole tensor."""
    flat = tensor.reshape(1, -1) if per_tensor else tensor
    if group:
        if tensor.shape[-1] % group:
            return tensor
        flat = tensor.reshape(-1, group)
    return on_grid(flat, flat.abs().amax(-1, keepdim=True), bits).reshape(tensor.shape)


def on_grid(tensor: torch.Tensor, largest: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to signed integers, the largest of which stands for ``largest``."""
    top = 2 ** (bits - 1) - 1
    scale = largest.clamp(min=1e-30) / top
    rounded: torch.Tensor = (tensor / scale).round().clamp(-top - 1, top) * scale
    return rounded


def affine(tensor: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Round to unsigned integers with one scale and zero point, as dynamic quantization does with activations."""
    return affine_rows(tensor.reshape(1, -1), bits).reshape(tensor.shape)


def affine_rows(tensor: torch.Tensor, bits: int, *, group: int = 0) -> torch.Tensor:
    """Round to unsigned integers with one scale and zero point a row, or a group of a row."""
    if group and tensor.shape[-1] % group:
        return tensor
    flat = tensor.reshape(-1, group) if group else tensor
    low, high = flat.amin(-1, keepdim=True).clamp(max=0), flat.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-30)
    zero = (-low / scale).round()
    codes = (flat / scale + zero).round().clamp(0, 2**bits - 1)
    result: torch.Tensor = (codes - zero) * scale
    return result.reshape(tensor.shape)


def narrow_sum(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype, chunk: int) -> torch.Tensor:
    """Return the product x y, its sum rounded to ``dtype`` after every ``chunk`` terms; ValueError beyond all time."""
    parts = range(0, x.shape[-1], chunk)
    total = torch.zeros((), dtype=x.dtype)
    for start in parts:
        total = (total + x[..., start : start + chunk] @ y[..., start : start + chunk, :]).to(dtype).to(x.dtype)
        if total.numel() * len(parts) > LARGEST_SUM:
            raise ValueError(f"{total.numel()} x {len(parts)} roundings")
    return total


Format = tuple[str, Quantizer, "Quantizer | None"]
"""Name, what is done to the weight, what is done to the input."""

GROUPS = (32, 64, 128)

QUANTIZERS: tuple[Format, ...] = (
    ("int8 weights, one scale a channel", partial(integers, bits=8), None),
    ("int8 weights, one scale", partial(integers, bits=8, per_tensor=True), None),
    ("int4 weights, one scale a channel", partial(integers, bits=4), None),
    ("int8 weights, groups of 32", partial(integers, bits=8, group=32), None),
    *((f"int4 weights, groups of {n}", partial(integers, bits=4, group=n), None) for n in GROUPS),
    ("int8 weights, one scale and zero point a channel", partial(affine_rows, bits=8), None),
    *((f"int4 weights with zero points, groups of {n}", partial(affine_rows, bits=4, group=n), None) for n in GROUPS),
    ("int8 weights and dynamic uint8 inputs", partial(integers, bits=8, per_tensor=True), affine),
    ("unsigned int8 weights and dynamic uint8 inputs", affine, affine),
)
