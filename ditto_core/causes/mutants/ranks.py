"""Shares of tensor-parallel ranks: what they computed was not added up, or two have each other's share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations

import torch
from torch import nn

from ditto_core.causes.mutants.base import Model, Mutant, changed
from ditto_core.causes.slices import Slice

RANKS = (2, 4, 8)
"""Numbers of ranks that are tried."""


def ranks(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield what a row-parallel layer, whose inputs are split over the ranks, gives when its shares are mixed up.

    Of an engine in one place the same is a lost part of a tensor.
    """
    site = part.seen.site
    leaves = {node.label: i for i, node in enumerate(part.nodes) if node.func is None}
    weight, bias = leaves.get(f"{site}.weight"), leaves.get(f"{site}.bias")
    if not model.parallel or weight is None or not isinstance(model.root.get_submodule(site), nn.Linear):
        return
    for count in RANKS:
        if part.base[weight].shape[1] % count:
            continue
        for rank in range(count):
            own = {weight: changed(partial(alone, count, rank))}
            text = f"the output is what rank {rank} of {count} computes from its share of the input"
            yield Mutant(text, 1.5, "all-reduce missing", own)
            if bias is not None:
                both = {**own, bias: changed(torch.zeros_like)}
                yield Mutant(f"{text}, without the bias", 1.6, "all-reduce missing", both)
        for a, b in combinations(range(count), 2):
            text = f"the weight's shares of ranks {a} and {b} of {count} are in each other's place"
            yield Mutant(text, 2.5, "ranks exchanged", {weight: changed(partial(exchanged, count, a, b))})


def alone(count: int, rank: int, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] of which only one rank's columns are left."""
    parts = weight.chunk(count, 1)
    return torch.cat([part if i == rank else torch.zeros_like(part) for i, part in enumerate(parts)], 1)


def exchanged(count: int, a: int, b: int, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] with the columns of two ranks in each other's place."""
    parts = list(weight.chunk(count, 1))
    parts[a], parts[b] = parts[b], parts[a]
    return torch.cat(parts, 1)


def share_of_a_rank(bad: torch.Tensor) -> str:
    """Say which rank's share of the output channels ``bad`` is true in, and in no other; empty where it is no share."""
    for count in (*RANKS, 16):
        whole = [bool(part.all()) for part in bad.chunk(count)]
        if len(bad) % count == 0 and sum(whole) == 1 and int(bad.sum()) == len(bad) // count:
            return f"; they are the share of rank {whole.index(True)} of {count}"
    return ""
