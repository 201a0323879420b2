"""The right side of a comparison: what its parts hold that a file may have wrong."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from ditto_core.align.values import Array, Value
from ditto_core.graphs.files import read_initializer

if TYPE_CHECKING:
    from ditto_core.graphs.graph import Graph

LEVELS = 3
"""Parameters and numbers are looked for in a module and those that it is in, two levels up."""


class Origin(Protocol):
    """What is known of the right side besides its values."""

    def weights(self, site: Value, most: int) -> dict[str, Array]:
        """Return the parameters near a site that have at most so many numbers, by name."""
        ...

    def named(self, weight: Array) -> str:
        """Return the name of the parameter that is equal to an array or its transpose; empty for none."""
        ...

    def numbers(self, site: Value) -> Iterator[tuple[str, float]]:
        """Yield the numbers near a site by their names."""
        ...

    def windows(self) -> Iterator[int]:
        """Yield the sizes that an attention window may have, -1 for none."""
        ...

    def rotaries(self, rows: int) -> Iterator[tuple[str, tuple[Array, Array]]]:
        """Yield cosines and sines [rows, size of a head] of each rotary embedding, by its name."""
        ...


@dataclass(frozen=True)
class ModelOrigin:
    """A module of torch's, with its configuration."""

    module: nn.Module

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration, empty where it has none."""
        config: Any = getattr(self.module, "config", None)
        return {} if config is None else dict(config.to_dict())

    def weights(self, site: Value, most: int) -> dict[str, Array]:
        """See :class:`Origin`."""
        return {
            name: parameter.detach().float().numpy()
            for prefix, module in self._around(site)
            for name, parameter in module.named_parameters(prefix, recurse=module is not self.module)
            if parameter.numel() <= most
        }

    def named(self, weight: Array) -> str:
        """See :class:`Origin`."""
        alike = ((name, p) for name, p in self.module.named_parameters() if p.numel() == weight.size)
        return next((name for name, p in alike if is_same(p.detach().float().numpy(), weight)), "")

    def numbers(self, site: Value) -> Iterator[tuple[str, float]]:
        """See :class:`Origin`."""
        known = self.config
        for holder in (*(vars(module) for _, module in self._around(site)), known):
            yield from numbers_in(holder)
        heads = known.get("num_attention_heads")
        if heads:
            yield "scale of a head", (known.get("head_dim") or known["hidden_size"] // heads) ** -0.5

    def windows(self) -> Iterator[int]:
        """See :class:`Origin`. Tools count the token itself or not."""
        yield -1
        if window := self.config.get("sliding_window"):
            yield from (int(window), int(window) - 1, int(window) + 1)

    def rotaries(self, rows: int) -> Iterator[tuple[str, tuple[Array, Array]]]:
        """See :class:`Origin`."""
        for name, module in self.module.named_modules():
            if list(inspect.signature(module.forward).parameters)[:2] == ["x", "position_ids"]:
                with torch.no_grad():
                    cosines, sines = module(torch.zeros(1), torch.arange(rows)[None])[:2]
                yield name, (cosines[0].float().numpy(), sines[0].float().numpy())

    def _around(self, site: Value) -> Iterator[tuple[str, nn.Module]]:
        known = dict(self.module.named_modules())
        path = site.name.partition("/")[0]
        for _ in range(LEVELS):
            if path in known:
                yield path, known[path]
            path = path.rpartition(".")[0]


@dataclass(frozen=True)
class GraphOrigin:
    """An ONNX graph whose weights are loaded: what the operator that makes a site reads, and its attributes."""

    graph: Graph

    def weights(self, site: Value, most: int) -> dict[str, Array]:
        """See :class:`Origin`."""
        node = self.graph.nodes[self.graph.producer[site.name]]
        tensors = (self.graph.weights[name] for name in node.input if name in self.graph.weights)
        return {t.name: np.asarray(read_initializer(t, None)) for t in tensors if math.prod(t.dims) <= most}  # type: ignore[arg-type]

    def named(self, weight: Array) -> str:
        """See :class:`Origin`."""
        alike = (t for t in self.graph.weights.values() if math.prod(t.dims) == weight.size)
        return next((t.name for t in alike if is_same(read_initializer(t, None), weight)), "")  # type: ignore[arg-type]

    def numbers(self, site: Value) -> Iterator[tuple[str, float]]:
        """See :class:`Origin`."""
        from onnx import helper

        node = self.graph.nodes[self.graph.producer[site.name]]
        yield from numbers_in({a.name: helper.get_attribute_value(a) for a in node.attribute})

    def windows(self) -> Iterator[int]:
        """See :class:`Origin`."""
        yield -1

    def rotaries(self, rows: int) -> Iterator[tuple[str, tuple[Array, Array]]]:
        """See :class:`Origin`."""
        yield from ()


def is_same(known: Array, weight: Array) -> bool:
    """Tell whether two arrays hold the same numbers, one of them transposed perhaps."""
    return any(np.array_equal(turned, weight) for turned in (known, known.T))


def numbers_in(holder: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a mapping."""
    for key, value in holder.items():
        if isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value):
            yield key, float(value)
