"""A tensor that one side computed on every probe, and the classes of tensors that hold the same numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ditto_core.align.store import Lazy

Array: TypeAlias = npt.NDArray[Any]
Dims: TypeAlias = tuple[tuple[int, ...], ...]
"""A shape on every probe: one tuple a dimension, of its size on each probe."""

HIDDEN_SCORE = 1e9
"""A score at least this large stands for minus infinity; the two sides use different numbers for it."""
FEW = 8
"""A constant of fewer different numbers than this identifies nothing."""


@dataclass
class Value:
    """A floating tensor of one side. ``arrays`` are float32, one a probe; ``parents`` index the values it comes from.

    ``where`` is the eager source line, or the ONNX node. ``sites`` are the names that the model has for it. A block of
    ``columns`` of a packed value has that value's index as its ``base``. ``batches`` are the probes' numbers of rows.
    ``vouches``: its being right means that its parents are; a cache that fused attention returns comes from some.
    ``dtype`` is what the side computed it in.
    """

    name: str
    operator: str
    where: str
    arrays: Sequence[Array]
    parents: tuple[int, ...] = ()
    sites: tuple[str, ...] = ()
    base: int = -1
    columns: tuple[int, int] | None = None
    batches: tuple[int, ...] = ()
    vouches: bool = True
    dtype: str = "float32"

    @cached_property
    def dims(self) -> Dims:
        """The shape on every probe."""
        arrays = self.arrays
        shapes = arrays.shapes if isinstance(arrays, Lazy) else [array.shape for array in arrays]
        return tuple(zip(*shapes, strict=True))

    @cached_property
    def seen(self) -> bool:
        """Whether all numbers are finite, and none stands for minus infinity."""
        return all(bool((np.abs(array) < HIDDEN_SCORE).all()) for array in self.arrays)

    @property
    def clean(self) -> Sequence[Array]:
        """The arrays with zeros for what is not finite or stands for minus infinity in masked scores."""
        return self.arrays if self.seen else [visible(array) for array in self.arrays]

    @cached_property
    def constant(self) -> bool:
        """Whether the inputs' content does not show: the probes agree wherever both have an element."""
        first, *others = self.arrays
        return bool(others) and all(np.array_equal(*cropped(first, other), equal_nan=True) for other in others)


def visible(array: Array) -> Array:
    """Return an array with zeros for what is not finite or stands for minus infinity: itself, where there is none."""
    seen = np.abs(array) < HIDDEN_SCORE
    return array if seen.all() else np.where(seen, array, np.float32(0))


def cropped(one: Array, other: Array) -> tuple[Array, Array]:
    """Return both arrays cut to the sizes that they share."""
    window = tuple(slice(0, min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return one[window], other[window]


def classes(values: Sequence[Value]) -> dict[int, int]:
    """Map each value's index to the first value that holds the same numbers, in whatever layout.

    Scalars and constants of few numbers are left out: they are equal to too much.
    """
    found: dict[int, int] = {}
    first: dict[bytes, int] = {}
    for index, value in enumerate(values):
        if math.prod(size[0] for size in value.dims) < 2 or (value.constant and np.unique(value.arrays[0]).size < FEW):
            continue
        key = hashlib.sha256()  # the sorted numbers themselves would be one more copy of every value
        for array in value.arrays:
            key.update(np.sort(array, axis=None).data)
        found[index] = first.setdefault(key.digest(), index)
    return found


def with_ancestors(values: Sequence[Value], members: dict[int, int], start: Iterable[int]) -> set[int]:
    """Return ``start``, all that these are computed from, and all values of the same ``members`` classes."""
    waiting, done = list(start), set()
    while waiting:
        index = waiting.pop()
        if index not in done:
            done.add(index)
            waiting += values[index].parents if values[index].vouches else ()
    kinds = {members[index] for index in done if index in members}
    return done | {index for index, kind in members.items() if kind in kinds}
