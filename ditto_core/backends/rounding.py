"""The same computation with its products rounded differently: one more sample of the noise floor.

The rounding error of a number is one sample. Where a tensor's norm rests on a single number, so does its noise floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

LINEAR = (functional.linear,)
MATRIX = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.mm)
ADDED = (torch.addmm, torch.Tensor.addmm)
HALF = (torch.float16, torch.bfloat16)


class OtherRounding(TorchFunctionMode):
    """Adds up the terms of linear layers and matrix products in the order that ``seed`` draws.

    Products of half precision are added up in float32, and rounded up or down at random, the nearer the likelier (Monte
    Carlo arithmetic, Parker 1997): there the order of a sum changes little.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._random = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``; a product gets its inner dimension in another order on both sides."""
        named = kwargs or {}
        reordered = self._reordered(func, args)
        if reordered is None:
            return func(*args, **named)
        dtype = args[0].dtype
        if dtype not in HALF:
            return func(*reordered, **named)
        wide = (each.float() if isinstance(each, torch.Tensor) else each for each in reordered)
        wide_named = {name: v.float() if isinstance(v, torch.Tensor) else v for name, v in named.items()}
        return self._rounded(func(*wide, **wide_named), dtype)

    def _reordered(self, func: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the arguments of a product with the inner dimension in the drawn order; None for other functions."""
        if func in LINEAR and len(args) > 1:
            x, weight, *rest = args
            order = self._order(x)
            return (x[..., order], weight[:, order], *rest)
        if func in MATRIX and len(args) == 2:
            a, b = args
            order = self._order(a)
            return a[..., order], b.index_select(max(b.dim() - 2, 0), order)
        if func in ADDED and len(args) == 3:
            bias, a, b = args
            order = self._order(a)
            return bias, a[:, order], b[order]
        return None

    def _order(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        return torch.randperm(size, generator=torch.Generator().manual_seed(self._seed * 1_000_003 + size)).to(x.device)

    def _rounded(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return float32 numbers in a narrower dtype: the nearest or the next one, which is as likely as it is near."""
        nearest = value.to(dtype).float()
        missing = value - nearest
        eps = torch.full_like(value, torch.finfo(dtype).eps)
        unit = torch.ldexp(eps, value.frexp().exponent - 1)
        beyond = torch.rand(value.shape, generator=self._random).to(value.device) < missing.abs() / unit
        return torch.where(beyond, nearest + missing.sign() * unit, nearest).to(dtype)
