"""Changes of a model's own computation, by family, each with its price: what a fault could be."""

from __future__ import annotations

from collections.abc import Iterator

from ditto_core.causes.mutants.base import Edits, Model, Mutant
from ditto_core.causes.mutants.layouts import layouts
from ditto_core.causes.mutants.masks import masks
from ditto_core.causes.mutants.numbers import constants, fits, formats, gloss, ids
from ditto_core.causes.mutants.operations import operations
from ditto_core.causes.mutants.tensors import tensors
from ditto_core.causes.slices import Slice

NAMES = ("operations", "constants", "masks", "tensors", "formats", "layouts", "ranges", "fits", "settings")
"""The families; a cause that one found has the rule ``mutants.NAME``."""


def mutants(part: Slice, model: Model, dtype: str) -> Iterator[Mutant]:
    """Yield all mutants of a slice; ``dtype`` is the engine's."""
    yield from operations(part, model)
    yield from constants(part, model)
    yield from ids(part, model)
    yield from masks(part, model)
    yield from tensors(part, model)
    yield from formats(part, model, dtype)
    yield from layouts(part, model)
    yield from fits(part, model)


__all__ = ["NAMES", "Edits", "Model", "Mutant", "gloss", "mutants"]
