"""How far every site is from every value of the file, in every layout: one matrix product a pair of shapes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ditto_core.align.layout import Layout, layouts, product
from ditto_core.align.store import Lazy
from ditto_core.align.values import Array, Dims, Value

FARTHEST = 1.5
"""Two unrelated tensors of one size are about 1.4 apart."""
CLOSEST = 3
"""So many candidates of each product are measured exactly: products of float32 round to about 1e-3."""
CHUNK = 1 << 26
"""Bytes of values of either side that are compared at once."""
TINY = 1e-30
WIDEST = 8
"""A packed value is at most so many times as wide as its part."""
NARROWEST = 4
"""Columns are cut at multiples of at least this."""


@dataclass(frozen=True)
class Candidate:
    """A value that may be a site: its relative L2 error on the worst probe, in the layout that fits best."""

    error: float
    value: int
    layout: Layout


def candidates(
    sites: Sequence[Value], values: Sequence[Value], left: Iterable[int], right: Iterable[int], most: float = FARTHEST
) -> dict[int, list[Candidate]]:
    """Return the nearest of the values ``right`` for each of the sites ``left``, the nearest first."""
    near: dict[int, dict[int, Candidate]] = defaultdict(dict)
    groups = [by_dims(items, chosen) for items, chosen in ((sites, left), (values, right))]
    batches = values[0].batches if values else ()
    for (site_dims, ours), (value_dims, theirs) in itertools.product(groups[0].items(), groups[1].items()):
        if product(site_dims) != product(value_dims):
            continue
        for layout in layouts(value_dims, site_dims, batches):
            for some, others in itertools.product(chunks(ours, site_dims), list(chunks(theirs, value_dims))):
                for index, found in closest(sites, values, some, others, layout):
                    known = near[index].get(found.value)
                    if found.error < most and (known is None or found.error < known.error):
                        near[index][found.value] = found
    return {index: sorted(found.values(), key=lambda c: (c.error, c.value)) for index, found in near.items()}


def by_dims(items: Sequence[Value], chosen: Iterable[int]) -> dict[Dims, list[int]]:
    """Group indices by shape."""
    found: dict[Dims, list[int]] = defaultdict(list)
    for index in chosen:
        found[items[index].dims].append(index)
    return found


def closest(
    sites: Sequence[Value], values: Sequence[Value], ours: Sequence[int], theirs: Sequence[int], layout: Layout
) -> list[tuple[int, Candidate]]:
    """Return the closest values of each site in one layout, measured exactly."""
    left = np.stack([flat(sites[i]) for i in ours])
    right = np.stack([laid_out(values[j], layout) for j in theirs])
    size = np.einsum("ij,ij->i", left, left, dtype=np.float64)[:, None] + TINY
    other = np.einsum("ij,ij->i", right, right, dtype=np.float64)
    rough = np.maximum(size + other - 2.0 * (left @ right.T), 0) / size
    ends = np.cumsum(product(sites[ours[0]].dims))[:-1]
    found = []
    for row, index in enumerate(ours):
        for column in np.argsort(rough[row])[:CLOSEST]:
            error = worst_error(right[column], left[row], ends)
            found.append((index, Candidate(error, theirs[column], layout)))
    return found


def flat(value: Value) -> Array:
    """Return a value's numbers, probe after probe."""
    return np.concatenate([array.ravel() for array in value.clean])


def chunks(members: Sequence[int], dims: Dims) -> Iterator[Sequence[int]]:
    """Yield values of one shape, so many at once as are held in memory."""
    count = max(1, CHUNK // (4 * max(1, sum(product(dims)))))
    return (members[start : start + count] for start in range(0, len(members), count))


def laid_out(value: Value, layout: Layout) -> Array:
    """Return a value's numbers, probe after probe, in a site's order."""
    batches = value.batches
    return np.concatenate([layout.apply(a, batch).ravel() for a, batch in zip(value.clean, batches, strict=True)])


def worst_error(actual: Array, expected: Array, ends: Array) -> float:
    """Return the largest relative L2 error of any probe, in float64."""
    errors = []
    for ours, theirs in zip(np.split(actual, ends), np.split(expected, ends), strict=True):
        distance = np.linalg.norm(ours.astype(np.float64) - theirs)
        errors.append(float(distance / (np.linalg.norm(theirs.astype(np.float64)) + TINY)))
    return max(errors)


def column_blocks(
    values: Sequence[Value], bases: Iterable[int], sites: Sequence[Value], left: Iterable[int]
) -> list[Value]:
    """Return the blocks of columns of packed values that are as wide as one of the sites ``left``."""
    wanted = {(rows, channels) for i in left for rows, channels in widths(sites[i].dims)}
    made = []
    for base in bases:
        value = values[base]
        if not value.dims or len(set(value.dims[-1])) > 1:
            continue
        width, rows = value.dims[-1][0], product(value.dims[:-1])
        for channels in sorted({c for r, c in wanted if r == rows and c < width <= WIDEST * c}):
            step = math.gcd(channels, width)
            if step >= NARROWEST:
                made += [block(value, base, start, start + channels) for start in range(0, width - channels + 1, step)]
    return made


def widths(dims: Dims) -> set[tuple[tuple[int, ...], int]]:
    """Return the (rows on every probe, channels) that a site may be laid out as: its constant dimensions merged."""
    constant = [dim[0] for dim in dims if len(set(dim)) == 1]
    total = product(dims)
    found = set()
    for count in range(1, len(constant) + 1):
        for part in itertools.combinations(constant, count):
            channels = math.prod(part)
            if channels > 1:
                found.add((tuple(size // channels for size in total), channels))
    return found


def block(value: Value, base: int, start: int, stop: int) -> Value:
    """Return columns of a value as a value of its own."""
    arrays = value.arrays if isinstance(value.arrays, Lazy) else Lazy(value.arrays)
    name = f"{value.name}[..., {start}:{stop}]"
    return Value(
        name,
        value.operator,
        value.where,
        arrays.columns(start, stop),
        value.parents,
        base=base,
        columns=(start, stop),
        batches=value.batches,
    )
