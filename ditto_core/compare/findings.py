"""Why two tensors differ, where the numbers show it at once: a scale, zeros, swapped rows, a shift, a transposition.

Each finding carries its evidence, the error that is left when the suspected cause is undone. They cost further passes
over the tensors and are meant for failures only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch

from ditto_core.compare.metrics import Metrics, measure
from ditto_core.compare.ulp import spacing

EXPLAINED = 0.1
"""A cause explains an error when undoing it leaves less than this share of it."""

RESOLVED = 1e-7
"""What is left after scaling is not known below about 1e-8, so a smaller error has no known scale."""

COPIED = 1 << 26
"""Elements of a tensor up to which dimensions of two sizes are exchanged: that takes a copy, a square does not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A suspected cause: ``name`` for programs, ``text`` for people, ``before`` and ``after`` undoing it as rel_l2."""

    name: str
    text: str
    before: float
    after: float


def find(actual: torch.Tensor, expected: torch.Tensor, metrics: Metrics) -> list[Finding]:
    """Return what explains the difference of two tensors of one shape, surest first; empty when nothing does."""
    if not metrics.mismatched and not metrics.rel_l2:
        return []
    if metrics.all_zero_actual:
        return [all_zero(actual, metrics)]
    found = [scaled(metrics), *(test(actual, expected, metrics.rel_l2) for test in (swapped, shifted, transposed))]
    return sorted((finding for finding in found if finding), key=lambda finding: finding.after)


def all_zero(actual: torch.Tensor, metrics: Metrics) -> Finding:
    """Explain an actual side that is zero throughout."""
    text = f"actual is all zeros, expected reaches {metrics.max_expected:.3g}"
    if actual.dtype == torch.float16:
        limit = spacing(torch.float16).largest
        square = metrics.max_expected**2
        reason = f"{metrics.max_expected:.3g} squared is {square:.3g}, " if square > limit else ""
        text += f": overflow in float16? ({reason}largest number {limit:.0f}; a norm divides by Inf and gives zeros)"
    return Finding("all_zero", text, metrics.rel_l2, metrics.rel_l2)


def scaled(metrics: Metrics) -> Finding | None:
    """Find a constant factor between the two sides."""
    if metrics.all_zero_expected or not RESOLVED < metrics.rel_l2 < math.inf:
        return None
    if not metrics.scale_residual < EXPLAINED * metrics.rel_l2:
        return None
    factor = f"{metrics.scale:.6g}"
    if factor == "1":
        factor = f"(1 {metrics.scale - 1:+.2g})"
    text = f"actual is {factor} x expected (rel_l2 {metrics.scale_residual:.1e} after scaling)"
    return Finding("scale", text, metrics.rel_l2, metrics.scale_residual)


def swapped(actual: torch.Tensor, expected: torch.Tensor, before: float) -> Finding | None:
    """Find a dimension along which exactly two slices changed places."""
    for dim in range(actual.dim()):
        first, second = worst_pair(actual, expected, dim)
        if first == second:
            continue
        pair = (first, second)
        here = max(measure(actual.select(dim, i), expected.select(dim, i)).rel_l2 for i in pair)
        undone = max(measure(actual.select(dim, i), expected.select(dim, first + second - i)).rel_l2 for i in pair)
        if undone < EXPLAINED * min(1.0, here):
            text = f"slices {first} and {second} of dimension {dim} are swapped (rel_l2 {undone:.1e} when put back)"
            return Finding("swapped", text, before, undone)
    return None


def worst_pair(actual: torch.Tensor, expected: torch.Tensor, dim: int) -> tuple[int, int]:
    """Return the only two indices of a dimension that hold the error; (0, 0) when there are not exactly two."""
    axes = ["batch" if i == dim else "" for i in range(actual.dim())]
    errors = measure(actual, expected, axes=axes).by_row
    # A slice that should be zero and is not has an infinite error, beside which no other would count.
    least = EXPLAINED * max((error for error in errors if error < math.inf), default=0.0)
    bad = [i for i, error in enumerate(errors) if error > least]
    return (bad[0], bad[1]) if len(bad) == 2 else (0, 0)


def shifted(actual: torch.Tensor, expected: torch.Tensor, before: float) -> Finding | None:
    """Find a dimension along which one side is one step ahead of the other."""
    for dim, size in enumerate(actual.shape):
        if size < 3:
            continue
        for step in (1, -1):
            late, early = (actual, expected) if step == 1 else (expected, actual)
            after = measure(late.narrow(dim, 1, size - 1), early.narrow(dim, 0, size - 1)).rel_l2
            if after < EXPLAINED * min(1.0, before):
                text = (
                    f"actual[i] is expected[i {'-' if step == 1 else '+'} 1] along dimension {dim} (rel_l2 {after:.1e})"
                )
                return Finding("shifted", text, before, after)
    return None


def transposed(actual: torch.Tensor, expected: torch.Tensor, before: float) -> Finding | None:
    """Find two dimensions that are exchanged: of one size, or of two sizes and read with the wrong strides."""
    for first, second, view in exchanged(expected):
        after = measure(actual, view).rel_l2
        if after < EXPLAINED * min(1.0, before):
            text = f"dimensions {first} and {second} are transposed (rel_l2 {after:.1e} when put back)"
            return Finding("transposed", text, before, after)
    return None


def exchanged(tensor: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the exchanges of two dimensions, in the shape of the tensor; of a large one those that need no copy."""
    wide = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    for first, second in combinations(wide, 2):
        if tensor.shape[first] != tensor.shape[second] and tensor.numel() > COPIED:
            continue
        yield first, second, tensor.transpose(first, second).reshape(tensor.shape)
