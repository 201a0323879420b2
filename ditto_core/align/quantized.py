"""What quantization costs and what the kernels do wrong: two numbers, from the file's own weights.

The activations of a 4-bit file are 30 to 50 % off after one layer, so their identity would be a guess. Its weights are
certain (see :mod:`ditto_core.align.pieces`). A model with these weights differs from the original by what the
quantization costs; the file differs from it by what its kernels do. Kernels that round what they read are allowed the
error that the same rounding makes in the model. Asked to compute in float32, they leave nothing: such a file is aligned
as one of floats is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ditto_core.align import eager
from ditto_core.align.aligning import Study, concluded, study
from ditto_core.align.fault import Fault
from ditto_core.align.file import OnnxFile
from ditto_core.align.pieces import Weights, own_weights
from ditto_core.align.probes import Probe
from ditto_core.align.rounding import rounded
from ditto_core.align.values import Value
from ditto_core.align.verify import place_errors

if TYPE_CHECKING:
    from ditto_core.model.loading import LoadedModel

KERNELS = 0.1
"""Bound where the rounding of activations cannot be taken out of the file: they are 2e-2 to 8e-2 off."""

EXACT = 1e-4
"""Products of 4-bit blocks in float32 are up to 3.4e-5 off after the 30 layers of SmolLM2."""


@dataclass(frozen=True)
class Cost:
    """Relative L2 at one site on the first probe: of the quantized weights, of the file's kernels, and of the model
    with these weights when it rounds as the kernels do."""

    site: str
    quantization: float
    kernels: float
    rounding: float

    def __str__(self) -> str:
        allowed = f" (rounding {self.rounding:.1e})" if self.rounding else ""
        return f"{self.site}: quantization {self.quantization:.1e}, kernels {self.kernels:.1e}{allowed}"


@dataclass(frozen=True)
class Costs:
    """What was found of the quantized ``weights``, and both numbers of every site that the file shows."""

    weights: Weights
    sites: tuple[Cost, ...]

    def __str__(self) -> str:
        found, total = self.weights.total - len(self.weights.missing), self.weights.total
        lines = [f"weights: {found} of {total} found by value, the worst {self.weights.worst:.2f} off"]
        lines += [f"  not found: {name}" for name in self.weights.missing]
        lines += [f"  {name}: {why}" for name, why in self.weights.wrong.items()]
        if self.sites:
            kernels = sorted(cost.kernels for cost in self.sites)
            lines.append(
                f"kernels: {kernels[len(kernels) // 2]:.1e} in the middle, {kernels[-1]:.1e} at most, of "
                f"{len(kernels)} sites against the model with the file's weights"
            )
            lines += [f"  {cost}" for cost in self.shown()]
        return "\n".join(lines)

    def shown(self, most: int = 12) -> list[Cost]:
        """Return the outputs of layers, or the sites with the largest errors of kernels."""
        layers = [cost for cost in self.sites if cost.site.rpartition(".")[2].isdecimal() or "." not in cost.site]
        return layers or sorted(self.sites, key=lambda cost: -cost.kernels)[:most]


@dataclass(frozen=True)
class Quantized:
    """A quantized file: its ``weights`` in the ``original`` model, and the study of what the operators compute exactly
    beside the model that has these weights."""

    file: OnnxFile
    original: LoadedModel
    study: Study
    weights: Weights

    @property
    def judged(self) -> bool:
        """Whether operators can be judged: the rounding of activations hides what is smaller."""
        return not self.study.file.rounds

    def faults(self) -> list[Fault]:
        """Return the operators whose weights are no rounding of the model's."""
        wrong = [piece for piece in self.weights.pieces if not piece.fit]
        return [
            Fault(piece.node, "weight", piece.module, "", (), (), (), cause=f"weight: {piece.fit}") for piece in wrong
        ]


def quantized(model: LoadedModel, file: OnnxFile, inputs: Mapping[str, str] | None = None) -> Quantized:
    """Find a file's weights in the model, and align the two with them. ``inputs`` as :func:`aligning.study` takes them.

    Raises what that does.
    """
    own, weights = own_weights(model, file)
    exact = file.exact()
    return Quantized(file, model, study(own, exact, inputs, KERNELS if exact.rounds else EXACT), weights)


def measure_costs(found: Quantized) -> Costs:
    """Measure both numbers at every site of a file, as it is, on the first probe; see the module's text."""
    probes, model, places = found.study.probes[:1], found.study.model, concluded(found.study)
    kernels = place_errors(places, model, found.file.readable(), probes[0])
    models = (found.original, model, rounded(model, found.weights.roundings))
    original, own, alike = (values_of(each, probes) for each in models)
    costs = (
        Cost(site, distance(own[site], original[site]), kernels[site], distance(alike[site], own[site]))
        for site in (*places.sites, *places.finals)
        if site in kernels and site in own
    )
    return Costs(found.weights, tuple(costs))


def values_of(model: LoadedModel, probes: Sequence[Probe]) -> Mapping[str, Value]:
    """Return what a model computes, by site and by name of a final output."""
    sites, finals = eager.capture(model, probes)
    named = {name: site for site in sites for name in site.sites}
    return {**{name: sites[i] for name, i in finals.items()}, **named}


def distance(actual: Value, expected: Value) -> float:
    """Return the relative L2 error on the first probe."""
    ours, theirs = actual.clean[0].ravel(), expected.clean[0].ravel()
    return float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) + 1e-30))
