"""Dumps of several ranks as one: tensors that are split over ranks are joined, the others must agree on all ranks.

Column-parallel modules (joint projection, gate and up, output head) hold a share of the features on each rank; what
follows a row-parallel module has been reduced and is the same everywhere, bit for bit. A pipeline rank has its own
layers, numbered from 0 where upstream numbers them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ditto_core.backends.ranks.joining import Disagreement, disagreements
from ditto_core.backends.trtllm.names import FUSED_QKV
from ditto_core.dumps import Dump, open_dump
from ditto_core.dumps.base import Lazy
from ditto_core.dumps.trtllm import global_rank, leaves
from ditto_core.errors import TraceError, UsageError

COLUMN = re.compile(r"(^|\.)(attention\.qkv|mlp\.fc|mlp\.gate|lm_head|qkv_proj|gate_up_proj|logits)$")
SHARES = {"gate_up_proj": 2}
LAYER = re.compile(r"(?<=layers\.)\d+(?=\.|$)")
PLACE = re.compile(r"PP_(\d+)/TP_(\d+)")


@dataclass(frozen=True)
class Layout:
    """How a model is split. ``heads`` and ``kv_heads`` are of the whole model; ``layers`` too, 0 when the layers' names
    already count over all ranks. ``gathered`` names column-parallel tensors that hold all features on every rank."""

    heads: int
    kv_heads: int
    layers: int = 0
    gathered: tuple[str, ...] = ()


@dataclass
class Merged:
    """A step's tensors over all ranks, and the ranks that disagree."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    disagreements: list[Disagreement] = field(default_factory=list)


def merge(step: Mapping[str, Mapping[str, torch.Tensor]], layout: Layout) -> Merged:
    """Merge one step's tensors, rank place (``PP_0/TP_1``) -> name -> tensor.

    Raises :class:`TraceError` when the ranks of a pipeline stage do not have the same names or shapes.
    """
    merged = Merged()
    for stage, ranks in stages(list(step)).items():
        names = list(step[ranks[0]])
        for rank in ranks[1:]:
            odd = sorted(set(names) ^ set(step[rank]))
            if odd:
                raise TraceError(f"{ranks[0]} and {rank} do not hold the same tensors: only one of them has {odd[0]!r}")
        for name in names:
            parts = {rank: step[rank][name] for rank in ranks}
            whole = renumbered(name, stage, len(stages(list(step))), layout.layers)
            merged.tensors[whole] = merge_one(name, parts, layout, merged.disagreements)
    return merged


def merge_one(name: str, parts: Mapping[str, torch.Tensor], layout: Layout, found: list[Disagreement]) -> torch.Tensor:
    """Merge one tensor of the tensor-parallel ranks of a stage."""
    tensors = list(parts.values())
    if len({(tuple(t.shape), t.dtype) for t in tensors}) > 1:
        shapes = ", ".join(f"{rank} {list(t.shape)}" for rank, t in parts.items())
        raise TraceError(f"{name!r} has not one shape on all ranks: {shapes}")
    if len(tensors) == 1:
        return tensors[0]
    if COLUMN.search(name) and not name.endswith(":in") and name not in layout.gathered:
        return join(name, tensors, layout)
    found += disagreements(name, parts)
    return tensors[0]


def join(name: str, tensors: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Join column-parallel shares along the features. The joint projection is joined part by part.

    A model with fewer heads of keys than ranks repeats each head on several ranks: one copy is kept.
    """
    if FUSED_QKV.search(name):
        return join_qkv(tensors, layout)
    shares = SHARES.get(name.rpartition(".")[2], 1)
    pieces = [tensor.chunk(shares, -1) for tensor in tensors]
    return torch.cat([piece[i] for i in range(shares) for piece in pieces], -1)


def join_qkv(tensors: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Join ``[q | k | v]`` of each rank to ``[q | k | v]`` of the model."""
    ranks = len(tensors)
    kv = max(1, layout.kv_heads // ranks)
    query = layout.heads // ranks
    size = tensors[0].shape[-1]
    if layout.heads % ranks or size % (query + 2 * kv):
        raise UsageError(
            f"{size} features on each of {ranks} ranks do not fit {layout.heads} query and {layout.kv_heads} key heads"
        )
    head = size // (query + 2 * kv)
    parts = [torch.split(tensor, [query * head, kv * head, kv * head], -1) for tensor in tensors]
    copies = max(1, ranks // layout.kv_heads)
    kept = parts[::copies]
    return torch.cat([*(p[0] for p in parts), *(p[1] for p in kept), *(p[2] for p in kept)], -1)


def stages(places: Sequence[str]) -> dict[int, list[str]]:
    """Group places by pipeline rank, each group in the order of tensor-parallel ranks."""
    groups: dict[int, list[str]] = {}
    for place in sorted(places, key=global_rank):
        found = PLACE.match(place)
        if found is None:
            raise UsageError(f"{place!r} is no place of a rank, expected PP_0/TP_1")
        groups.setdefault(int(found[1]), []).append(place)
    return groups


def renumbered(name: str, stage: int, count: int, layers: int) -> str:
    """Number a pipeline rank's layer over the whole model: the first ranks have one more where it does not divide."""
    if not layers or count == 1:
        return name
    offset = stage * (layers // count) + min(stage, layers % count)
    return LAYER.sub(lambda match: str(int(match[0]) + offset), name)


def open_merged(path: Path, layout: Layout) -> tuple[Dump, list[Disagreement]]:
    """Open all ranks of a ``tllm_debug`` folder as one dump; also returns every rank that disagrees, in step order.

    Raises :class:`TraceError` when the ranks hold different numbers of steps.
    """
    ranks = {place: open_dump(path, rank=place) for place in leaves(path)}
    counts = {place: dump.steps for place, dump in ranks.items()}
    if len(set(counts.values())) > 1:
        raise TraceError(f"the ranks of {path} hold different numbers of steps: {counts}")
    steps = range(next(iter(counts.values()), 0))
    found = [each for step in steps for each in merged_step(ranks, step, layout).disagreements]
    openers = [partial(lazy, ranks, step, layout) for step in steps]
    notes = dict.fromkeys((*(note for dump in ranks.values() for note in dump.notes), *map(str, found)))
    return Dump(path, "trtllm", openers, {"ranks": ", ".join(ranks)}, tuple(notes)), found


def merged_step(ranks: Mapping[str, Dump], step: int, layout: Layout) -> Merged:
    """Read and merge one step of all ranks."""
    tensors = {place: {name: dump.load(step, name) for name in dump.names(step)} for place, dump in ranks.items()}
    return merge(tensors, layout)


def lazy(ranks: Mapping[str, Dump], step: int, layout: Layout) -> Lazy:
    """Return a step's merged tensors as a dump's step."""
    tensors = merged_step(ranks, step, layout).tensors
    return Lazy(list(tensors), tensors.__getitem__)
