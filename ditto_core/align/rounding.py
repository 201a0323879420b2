"""How quantized operators round what they read: repeated in the model, it is the error that a healthy kernel has.

The formulas are ONNX Runtime's: 8 bits with a scale for each block of inputs (``MatMulNBits`` at accuracy level 4),
with the range of the whole tensor (ONNX ``DynamicQuantizeLinear``), or with stored scales (ONNX ``QuantizeLinear``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ditto_core.model.loading import LoadedModel

SMALLEST = 1e-30


@dataclass(frozen=True)
class Blocks:
    """Symmetric int8; every ``size`` numbers of the last dimension have the scale of the largest of them."""

    size: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor [..., width] rounded, in its own dtype."""
        width = tensor.shape[-1]
        padded = nn.functional.pad(tensor, (0, -width % self.size))
        blocks = padded.reshape(-1, self.size)
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / 127
        return (torch.round(blocks / scale) * scale).reshape(padded.shape)[..., :width]


@dataclass(frozen=True)
class Range:
    """uint8 of the range of the whole tensor, 0 included."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor rounded, in its own dtype."""
        low, high = tensor.min().clamp(max=0), tensor.max().clamp(min=0)
        scale = ((high - low) / 255).clamp(min=SMALLEST)
        zero = torch.round(-low / scale)
        return ((torch.round(tensor / scale) + zero).clamp(0, 255) - zero) * scale


@dataclass(frozen=True)
class Fixed:
    """Integers from ``low`` to ``high`` with a stored ``scale`` and ``zero`` point."""

    scale: float
    zero: int
    low: int
    high: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor rounded, in its own dtype."""
        integers = (torch.round(tensor / self.scale) + self.zero).clamp(self.low, self.high)
        return (integers - self.zero) * self.scale


Rounding = Blocks | Range | Fixed


def rounded(model: LoadedModel, roundings: Mapping[str, Rounding]) -> LoadedModel:
    """Return a model whose modules round what they read; it shares the weights of the given one."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    module: nn.Module = copy.deepcopy(model.module, shared)
    for name, rounding in roundings.items():
        module.get_submodule(name).register_forward_pre_hook(partial(round_first, rounding))
    return replace(model, module=module)


def round_first(rounding: Rounding, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round a module's first argument."""
    return (rounding(args[0]), *args[1:])
