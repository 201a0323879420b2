"""How much the sums of a linear layer cancel: how far a small error of its inputs grows at its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd


@contextmanager
def watching(model: nn.Module, sites: Mapping[str, str]) -> Iterator[dict[str, float]]:
    """Yield a dictionary that fills with the condition of each linear layer or convolution, at its first call.

    ``sites``: the name by which each module of ``model`` is wanted. The condition of a sum is sum |terms| / |sum|, here
    of all elements: || |W| |x| + |b| || / || W x + b ||. Relative errors of the terms grow by it at most. Source:
    Higham, Accuracy and Stability of Numerical Algorithms, chapter 4.
    """
    found: dict[str, float] = {}

    def hook(site: str) -> Any:
        def take(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if site not in found:
                found[site] = condition(module, args[0], output)

        return take

    chosen = [(sites[name], m) for name, m in model.named_modules() if name in sites and is_sum(m)]
    handles = [module.register_forward_hook(hook(site)) for site, module in chosen]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def is_sum(module: nn.Module) -> bool:
    """Tell whether a module's output is a sum of products of its input and its weight."""
    return isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and not module.transposed)


def condition(module: Any, x: torch.Tensor, output: torch.Tensor) -> float:
    """Return || |W| |x| + |b| || / || W x + b ||; infinite for an output of zeros, NaN where one is not finite."""
    weight, bias = module.weight.abs(), None if module.bias is None else module.bias.abs()
    if isinstance(module, nn.Linear):
        terms = nn.functional.linear(x.abs(), weight, bias)
    else:
        terms = module._conv_forward(x.abs(), weight, bias)
    return float(terms.double().norm() / output.double().norm())
