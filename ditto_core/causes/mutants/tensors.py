"""Other tensors of the model in a tensor's place: weights, cached ones, those of other sites, inputs of modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import Model, Mutant, changed, is_float, output_or_place, place_of
from ditto_core.causes.slices import Edit, Slice, Values
from ditto_core.compare.masks import is_mask

NEAR = 16
"""Captured tensors that are tried in the place of one."""


def tensors(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield what could stand where each tensor stands."""
    yield from own_module(part)
    yield from other_modules(part, model)
    yield from exchanged(part)
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not is_float(value):
            continue
        if node.label in model.tensors:
            yield from parameters(part, i, model)
        elif value.ndim > 1:
            yield from of_slice(part, i, model)
            yield from of_engine(part, i)
        if node.func is None and node.label:
            yield from neutral(part, i, model)


def parameters(part: Slice, i: int, model: Model) -> Iterator[Mutant]:
    """Another parameter of the same shape, or transposed."""
    own, label = part.base[i], part.nodes[i].label
    for name, other in model.tensors.items():
        if name == label or not other.is_floating_point():
            continue
        if other.shape == own.shape:
            text = f"{name} is used in the place of {label}"
            yield Mutant(text, 2.5, "weights of another layer", {i: put(other)})


def other_modules(part: Slice, model: Model) -> Iterator[Mutant]:
    """Weight and bias are both those of another module."""
    own = {node.label: i for i, node in enumerate(part.nodes) if node.label in model.tensors}
    paths = {label.rpartition(".")[0] for label in own}
    for other in {name.rpartition(".")[0] for name in model.tensors} if len(own) > len(paths) == 1 else ():
        names = {i: f"{other}.{label.rpartition('.')[2]}" for label, i in own.items()}
        if {other} != paths and all(names[i] in model.tensors for i in names):
            edits = {i: put(model.tensors[name]) for i, name in names.items()}
            text = f"weight and bias of {other} are used in the place of those of {next(iter(paths))}"
            yield Mutant(text, 2.5, "weights of another layer", edits)


def put(other: torch.Tensor) -> Edit:
    """Give another tensor, in the dtype of the model's own."""
    return changed(lambda own: other.to(own.dtype))


def of_slice(part: Slice, i: int, model: Model) -> Iterator[Mutant]:
    """Another tensor of the slice that does not depend on it."""
    own = part.base[i]
    for j in range(len(part.nodes)):
        other = part.base[j]
        if j == i or not is_float(other) or other.shape != own.shape or part.nodes[j].label in model.tensors:
            continue
        if part.below[j] >> i & 1 or part.below[i] >> j & 1:
            continue
        text = f"{place_of(part, j)} is used in the place of {place_of(part, i)}"
        past = part.nodes[j].label.startswith("past.")
        kind: Kind = "KV cache of another layer" if past else "other tensor"
        yield Mutant(text, 3, kind, {i: base_of(j)})


def exchanged(part: Slice) -> Iterator[Mutant]:
    """Two of the engine's tensors are taken for each other, as cosine and sine."""
    shown = [i for i, node in enumerate(part.nodes) if node.origin is not None and is_float(part.base[i])]
    for a in shown:
        for b in shown:
            if a < b and part.base[a].shape == part.base[b].shape:
                text = f"{place_of(part, a)} and {place_of(part, b)} are exchanged"
                yield Mutant(text, 2, "other tensor", {a: base_of(b), b: base_of(a)})


def base_of(j: int) -> Any:
    """Give what another node gives."""
    return lambda part, values, i: part.base[j]


def of_engine(part: Slice, i: int) -> Iterator[Mutant]:
    """Another of the engine's tensors upstream, near the site."""
    own, engine = part.base[i], part.seen.captured
    taken = {id(engine.get(node.label)) for node in part.nodes}
    near: dict[int, str] = {}  # by tensor: one that is shown under several names is tried once
    for name, other in engine.items():
        if other.is_floating_point() and other.shape == own.shape and id(other) not in taken and not is_mask(own):
            near.setdefault(id(other), name)
    for name in list(near.values())[-NEAR:]:
        text = f"{name} is used in the place of {output_or_place(part, i)}"
        yield Mutant(text, 3, "other tensor", {i: captured(name)})


def captured(name: str) -> Any:
    """Give one of the engine's tensors."""

    def edit(part: Slice, values: Values, i: int) -> torch.Tensor:
        return part.seen.captured[name].to(part.base[i].dtype).reshape(part.base[i].shape)

    return edit


def neutral(part: Slice, i: int, model: Model) -> Iterator[Mutant]:
    """A tensor is 1 or 0 throughout: it is not loaded, or takes no part."""
    label, price = part.nodes[i].label, 1.5 if part.nodes[i].label in model.tensors else 2.1
    for number in (1.0, 0.0):
        kind: Kind = "operation missing"
        if label in model.tensors:
            kind = "bias missing" if label.endswith("bias") and not number else "weights zeroed"
            kind = "norm weight ignored" if number else kind
        edit = changed(partial(torch.full_like, fill_value=number))
        yield Mutant(f"{label} is {number:.0f} everywhere", price, kind, {i: edit})


def own_module(part: Slice) -> Iterator[Mutant]:
    """The module gives its input, or a module before it was left out."""
    site = part.seen.site
    ours = part.seen.captured.get(f"{site}:in")
    if ours is not None and ":" not in site and ours.shape == part.seen.actual.shape and ours.is_floating_point():
        edits = {part.root.node: captured(f"{site}:in")}
        yield Mutant(f"{site} gives its input", 1, "operation missing", edits)
    # what its own operands are is a missing operation; further up a whole computation is left out
    last = part.root.node
    for i in set(range(last)) - {ref.node for ref in part.nodes[last].refs}:
        alike = is_float(part.base[i]) and part.base[i].shape == getattr(part.base[last], "shape", None)
        if alike and part.below[i] >> last & 1:
            text = f"what comes after {place_of(part, i)} is left out"
            yield Mutant(text, 1.5, "operation missing", {last: base_of(i)})
    for i, node in enumerate(part.nodes):
        given = part.seen.captured.get(f"{node.label}:in")
        if node.origin is None or ":" in node.label or given is None or given.numel() != part.base[i].numel():
            continue
        text = f"{node.label} is not applied"
        yield Mutant(text, 1.5, "operation missing", {i: captured(f"{node.label}:in")})
