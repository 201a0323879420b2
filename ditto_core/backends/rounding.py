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
ROUNDED = 0.425
"""Root mean square of a rounding error in units of eps / 2: half a unit in the last place over the square root of 3, of
numbers whose logarithms are spread evenly."""


class OtherRounding(TorchFunctionMode):
    """Rounds linear layers and matrix products in another way, which ``seed`` draws.

    To a product of float32 or float64 the error of adding its terms one after the other is added, as a random number:
    some kernels do so, others add up in blocks and lose less. Products of half precision are added up in float32, and
    rounded up or down at random, the nearer the likelier. Both are Monte Carlo arithmetic (Parker 1997).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``, and round a product again."""
        named = kwargs or {}
        factors = factors_of(func, args)
        if factors is None or not factors[0].is_floating_point():
            return func(*args, **named)
        dtype = factors[0].dtype
        if dtype not in HALF:
            return func(*args, **named) + self._lost_in_a_row(func, *factors)
        wide = (each.float() if isinstance(each, torch.Tensor) else each for each in args)
        wide_named = {name: v.float() if isinstance(v, torch.Tensor) else v for name, v in named.items()}
        return self._rounded(func(*wide, **wide_named), dtype)

    def _lost_in_a_row(self, func: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return what a product may lose whose terms are added one after the other.

        In random order k of n terms have the mean square (k/n)² S² + (k/n)(1 - k/n) T, with S the sum and T the sum of
        squares of all. Each such partial sum is rounded: together n (S²/3 + T/6), times the square of a rounding
        error. It grows as the square root of n (Higham and Mary 2019), in blocks as that of their size.
        """
        multiply = functional.linear if func in LINEAR else torch.matmul
        partial = (multiply(a, b).square() / 3 + multiply(a * a, b * b) / 6) * a.shape[-1]
        unit = ROUNDED * torch.finfo(partial.dtype).eps / 2
        spread = unit * partial.sqrt().nan_to_num(0, 0, 0)  # squares overflow before what they are of
        return spread * torch.randn(partial.shape, generator=self._random).to(partial)

    def _rounded(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return float32 numbers in a narrower dtype: the nearest or the next one, which is as likely as it is near."""
        nearest = value.to(dtype).float()
        missing = value - nearest
        eps = torch.full_like(value, torch.finfo(dtype).eps)
        unit = torch.ldexp(eps, value.frexp().exponent - 1)
        beyond = torch.rand(value.shape, generator=self._random).to(value.device) < missing.abs() / unit
        return torch.where(beyond, nearest + missing.sign() * unit, nearest).to(dtype)


def factors_of(func: Any, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what ``func`` multiplies; None where it is no product."""
    if func in LINEAR and len(args) > 1:
        return args[0], args[1]
    if func in MATRIX and len(args) == 2:
        return args[0], args[1]
    return (args[1], args[2]) if func in ADDED and len(args) == 3 else None
