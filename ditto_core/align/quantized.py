"""What quantization costs and what the kernels do wrong: two numbers, from the file's own weights.

The activations of a 4-bit file are 30 to 50 % off after one layer, so their identity would be a guess. Its weights are
0.1 from the model's (0.01 in 8 bits), 1.4 from any other: each quantized product runs on the identity matrix, and the
weights that come out are found among the model's. A model with these weights differs from the original by what the
quantization costs; the file differs from it by what its kernels do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ditto_core.align import eager
from ditto_core.align.aligning import Study
from ditto_core.align.file import OnnxFile
from ditto_core.align.matching import LOOSE, Matching, match
from ditto_core.align.origin import ModelOrigin
from ditto_core.align.stored import stored_weights
from ditto_core.align.values import Array, Value

if TYPE_CHECKING:
    from ditto_core.model.loading import LoadedModel

FARTHEST = 0.5
"""Quantized weights are 0.085 to 0.11 from their own in 4 bits, 1.4 from others."""
HEAD_ROWS = 4
PACKED = 8
KERNELS = 0.1
"""Activations that the kernels quantize to 8 bits are 2e-2 to 8e-2 off: identity is clear, agreement has this bound."""


@dataclass(frozen=True)
class Piece:
    """Rows of a module's weight as a file holds them: ``array`` [rows, inputs], from row ``start`` of the module's."""

    node: str
    module: str
    start: int
    array: Array
    error: float


@dataclass(frozen=True)
class Cost:
    """Relative L2 at one site on the worst probe: of the quantized weights, and of the file's kernels."""

    site: str
    quantization: float
    kernels: float


@dataclass(frozen=True)
class Costs:
    """``found`` of ``total`` quantized weights were found in the model; ``missing`` are the nodes of the others."""

    found: int
    total: int
    missing: tuple[str, ...]
    worst_weight: float
    sites: tuple[Cost, ...]

    def __str__(self) -> str:
        lines = [f"weights: {self.found} of {self.total} found by value, the worst {self.worst_weight:.2f} off"]
        lines += [f"  not found: {name}" for name in self.missing]
        if self.sites:
            kernels = sorted(cost.kernels for cost in self.sites)
            lines.append(
                f"kernels: {kernels[len(kernels) // 2]:.1e} in the middle, {kernels[-1]:.1e} at most, of "
                f"{len(kernels)} sites against the model with the file's weights"
            )
            lines += [f"  {c.site}: quantization {c.quantization:.1e}, kernels {c.kernels:.1e}" for c in self.shown()]
        return "\n".join(lines)

    def shown(self, most: int = 12) -> list[Cost]:
        """Return the outputs of layers, or the sites with the largest errors of kernels."""
        layers = [cost for cost in self.sites if cost.site.rpartition(".")[2].isdecimal() or "." not in cost.site]
        return layers or sorted(self.sites, key=lambda cost: -cost.kernels)[:most]


def against_own_weights(study: Study) -> Study:
    """Return the study of a quantized file with the model that has the file's weights, where they were found."""
    pieces, _, _ = weights_found(study.model, study.file)
    return with_pieces(study, pieces) if pieces else study


def with_pieces(study: Study, pieces: Sequence[Piece]) -> Study:
    """Match the file's values with those of the model that has its weights."""
    model = with_weights(study.model, pieces)
    sites, finals = eager.capture(model, study.probes)
    values = [value for value in study.matching.values if value.base < 0]
    origin = ModelOrigin(model.module)
    matching = match(sites, values, KERNELS, LOOSE)
    return replace(study, model=model, origin=origin, matching=matching, finals=finals)


def measure_costs(study: Study) -> Costs:
    """Find the file's weights in the model, put them there, and align again; see the module's text."""
    pieces, missing, total = weights_found(study.model, study.file)
    matching = with_pieces(study, pieces).matching
    original = {name: site for site in study.matching.sites for name in site.sites}
    costs = tuple(cost_of(matching, i, original) for i in range(len(matching.sites)) if counted(matching, i))
    worst = max((piece.error for piece in pieces), default=math.inf)
    return Costs(total - len(missing), total, tuple(missing), worst, costs)


def counted(matching: Matching, index: int) -> bool:
    """Tell whether a site has a name and a value that is surely it."""
    found = matching.of(index)
    return bool(matching.sites[index].sites) and found is not None and not found.ambiguous and not found.before_bias


def cost_of(matching: Matching, index: int, original: Mapping[str, Value]) -> Cost:
    """Return both numbers of a site."""
    site, found = matching.sites[index], matching.of(index)
    assert found is not None
    name = site.sites[0]
    errors = [
        float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) + 1e-30))
        for ours, theirs in zip(site.clean, original[name].clean, strict=True)
    ]
    return Cost(name, max(errors), found.error)


def weights_found(model: LoadedModel, file: OnnxFile) -> tuple[list[Piece], list[str], int]:
    """Return the pieces of the model's weights that a file's are, the nodes without one, and the number of nodes."""
    modules = {
        name: module.weight.detach().float().numpy()
        for name, module in model.module.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    pieces: list[Piece] = []
    missing: list[str] = []
    total = 0
    for node, forms in stored_weights(file, max(map(len, modules.values()), default=0)):
        total += 1
        found = [piece for rows in forms for piece in matching_pieces(node, rows, modules)]
        pieces += found
        if not found:
            missing.append(node)
    return best_pieces(pieces), missing, total


def matching_pieces(node: str, rows: Array, modules: Mapping[str, Array]) -> Iterator[Piece]:
    """Yield the modules' weights that blocks of ``rows`` are, and the modules' blocks that all ``rows`` are."""
    for name, weight in modules.items():
        if weight.shape[1:] != rows.shape[1:]:
            continue
        if len(weight) > len(rows):
            for start in range(0, len(weight) - len(rows) + 1, len(rows)):
                yield from near_piece(node, name, start, rows, weight[start : start + len(rows)])
        elif len(rows) <= PACKED * len(weight):
            for start in range(0, len(rows) - len(weight) + 1, math.gcd(len(weight), len(rows))):
                yield from near_piece(node, name, 0, rows[start : start + len(weight)], weight)


def near_piece(node: str, module: str, start: int, rows: Array, weight: Array) -> Iterator[Piece]:
    """Yield the piece when its first rows, and then all of it, are near enough."""
    for count in (HEAD_ROWS, len(weight)):
        error = np.linalg.norm(rows[:count] - weight[:count]) / (np.linalg.norm(weight[:count]) + 1e-30)
        if error > FARTHEST:
            return
    yield Piece(node, module, start, rows, float(error))


def best_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Keep the nearest piece for each place in a module."""
    best: dict[tuple[str, int], Piece] = {}
    for piece in pieces:
        known = best.get((piece.module, piece.start))
        if known is None or piece.error < known.error:
            best[piece.module, piece.start] = piece
    return list(best.values())


def with_weights(model: LoadedModel, pieces: Sequence[Piece]) -> LoadedModel:
    """Return a copy of a model with the pieces in the place of its own weights."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for piece in pieces:
            target: Any = module.get_submodule(piece.module)
            target.weight[piece.start : piece.start + len(piece.array)] = torch.from_numpy(piece.array)
    return replace(model, module=module)
