"""Changes of a model's own computation, by family, each with its price: what a fault could be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import entry_points

from ditto_core.causes.mutants.base import Edits, Model, Mutant
from ditto_core.causes.mutants.ids import ids
from ditto_core.causes.mutants.layouts import layouts
from ditto_core.causes.mutants.masks import masks
from ditto_core.causes.mutants.numbers import constants, fits, formats, gloss
from ditto_core.causes.mutants.operations import operations
from ditto_core.causes.mutants.ranks import ranks
from ditto_core.causes.mutants.tensors import tensors
from ditto_core.causes.slices import Slice

Family = Callable[[Slice, Model], Iterator[Mutant]]

ENTRY_POINTS = "ditto_core.mutants"
"""Group of entry points: families of other distributions."""

FAMILIES: Mapping[str, Family] = {
    family.__name__: family for family in (operations, constants, ids, masks, tensors, ranks, formats, layouts, fits)
}
"""What yields the mutants of a slice, by name."""

NAMES = (*FAMILIES, "ranges", "settings")
"""The families that a cause may be of; one that was found so has the rule ``mutants.NAME``."""


def mutants(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield all mutants of a slice, those of other distributions too."""
    others = {point.name: point.load() for point in entry_points(group=ENTRY_POINTS)}
    for name, family in {**others, **FAMILIES}.items():
        yield from (m if m.family else replace(m, family=name) for m in family(part, model))


__all__ = ["FAMILIES", "NAMES", "Edits", "Family", "Model", "Mutant", "gloss", "mutants"]
