"""Measuring many pairs in one go: small ones share their operations, launches and transfers.

Until it has some hundred thousand elements, a pair costs what its Python and launches cost. :func:`measure_all` gathers
 pairs of floats by dtype (on the CPU also by shape), and gives each what
:func:`~ditto_core.compare.metrics.measure` and :func:`~ditto_core.compare.rows.row_errors` would.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ditto_core.compare._accumulate import Rules
from ditto_core.compare._blocks import Floats as Array
from ditto_core.compare._columns import Columns
from ditto_core.compare._record import Metrics
from ditto_core.compare._together import on_cpu
from ditto_core.compare._together_cuda import on_cuda, rows_on_cuda
from ditto_core.compare.cuda import usable
from ditto_core.compare.metrics import ShapeMismatch, measure, split_axes
from ditto_core.compare.rows import SMALL, relative_rows, row_dimensions, row_errors
from ditto_core.compare.ulp import coarser, spacing, tolerance

CPU_ELEMENTS = 2048
"""Elements up to which pairs on the CPU gain: beyond, a pair's matrix no longer stays in the cache."""

CPU_FEWEST = 3
"""Pairs of a kind from which a matrix pays on the CPU."""

CPU_MATRIX = 1 << 17
"""Elements of a matrix on the CPU: three of them in float64 fit a cache of 3 MB."""

GPU_ELEMENTS = 1 << 24
"""Elements up to which a pair on a GPU goes with the others: at 8 million it saves its own launches and loses nothing
(benchmarks/device.md); far beyond, the kernel at memory speed makes up for them."""

GPU_PASS = 1 << 26
"""Elements of one pass on a GPU, which copies them."""

FLOATS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


class TensorPair(NamedTuple):
    """What is compared: see :func:`~ditto_core.compare.metrics.measure`."""

    actual: torch.Tensor
    expected: torch.Tensor
    axes: Sequence[str] = ()
    valid: torch.Tensor | None = None
    rtol: float | None = None
    atol: float | None = None
    equal_nan: bool = False


class Layout(NamedTuple):
    """How a shape with these axes is split: the dimensions up to the last axis that has errors of its own, the elements
    of a row behind it, ``(field of Metrics, dimension)`` of each, and the dimensions that number judged rows."""

    lead: tuple[int, ...]
    row: int
    splits: tuple[tuple[str, int], ...]
    kept: tuple[int, ...]


class Rows:
    """The element rows of alike pairs: float64 [2, pairs, *lead] squared errors and sizes."""

    def __init__(self, layout: Layout, sums: Array) -> None:
        self._layout = layout
        self._sums = sums
        self._count = math.prod(layout.lead[dim] for dim in layout.kept) if layout.kept else 0
        self._known: dict[float, Array] = {}

    def errors(self, pair: int, least: float) -> Array | None:
        """Return the relative errors of a pair's judged rows; all pairs' are worked out at once. None for fewer than
        two rows."""
        if self._count < 2:
            return None
        if least not in self._known:
            layout = self._layout
            others = tuple(dim + 2 for dim in range(len(layout.lead)) if dim not in layout.kept)
            error, size = np.sqrt(self._sums.sum(others)).reshape(2, -1, self._count)
            self._known[least] = relative_rows(error, size, layout.row * math.prod(layout.lead) // self._count, least)
        errors: Array = self._known[least][pair]
        return errors

    def splits(self) -> list[dict[str, tuple[float, ...]]]:
        """Return the errors along each axis, by pair."""
        columns = []
        for _, dim in self._layout.splits:
            errors, sizes = self._sums.sum(tuple(i + 2 for i in range(len(self._layout.lead)) if i != dim))
            with np.errstate(all="ignore"):
                columns.append(map(tuple, np.where(errors == 0, 0.0, np.sqrt(errors) / np.sqrt(sizes)).tolist()))
        names = [name for name, _ in self._layout.splits]
        if not names:
            return [{}] * self._sums.shape[1]
        return [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]


class Found:
    """What was measured of a pair: its metrics, and its rows on demand.

    ``rows`` are those of alike pairs, of which it is number ``place``; without them they are not yet measured.
    """

    __slots__ = ("_pair", "_place", "_rows", "metrics")

    def __init__(self, metrics: Metrics, pair: TensorPair, rows: Rows | None = None, place: int = 0) -> None:
        self.metrics = metrics
        self._pair = pair
        self._rows = rows
        self._place = place

    def row_errors(self, least: float = SMALL) -> Array | None:
        """Return what :func:`~ditto_core.compare.rows.row_errors` does."""
        if self._rows is not None:
            return self._rows.errors(self._place, least)
        actual, expected, axes, valid, *_ = self._pair
        seen = self.metrics
        if usable(expected) and axes and not seen.nan_actual + seen.nan_expected + seen.inf_actual + seen.inf_expected:
            layout, sides = layout_of(expected.shape, tuple(axes)), [side[0] for side in stacked([self._pair])]
            self._rows = Rows(layout, rows_on_cuda(sides, layout.lead, layout.row))
            return self._rows.errors(0, least)
        return row_errors(actual, expected, axes, valid, least=least)


class Kind(NamedTuple):
    """What alike pairs have in common. ``kernel``: one measures them, and there each pair has bounds of its own."""

    kernel: bool
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype]
    masked: bool
    shape: torch.Size
    axes: tuple[str, ...]


def measure_all(pairs: Sequence[TensorPair]) -> list[Found | ShapeMismatch]:
    """Measure pairs, in their order; two shapes give the error that :func:`measure` would raise."""
    found: list[Found | None] = [None] * len(pairs)
    alike: dict[tuple[Kind, tuple[Any, ...]], list[int]] = {}
    for i, pair in enumerate(pairs):
        if (kind := kind_of(pair)) is not None:
            alike.setdefault((kind, () if kind.kernel else pair[4:]), []).append(i)
    for groups in passes(alike):
        measured = measure_groups([[pairs[i] for i in group] for group in groups])
        for i, each in zip((i for group in groups for i in group), measured, strict=True):
            found[i] = each
    return [alone(pair) if each is None else each for pair, each in zip(pairs, found, strict=True)]


def passes(alike: Mapping[tuple[Kind, Any], list[int]]) -> Iterator[list[list[int]]]:
    """Yield the groups of alike pairs that one pass takes: on a GPU of a dtype, on the CPU what the cache holds."""
    launches: dict[Hashable, list[tuple[int, list[int]]]] = {}
    for (kind, _), members in alike.items():
        size = math.prod(kind.shape)
        if kind.kernel:
            launches.setdefault(kind[:4], []).append((size, members))
        elif len(members) >= CPU_FEWEST:
            most = max(1, CPU_MATRIX // size)
            yield from ([members[first : first + most]] for first in range(0, len(members), most))
    for groups in launches.values():
        yield from filled(groups)


def filled(groups: Sequence[tuple[int, list[int]]]) -> Iterator[list[list[int]]]:
    """Yield passes of at most :data:`GPU_PASS` elements; ``groups``: the elements of a pair, and alike pairs."""
    taken: list[list[int]] = []
    left = GPU_PASS
    for size, members in groups:
        rest = members
        while rest:
            if size > left:
                yield taken
                taken, left = [], GPU_PASS
            fit = left // size
            taken.append(rest[:fit])
            left -= size * len(taken[-1])
            rest = rest[fit:]
    yield taken


def alone(pair: TensorPair) -> Found | ShapeMismatch:
    """Measure a pair by itself."""
    actual, expected, axes, valid, rtol, atol, equal_nan = pair
    try:
        found = measure(actual, expected, axes=axes, valid=valid, rtol=rtol, atol=atol, equal_nan=equal_nan)
        return Found(found, pair)
    except ShapeMismatch as error:
        return error


def kind_of(pair: TensorPair) -> Kind | None:
    """Return what pairs that are measured together have in common; None for one that is measured by itself."""
    actual, expected, axes, valid, *_ = pair
    shape, device = expected.shape, expected.device
    if actual.shape != shape or actual.device != device:
        return None
    dtypes, mask = (actual.dtype, expected.dtype), None if valid is None else valid.shape
    return kind_of_types(usable(expected), device, dtypes, mask, shape, tuple(axes))


@lru_cache(maxsize=1024)
def kind_of_types(
    kernel: bool,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    mask: torch.Size | None,
    shape: torch.Size,
    axes: tuple[str, ...],
) -> Kind | None:
    """Return the kind of a pair by what is known of it without a look at its numbers; ``mask``: the shape of what is
    valid."""
    if 0 in shape or not FLOATS.issuperset(dtypes):
        return None
    size = math.prod(shape)
    if size > GPU_ELEMENTS if kernel else size > CPU_ELEMENTS or device.type != "cpu":
        return None
    # Axes and a mask that do not fit are errors of the pair alone.
    if (axes and len(axes) != len(shape)) or (mask is not None and not fits(mask, shape)):
        return None
    return Kind(kernel, device, dtypes, mask is not None, shape, axes)


def fits(mask: torch.Size, shape: torch.Size) -> bool:
    """Tell whether a mask broadcasts to a shape."""
    return len(mask) <= len(shape) and all(n in (1, size) for n, size in zip(mask[::-1], shape[::-1], strict=False))


def is_small(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor costs less to measure together with others: most of what it costs is not its numbers."""
    return tensor.numel() <= (GPU_ELEMENTS if usable(tensor) else CPU_ELEMENTS)


def measure_groups(groups: Sequence[Sequence[TensorPair]]) -> list[Found | None]:
    """Measure groups of alike pairs, all of one dtype a side; None for a pair that has to be measured by itself."""
    layouts = [layout_of(group[0].expected.shape, tuple(group[0].axes)) for group in groups]
    pairs = [pair for group in groups for pair in group]
    dtypes = pairs[0].actual.dtype, pairs[0].expected.dtype
    rules = [rules_of(*dtypes, *pair[4:]) for pair in pairs]
    with torch.no_grad():
        sides = [[torch.stack(side) for side in part] for part in zip(*map(stacked, groups), strict=True)]
    sizes = [len(group) for group in groups]
    if usable(pairs[0].expected):
        widths = [(layout.row, size * math.prod(layout.lead)) for layout, size in zip(layouts, sizes, strict=True)]
        with torch.cuda.device(pairs[0].expected.device):
            sums = on_cuda(sides, np.repeat(*np.array(widths).T), rules)
    else:
        sums = on_cpu([side[0].reshape(len(pairs), -1) for side in sides], layouts[0].row, rules[0])
    rows = list(rows_of(layouts, sizes, sums.rows))
    shapes = [(group[0].expected.shape, len(group)) for group in groups]
    columns = Columns(
        *(sums.found, sums.octaves, shapes, dtypes[0], rules),
        *(lambda: [each for part in rows for each in part.splits()], sums.quantiles),
    )
    places = [(part, i) for part, size in zip(rows, sizes, strict=True) for i in range(size)]
    parts = enumerate(zip(pairs, places, sums.plain.tolist(), strict=True))
    return [Found(Metrics.of_columns(columns, i), pair, *own) if plain else None for i, (pair, own, plain) in parts]


def stacked(group: Sequence[TensorPair]) -> list[list[torch.Tensor]]:
    """Return both sides of alike pairs, and the masks where they have any."""
    sides = [[pair[0] for pair in group], [pair[1] for pair in group]]
    if group[0].valid is None:
        return sides
    masks: dict[int, torch.Tensor] = {}
    for actual, _, _, valid, *_ in group:
        if valid is not None and id(valid) not in masks:
            masks[id(valid)] = valid.to(actual.device, torch.bool).expand(actual.shape)
    return [*sides, [masks[id(pair.valid)] for pair in group]]


def rows_of(layouts: Sequence[Layout], sizes: Sequence[int], sums: Array) -> Iterator[Rows]:
    """Yield the rows of each group of alike pairs from the sums of all element rows [2, rows]."""
    start = 0
    for layout, size in zip(layouts, sizes, strict=True):
        end = start + size * math.prod(layout.lead)
        yield Rows(layout, sums[:, start:end].reshape(2, size, *layout.lead))
        start = end


@lru_cache
def layout_of(shape: torch.Size, axes: tuple[str, ...]) -> Layout:
    """Return how a shape with these axes is split."""
    splits = tuple(split_axes(axes))
    behind = max((dim for _, dim in splits), default=-1) + 1
    return Layout(tuple(shape[:behind]), math.prod(shape[behind:]), splits, row_dimensions(axes))


@lru_cache
def rules_of(
    actual: torch.dtype, expected: torch.dtype, rtol: float | None, atol: float | None, equal_nan: bool
) -> Rules:
    """Fill in the tolerances that were not given."""
    coarse = coarser(actual, expected)
    default = tolerance(coarse)
    own = default[0] if rtol is None else rtol, default[1] if atol is None else atol
    return Rules(*own, equal_nan, spacing(coarse), False)
