"""How a loaded model is called, step by step: its cache, the dtype of its inputs, the names of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ditto_core.model.recorder import tensors_in
from ditto_core.model.states import cache_argument, empty_cache


class Forward:
    """A module and, for a decoder, the cache of the sequence that it is stepping."""

    def __init__(self, module: nn.Module, *, decoder: bool) -> None:
        self.module = module
        self.cache: Any = None
        self._decoder = decoder

    def start(self) -> None:
        """Empty the cache."""
        if self._decoder:
            self.cache = empty_cache(self.module)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step and return the final outputs by name. A module that writes into its inputs writes into copies,
        and floating inputs get the dtype of its parameters."""
        if self._decoder:
            out = self.module(**inputs, use_cache=True, **{cache_argument(self.module): self.cache})
            return {"logits": out.logits}
        own = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
        given = {name: as_float(tensor, own).clone() for name, tensor in inputs.items()}
        return named_outputs(self.module(**given), given)


def as_float(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a floating tensor; leave others."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def named_outputs(output: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name the tensors of a module's output: a single one is ``output``, others by key, or ``output`` and index.

    One that has the name of an input (``sample`` of a diffusion model) is ``sample:out``: a graph has a name once.
    """
    named = {f"output{key}" if not key or key[0].isdigit() else key: tensor for key, tensor in tensors_in(output)}
    return {f"{name}:out" if name in inputs else name: tensor for name, tensor in named.items()}
