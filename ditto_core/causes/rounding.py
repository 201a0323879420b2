"""Number formats, as functions from float64 tensors to the float64 values that the format holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    low, high = tensor.min().clamp(max=0), tensor.max().clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-30)
    zero = (-low / scale).round()
    codes: torch.Tensor = (tensor / scale + zero).round().clamp(0, 2**bits - 1)
    result: torch.Tensor = (codes - zero) * scale
    return result


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


def narrow_sums(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield how many products are summed before the sum is rounded to ``dtype``, and x W^T [..., out] in float64."""
    for chunk in CHUNKS:
        parts = range(0, weight.shape[1], chunk)
        total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float64)
        if total.numel() * len(parts) > LARGEST_SUM:
            continue
        for start in parts:
            part = x[..., start : start + chunk] @ weight[:, start : start + chunk].T
            total = (total + part).to(dtype).double()
        yield chunk, total


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a torch dtype."""
    return tensor.to(dtype).to(tensor.dtype)


Format = tuple[str, "Quantizer | None", "Quantizer | None"]
"""Name, what is done to the weight, what is done to the input."""

QUANTIZERS: tuple[Format, ...] = (
    ("int8 weights, one scale a channel", partial(integers, bits=8), None),
    ("int8 weights, one scale", partial(integers, bits=8, per_tensor=True), None),
    ("int4 weights, groups of 32", partial(integers, bits=4, group=32), None),
    ("int4 weights, groups of 64", partial(integers, bits=4, group=64), None),
    ("int4 weights, groups of 128", partial(integers, bits=4, group=128), None),
    ("int4 weights, one scale a channel", partial(integers, bits=4), None),
    ("int8 weights, groups of 32", partial(integers, bits=8, group=32), None),
    ("int8 weights, one scale and zero point a channel", partial(affine_rows, bits=8), None),
    ("int4 weights with zero points, groups of 32", partial(affine_rows, bits=4, group=32), None),
    ("int4 weights with zero points, groups of 64", partial(affine_rows, bits=4, group=64), None),
    ("int4 weights with zero points, groups of 128", partial(affine_rows, bits=4, group=128), None),
    ("float8 e4m3 weights", partial(cast, dtype=torch.float8_e4m3fn), None),
    ("int8 weights and dynamic uint8 inputs", partial(integers, bits=8, per_tensor=True), affine),
    ("unsigned int8 weights and dynamic uint8 inputs", affine, affine),
    ("float16 weights", partial(cast, dtype=torch.float16), None),
    ("bfloat16 weights", partial(cast, dtype=torch.bfloat16), None),
)
