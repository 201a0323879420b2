"""Tensors of several ranks as one: what is split is joined along its axis, the others must agree on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Disagreement:
    """A rank whose tensor differs from what the other ranks have. ``largest`` is the largest absolute difference."""

    name: str
    rank: str
    largest: float
    others: str

    def __str__(self) -> str:
        return f"{self.rank} disagrees at {self.name}: max abs difference {self.largest:.1e} to {self.others}"


def split_axis(whole: Sequence[int], parts: Sequence[Sequence[int]]) -> int | None:
    """Return the axis along which the shapes of the ranks' tensors make up the whole one's; None where they are it.

    Raises ``ValueError`` for shapes that do neither.
    """
    if all(tuple(part) == tuple(whole) for part in parts):
        return None
    for axis, size in enumerate(whole):
        others = [(*whole[:axis], *whole[axis + 1 :])] * len(parts)
        same_rank = all(len(part) == len(whole) for part in parts)
        if same_rank and [(*p[:axis], *p[axis + 1 :]) for p in parts] == others and sum(p[axis] for p in parts) == size:
            return axis
    raise ValueError(f"the ranks hold {', '.join(str(list(part)) for part in parts)}, the model {list(whole)}")


def split_axes(
    whole: Mapping[str, Sequence[int]], shares: Mapping[str, Iterable[torch.Tensor]]
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the axis of each tensor that is split over the ranks, and a reason for each that cannot be joined.

    ``whole``: the shapes in the model, by name; ``shares``: what the ranks computed from the same inputs.
    """
    axes: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name, parts in shares.items():
        try:
            axis = split_axis(whole[name], [list(part.shape) for part in parts])
        except ValueError as error:
            refused[name] = str(error)
        else:
            if axis is not None:
                axes[name] = axis
    return axes, refused


def disagreements(name: str, parts: Mapping[str, torch.Tensor]) -> list[Disagreement]:
    """Compare a tensor that every rank holds, bit for bit (NaN equals NaN), and name the ranks that differ.

    The ranks that most agree are taken to be right; of two that differ, the second is named.
    """
    groups: list[tuple[torch.Tensor, list[str]]] = []
    for rank, tensor in parts.items():
        home = next((members for first, members in groups if same(first, tensor)), None)
        if home is None:
            groups.append((tensor, [rank]))
        else:
            home.append(rank)
    right, majority = max(groups, key=lambda group: len(group[1]))
    return [
        Disagreement(name, rank, difference(tensor, right), ", ".join(majority))
        for tensor, members in groups
        if tensor is not right
        for rank in members
    ]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, NaN included."""
    return bool(torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num())))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; infinite where one is NaN."""
    values = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"))
    return float(values.max()) if values.numel() else 0.0
