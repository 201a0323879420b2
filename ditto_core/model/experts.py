"""Mixtures of experts: which tensor scores them, and which holds the rows of those that were chosen."""

from __future__ import annotations

import torch
from torch import nn

ROUTERS = ("gate", "router")
"""What a mixture of experts calls the layer that scores them."""


def chosen_of(root: nn.Module, site: str, scores: torch.Tensor) -> int:
    """Return how many experts a router chooses by the scores [..., experts] that it returns; 0 for anything else.

    One that adds a bias to its scores or chooses among groups does not choose by them alone.
    """
    path, _, name = site.rpartition(".")
    modules = dict(root.named_modules())
    router = modules.get(site)
    if router is None or not is_router(name, router):
        return 0
    for module in (router, modules[path]):
        chosen = getattr(module, "top_k", 0)
        biased = hasattr(module, "e_score_correction_bias") or (getattr(module, "n_group", 1) or 1) > 1
        if isinstance(chosen, int) and 0 < chosen < scores.shape[-1]:
            return 0 if biased else chosen
    return 0


def is_router(name: str, module: nn.Module) -> bool:
    """Tell whether a module of this name scores experts."""
    return name in ROUTERS or "router" in type(module).__name__.lower()


def expert_axis(root: nn.Module, site: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Keep the name of an axis such as ``2*tokens`` inside of a module that chooses as many experts for a token.

    What else multiplies tokens, as heads do, has an order that counts, and gets no name.
    """
    if not any("*tokens" in axis for axis in axes):
        return axes
    path, chosen = site.partition(":")[0].partition("@")[0], set()
    while path:
        path = path.rpartition(".")[0]
        module = root.get_submodule(path)
        routers = [child for name, child in module.named_children() if is_router(name, child)]
        chosen |= {getattr(each, "top_k", None) for each in (module, *routers)}
    return tuple("" if "*tokens" in axis and axis not in {f"{k}*tokens" for k in chosen} else axis for axis in axes)
