"""Spacing of floating-point numbers: units in the last place, the coarser of two dtypes, the tolerance table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch

from ditto_core.errors import UsageError

TOLERANCES = MappingProxyType(
    {
        torch.float64: (1e-7, 1e-7),
        torch.float32: (1.3e-6, 1e-5),
        torch.float16: (1e-3, 1e-5),
        torch.bfloat16: (1.6e-2, 1e-5),
    }
)
"""``(rtol, atol)`` by dtype, as torch.testing has them; :func:`tolerance` adds the 8-bit floats and the integers."""


@dataclass(frozen=True, slots=True)
class Spacing:
    """Where the numbers of a dtype lie: ``eps`` = ulp(1), ``tiny`` = smallest normal number, ``largest`` finite number.

    Integers (and bool) have ``eps`` 0 and ``tiny`` 1: their spacing is 1 everywhere.
    """

    eps: float
    tiny: float
    largest: float

    def ulp(self, value: float) -> float:
        """Return the distance between the two numbers of the dtype around ``|value|``: 2^floor(log2 |value|) * eps."""
        if not self.eps:
            return 1.0
        return math.ldexp(1.0, math.frexp(max(abs(value), self.tiny))[1] - 1) * self.eps


@lru_cache
def spacing(dtype: torch.dtype) -> Spacing:
    """Return the spacing of a dtype. Raises :class:`UsageError` for one whose numbers torch cannot convert (int4)."""
    if dtype == torch.bool:
        return Spacing(0.0, 1.0, 1.0)
    try:
        if not dtype.is_floating_point:
            return Spacing(0.0, 1.0, float(torch.iinfo(dtype).max))
        info = torch.finfo(dtype)
        eps = 0.25 if dtype == torch.float8_e5m2fnuz else info.eps  # finfo says 0.125, of two bits of mantissa
        return Spacing(eps, info.tiny, info.max)
    except (TypeError, NotImplementedError) as error:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(f"{name} tensors are not compared: expected one number an element, unpack both") from error


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the unit in the last place of ``dtype`` at the magnitude of ``value`` (at least that of subnormals)."""
    return spacing(dtype).ulp(value)


@lru_cache
def coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return the dtype with the wider spacing: float16 of float16 and float32, bfloat16 of bfloat16 and float16."""
    return max(first, second, key=lambda dtype: spacing(dtype).eps)


@lru_cache
def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Return the default ``(rtol, atol)`` of a dtype.

    An 8-bit float gets one step: ``rtol`` = eps, ``atol`` = its smallest subnormal. Integers and bool get (0, 0), and
    so do powers of two (float8_e8m0fnu): one step is a factor of two there, and eps as ``rtol`` would let zeros pass.
    """
    if dtype in TOLERANCES:
        return TOLERANCES[dtype]
    place = spacing(dtype)
    return (place.eps, place.eps * place.tiny) if 0 < place.eps < 1 else (0.0, 0.0)
