"""The quantized weights of a file, found by value among the weights of the model's modules.

Rounding to 4 bits leaves a weight 0.085 to 0.11 from its own, to 8 bits 0.01; another weight is 1.4 away.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ditto_core.align import eager
from ditto_core.align.file import OnnxFile
from ditto_core.align.fit import Fit, fit
from ditto_core.align.probes import LENGTHS, OWN, SEED, probe
from ditto_core.align.rounding import Rounding
from ditto_core.align.stored import stored_weights
from ditto_core.align.values import Array
from ditto_core.model.recorder import Recorder

if TYPE_CHECKING:
    from ditto_core.model.loading import LoadedModel

FARTHEST = 0.5
"""A fault of the scales or zero points is nearer than this, any other weight is not."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FOLDED = " with its norm"
HEAD_ROWS = 4
PACKED = 8


@dataclass(frozen=True)
class Piece:
    """Rows of a module's weight that a quantized operator holds: ``rows`` of them from row ``start``.

    ``fit``: whether they are a rounding of the module's own. ``rounding``: how the operator rounds what it reads.
    """

    node: str
    module: str
    start: int
    rows: int
    error: float
    fit: Fit
    rounding: Rounding | None


@dataclass(frozen=True)
class Weights:
    """The quantized weights of a file: those that were found in the model, and the nodes whose were not."""

    pieces: tuple[Piece, ...]
    missing: tuple[str, ...]
    total: int

    @property
    def worst(self) -> float:
        """The largest distance of a weight from the model's."""
        return max((piece.error for piece in self.pieces), default=math.inf)

    @property
    def roundings(self) -> dict[str, Rounding]:
        """How the file rounds what modules read, by the module's name."""
        return {piece.module: piece.rounding for piece in self.pieces if piece.rounding is not None}

    @property
    def wrong(self) -> dict[str, str]:
        """The modules whose weights in the file are no rounding of their own, and what they are instead."""
        return {piece.module: f"the weight of {piece.node} is {piece.fit}" for piece in self.pieces if not piece.fit}


def own_weights(model: LoadedModel, file: OnnxFile) -> tuple[LoadedModel, Weights]:
    """Return the model with the quantized weights of a file in the place of its own, and which were found.

    Weights that are not quantized, or not found, are the model's, and shared with it.
    """
    modules = {
        name: module.weight.detach()
        for name, module in model.module.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS))
    }
    folds = folded_norms(model)
    modules |= {name + FOLDED: modules[name] * torch.from_numpy(factor) for name, factor in folds.items()}
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    target: nn.Module = copy.deepcopy(model.module, shared)
    best: dict[tuple[str, int], Piece] = {}
    missing: list[str] = []
    total = 0
    for held in stored_weights(file, max(map(len, modules.values()), default=0)):
        total += 1
        found = [piece for rows in held.forms for piece in matching_pieces(rows, modules)]
        missing += [] if found else [held.node]
        for variant, start, rows, error in found:
            name = variant.removesuffix(FOLDED)
            known = best.get((name, start))
            original = model.module.get_submodule(name)
            alike = isinstance(original, nn.Embedding) == held.lookup  # a head may have the table's weight
            if known is None or error < known.error * (1.01 if alike else 0.99):
                fitted = fit(rows, in_numpy(modules[variant][start : start + len(rows)]))
                best[name, start] = Piece(held.node, name, start, len(rows), error, fitted, held.rounding)
                factor = folds[name][start : start + len(rows)] if variant != name else np.float32(1)
                put(target.get_submodule(name), original, start, rows / factor)
    return replace(model, module=target), Weights(tuple(best.values()), tuple(missing), total)


def folded_norms(model: LoadedModel) -> dict[str, Array]:
    """Return what a norm over channels multiplies a convolution's weight by, as [outputs, 1, …], by its name.

    The norm is the one that reads what the convolution gives: an exporter folds it into the convolution.
    """
    found: dict[str, Array] = {}
    for name, one, other in normed(model):
        if other.running_var is not None:
            scale = torch.rsqrt(other.running_var + other.eps)
            factor = (scale if other.weight is None else other.weight.detach() * scale).float().numpy()
            found[name] = factor.reshape(-1, *[1] * (one.weight.ndim - 1))
    return found


def normed(model: LoadedModel) -> list[tuple[str, Any, Any]]:
    """Return (its name, a convolution, the norm that reads what it gives), as the model runs."""
    running = eager.in_float32(model)
    modules = dict(running.module.named_modules())
    if model.decoder or not any(isinstance(part, NORMS) for part in modules.values()):
        return []
    given: dict[str, torch.Tensor] = {}
    pairs: list[tuple[str, Any, Any]] = []

    def see(site: str, tensor: torch.Tensor, part: nn.Module) -> None:
        if isinstance(part, CONVOLUTIONS) and site in modules:
            given[site] = tensor
        elif isinstance(part, NORMS) and site.endswith(":in"):
            pairs.extend((name, modules[name], part) for name, made in given.items() if made is tensor)

    with Recorder(running.module, see).recording():
        eager.outputs(running, probe(model, OWN[0], LENGTHS[0], seed=SEED).inputs)
    return pairs


def put(module: Any, original: Any, start: int, rows: Array) -> None:
    """Write rows into a module's weight, which it shares with no other module from then on."""
    if module.weight is original.weight:
        module.weight = nn.Parameter(original.weight.detach().float().clone(), requires_grad=False)
    with torch.no_grad():
        module.weight[start : start + len(rows)] = torch.from_numpy(np.ascontiguousarray(rows))


def in_numpy(weight: torch.Tensor) -> Array:
    """Return a weight as a float32 array."""
    array: Array = weight.float().numpy()
    return array


def matching_pieces(rows: Array, modules: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, int, Array, float]]:
    """Yield (module, its first row, rows of the file, error): of modules' weights that blocks of ``rows`` are, and of
    modules' blocks that all ``rows`` are."""
    for name, weight in modules.items():
        if weight.shape[1:] != rows.shape[1:]:
            continue
        if len(weight) > len(rows):
            for start in range(0, len(weight) - len(rows) + 1, len(rows)):
                yield from near(name, start, rows, weight[start : start + len(rows)])
        elif len(rows) <= PACKED * len(weight):
            for start in range(0, len(rows) - len(weight) + 1, math.gcd(len(weight), len(rows))):
                yield from near(name, 0, rows[start : start + len(weight)], weight)


def near(module: str, start: int, rows: Array, weight: torch.Tensor) -> Iterator[tuple[str, int, Array, float]]:
    """Yield the rows when the first of them, and then all, are near enough to a module's."""
    for count in (HEAD_ROWS, len(weight)):
        known = in_numpy(weight[:count])
        error = np.linalg.norm(rows[:count] - known) / (np.linalg.norm(known) + 1e-30)
        if error > FARTHEST:
            return
    yield module, start, rows, float(error)
