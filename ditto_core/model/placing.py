"""Put a model on its device in its dtype, with at most one copy of each weight.

A copy shares what it need not change with the model that it was made of. Where the copy would not fit into memory, the
weights of its blocks (the modules of a ``ModuleList``) stay where and as they are, and each block has its own in the
wanted dtype on the wanted device only while it runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ditto_core.model.hollow import weights
from ditto_core.system.memory import available

SHARE = 0.6
"""Share of the memory that is available which a copy may take: activations and an engine need some, too."""


def placed(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    via: torch.dtype | None = None,
    streams: bool | None = None,
) -> nn.Module:
    """Return a module in ``dtype`` on ``device``; the module itself when it is so already.

    Floating parameters and persistent buffers are cast, those that are no ``via`` are rounded to that first.
    Non-persistent buffers keep their dtype: transformers computes rotary frequencies in float32 whatever the weights
    are. ``streams``: blocks get their weights while they run; None: where a copy would need more than :data:`SHARE` of
    the available memory.
    """
    device, via = torch.device(device), via or dtype
    if all(is_so(tensor, dtype, device, via) for tensor in weights(module)) and on(module, device):
        return module
    if streams is None:
        room = available(device)
        streams = room is not None and copied_bytes(module, dtype, device, via) > SHARE * room
    cast = {id(tensor) for tensor in weights(module)}
    kept = only_in_blocks(module) if streams else set()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in kept:
            return nowhere(tensor, dtype, device)
        data = tensor.detach()
        return as_wanted(data, dtype, device, via) if id(tensor) in cast else data.to(device)

    made: dict[int, Any] = {id(p): nn.Parameter(moved(p), requires_grad=False) for p in module.parameters()}
    made |= {id(b): moved(b).clone() for b in module.buffers()}  # a module may write into them
    copied = copy.deepcopy(module, made)
    for block, original in zip(blocks(copied), blocks(module), strict=True):
        pairs = zip(block.parameters(), original.parameters(), strict=True)
        if streamed := [(own, stored) for own, stored in pairs if id(stored) in kept]:
            Streamed(streamed, dtype, device, via).follow(block)
    return copied


class Streamed:
    """The weights of a block's copy beside those that they are made of; the copy has them while it runs."""

    def __init__(
        self, pairs: list[tuple[nn.Parameter, nn.Parameter]], dtype: torch.dtype, device: torch.device, via: torch.dtype
    ) -> None:
        self._pairs = pairs
        self._how = dtype, device, via

    def follow(self, block: nn.Module) -> None:
        """Give the block its weights from the beginning to the end of each call."""
        block.register_forward_pre_hook(self._enter)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, block: nn.Module, args: Any) -> None:
        with unwatched():
            for own, stored in self._pairs:
                own.data = as_wanted(stored.detach(), *self._how)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        with unwatched():
            for own, _ in self._pairs:
                own.data = nowhere(own, own.dtype, own.device)


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide operators from what watches the model's own code."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the modules in the outermost lists of a module, in order."""
    found: list[nn.Module] = []
    for child in module.children():
        inner = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        found += [child] if inner else blocks(child)
    return found


def only_in_blocks(module: nn.Module) -> set[int]:
    """Return the identities of the parameters that no module outside of the blocks has."""
    inside = {id(part) for block in blocks(module) for part in block.modules()}
    outside = [part for part in module.modules() if id(part) not in inside]
    shared = {id(parameter) for part in outside for parameter in part.parameters(recurse=False)}
    return {id(parameter) for block in blocks(module) for parameter in block.parameters()} - shared


def is_so(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, via: torch.dtype) -> bool:
    """Tell whether a weight is as wanted."""
    return tensor.dtype == dtype == via and tensor.device.type == device.type


def on(module: nn.Module, device: torch.device) -> bool:
    """Tell whether all of a module is on a kind of device."""
    return all(tensor.device.type == device.type for tensor in (*module.parameters(), *module.buffers()))


def as_wanted(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, via: torch.dtype) -> torch.Tensor:
    """Return a weight as wanted; the narrow form of it is what travels to the device."""
    narrow = tensor.to(via) if tensor.dtype.itemsize >= via.itemsize else tensor
    return narrow.to(device).to(via).to(dtype)


def nowhere(parameter: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a weight of no elements for the time in which a block does not run."""
    return torch.empty(0, dtype=dtype if parameter.is_floating_point() else parameter.dtype, device=device)


def copied_bytes(module: nn.Module, dtype: torch.dtype, device: torch.device, via: torch.dtype) -> int:
    """Return the bytes of those weights that a copy would not share."""
    return sum(t.numel() * dtype.itemsize for t in weights(module) if not is_so(t, dtype, device, via))
