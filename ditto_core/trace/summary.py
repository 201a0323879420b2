"""One readable line for a tensor: what ``step{i}.txt`` holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_BLOCK = 1 << 16  # elements: as float64 they stay in the cache of a core
_FIRST = 6

COLUMNS = (
    f"{'dtype':<10} {'shape':<18} {'min':>12} {'max':>12} {'mean':>12} {'rms':>12} {'nan':>5} {'inf':>5}  first values"
)


@dataclass
class Extent:
    """Range and moments of the finite values, accumulated in float64, and the counts of the others."""

    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    finite: int = 0
    nans: int = 0
    infs: int = 0

    def add(self, values: torch.Tensor) -> None:
        """Take in a block of float64 values [n], n > 0."""
        low, high = (float(v) for v in torch.aminmax(values))
        if not (math.isfinite(low) and math.isfinite(high)):  # a NaN shows in both
            nans = int(torch.isnan(values).sum())
            finite = values[torch.isfinite(values)]
            self.nans += nans
            self.infs += values.numel() - finite.numel() - nans
            if finite.numel():
                self.add(finite)
            return
        self.low = min(self.low, low)
        self.high = max(self.high, high)
        self.total += float(values.sum())
        self.squares += float(values.dot(values))
        self.finite += values.numel()

    @property
    def mean(self) -> float:
        """Mean of the finite values; NaN if there are none."""
        return self.total / self.finite if self.finite else math.nan

    @property
    def rms(self) -> float:
        """Root mean square of the finite values; NaN if there are none."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan


def extent(tensor: torch.Tensor) -> Extent:
    """Measure a tensor of any dtype block by block; a complex one counts its real and imaginary parts."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    result = Extent()
    for block in torch.split(flat.reshape(-1), _BLOCK):
        if block.numel():
            result.add(block.double())
    return result


def describe(tensor: torch.Tensor) -> str:
    """Return dtype, shape, min, max, mean, rms (of the finite values), NaN and Inf counts and the first values."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = "[" + ", ".join(map(str, tensor.shape)) + "]"
    stats = extent(tensor)
    if stats.finite:
        numbers = " ".join(f"{v:>12.6g}" for v in (stats.low, stats.high, stats.mean, stats.rms))
    else:
        numbers = " ".join(["-".rjust(12)] * 4)
    return f"{dtype:<10} {shape:<18} {numbers} {stats.nans:>5} {stats.infs:>5}  {first_values(tensor)}"


def first_values(tensor: torch.Tensor) -> str:
    """Return the first values in row-major order."""
    values = tensor.reshape(-1)[:_FIRST]
    if tensor.is_floating_point():
        texts = [f"{v:.6g}" for v in values.double().tolist()]
    else:
        texts = [str(v) for v in values.tolist()]
    return " ".join([*texts, "..."] if tensor.numel() > _FIRST else texts)
