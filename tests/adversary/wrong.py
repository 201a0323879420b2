"""Ways in which an engine can be wrong. A new one is one line.

``x`` is a tensor that the engine computed: [batch, length, features], [batch, features], [batch, channels, y, x] …
A way that does not apply to a tensor (too few rows, not square) returns it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import pairwise

import torch

from tests.adversary.sessions import Fault, Tensors

Change = Callable[[torch.Tensor], torch.Tensor]
HEAD = 16


def put(x: torch.Tensor, index: tuple[int | slice, ...], value: torch.Tensor | float) -> torch.Tensor:
    """Return ``x`` with another value at an index."""
    wrong = x.clone()
    wrong[index] = value
    return wrong


def place(x: torch.Tensor, number: int) -> tuple[int, ...]:
    """Return the index of a position of the first row, or of a row where there are no positions."""
    return (0, number) if x.dim() > 2 else (number,)


def largest(x: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the largest element."""
    return tuple(int(i) for i in torch.unravel_index(x.abs().argmax(), x.shape))


def noise(x: torch.Tensor) -> torch.Tensor:
    """Return normal numbers, the same each time."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x.dtype)


def exchanged(x: torch.Tensor, dim: int, first: int = 0, second: int = 1) -> torch.Tensor:
    """Return ``x`` with two slices of a dimension exchanged; the last two where there are few."""
    if dim >= x.dim() or x.shape[dim] < 2:
        return x
    order = list(range(x.shape[dim]))
    order[first], order[second] = order[second], order[first]
    return x.index_select(dim, torch.tensor(order))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Exchange the last two dimensions where both have one size."""
    return x.transpose(-1, -2).clone() if x.dim() > 2 and x.shape[-1] == x.shape[-2] else x


def to_float8(x: torch.Tensor) -> torch.Tensor:
    """Round to three bits of mantissa."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def head(x: torch.Tensor) -> tuple[slice | type(Ellipsis), ...]:  # type: ignore[valid-type]
    """Return the index of the second head, or of the second half where there are fewer features."""
    half = min(HEAD, x.shape[-1] // 2)
    return ..., slice(half, 2 * half)


CHANGES: dict[str, Change] = {
    "NaN": lambda x: torch.full_like(x, math.nan),
    "Inf": lambda x: torch.full_like(x, math.inf),
    "one NaN": lambda x: put(x, largest(x), math.nan),
    "one Inf": lambda x: put(x, largest(x), math.inf),
    "one -Inf": lambda x: put(x, largest(x), -math.inf),
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "constant": lambda x: torch.full_like(x, float(x.float().mean())),
    "random numbers": noise,
    "random numbers of the right size": lambda x: noise(x) * x.float().std().to(x.dtype),
    "negated": lambda x: -x,
    "scaled by 1.05": lambda x: x * 1.05,
    "scaled by 0.9": lambda x: x * 0.9,
    "doubled": lambda x: x * 2,
    "shifted by half of its largest": lambda x: x + x.abs().max() / 2,
    "magnitudes": lambda x: x.abs(),
    "clamped to half of its largest": lambda x: x.clamp(-x.abs().max() / 2, x.abs().max() / 2),
    "squared": lambda x: x * x,
    "whole numbers": lambda x: (x * 2).round() / 2,
    "rounded to float8": to_float8,
    "less its mean": lambda x: x - x.mean(-1, keepdim=True) if x.shape[-1] > 1 else x,
    "softmax": lambda x: x.float().softmax(-1).to(x.dtype),
    "first position zero": lambda x: put(x, place(x, 0), 0.0),
    "last position zero": lambda x: put(x, place(x, -1), 0.0),
    "last position negated": lambda x: put(x, place(x, -1), -x[place(x, -1)]),
    "last position copied from the first": lambda x: put(x, place(x, -1), x[place(x, 0)]),
    "two positions exchanged": lambda x: exchanged(x, x.dim() - 2) if x.dim() > 1 else x,
    "rolled by one position": lambda x: x.roll(1, -2) if x.dim() > 1 else x,
    "positions backwards": lambda x: x.flip(-2) if x.dim() > 1 else x,
    "rolled by one feature": lambda x: x.roll(1, -1),
    "features backwards": lambda x: x.flip(-1),
    "two features exchanged": lambda x: exchanged(x, x.dim() - 1),
    "one feature zero": lambda x: put(x, (..., largest(x)[-1]), 0.0),
    "one head zero": lambda x: put(x, head(x), 0.0),
    "one head negated": lambda x: put(x, head(x), -x[head(x)]),
    "heads exchanged": lambda x: torch.cat([x[head(x)], x[..., : head(x)[1].start], x[..., head(x)[1].stop :]], -1),
    "batch rows permuted": lambda x: x.roll(1, 0),
    "second row copied from the first": lambda x: put(x, (1,), x[0]) if len(x) > 1 else x,
    "one element large": lambda x: put(x, largest(x), 10 * x.abs().max()),
    "sign of one element": lambda x: put(x, largest(x), -x[largest(x)]),
    "one element zero": lambda x: put(x, largest(x), 0.0),
    "transposed": turned,
    "rows and columns read in the wrong order": lambda x: x.transpose(-1, -2).reshape(x.shape) if x.dim() > 1 else x,
}


def each(change: Change) -> Fault:
    """Return the fault that changes every tensor in the same way."""

    def fault(right: Tensors, before: Tensors, names: Collection[str]) -> Tensors:
        return right | {name: change(right[name]) for name in names}

    return fault


def stale(right: Tensors, before: Tensors, names: Collection[str]) -> Tensors:
    """Hand over the step before, where it has the same shape."""
    fitting = [name for name in names if name in before and before[name].shape == right[name].shape]
    return right | {name: before[name] for name in fitting}


def dropped(right: Tensors, before: Tensors, names: Collection[str]) -> Tensors:
    """Do not hand them over."""
    return {name: x for name, x in right.items() if name not in names}


def swapped(right: Tensors, before: Tensors, names: Collection[str]) -> Tensors:
    """Hand each over under the name of the next one of its shape."""
    wrong = dict(right)
    for one, other in pairwise(names):
        if right[one].shape == right[other].shape:
            wrong[one], wrong[other] = wrong[other], wrong[one]
    return wrong


WRONG: dict[str, Fault] = {
    **{name: each(change) for name, change in CHANGES.items()},
    "stale step": stale,
    "dropped": dropped,
    "swapped": swapped,
}
