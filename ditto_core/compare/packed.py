"""Measuring many pairs in one go: small ones share their operations, launches and transfers.

Until it has some hundred thousand elements, a pair costs what its Python and launches cost. :func:`measure_all` gathers
 pairs of floats by dtype (on the CPU also by shape), and gives each what
:func:`~ditto_core.compare.metrics.measure` and :func:`~ditto_core.compare.rows.row_errors` would.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ditto_core.compare._accumulate import Rules
from ditto_core.compare._blocks import Floats
from ditto_core.compare._columns import Shown, metrics_of
from ditto_core.compare._launch import QUICK
from ditto_core.compare._record import Metrics
from ditto_core.compare._together import Sums, on_cpu, on_cuda
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

FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16))


class Pair(NamedTuple):
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


class Found:
    """What was measured of a pair: its metrics, and its rows on demand."""

    def __init__(self, metrics: Metrics, pair: Pair, rows: tuple[Floats, Floats] | None = None) -> None:
        self.metrics = metrics
        self._pair = pair
        self._rows = rows

    def row_errors(self, least: float = SMALL) -> torch.Tensor | None:
        """Return what :func:`~ditto_core.compare.rows.row_errors` does, on the CPU."""
        pair = self._pair
        if self._rows is None:
            found = row_errors(pair.actual, pair.expected, pair.axes, pair.valid, least=least)
            return None if found is None else found.cpu()
        layout = layout_of(pair.expected.shape, tuple(pair.axes))
        count = math.prod(layout.lead[dim] for dim in layout.kept)
        if not layout.kept or count < 2:
            return None
        others = tuple(dim for dim in range(len(layout.lead)) if dim not in layout.kept)
        error, size = (np.sqrt(side.reshape(layout.lead).sum(others).reshape(-1)) for side in self._rows)
        return relative_rows(torch.from_numpy(error), torch.from_numpy(size), pair.expected.numel() // count, least)


def measure_all(pairs: Sequence[Pair]) -> list[Found | ShapeMismatch]:
    """Measure pairs, in their order; two shapes give the error that :func:`measure` would raise."""
    found: list[Found | ShapeMismatch | None] = [None] * len(pairs)
    groups: dict[Hashable, list[int]] = {}
    for i, pair in enumerate(pairs):
        if pair.actual.shape != pair.expected.shape:
            found[i] = ShapeMismatch(pair.actual.shape, pair.expected.shape)
        else:
            groups.setdefault(kind_of(pair), []).append(i)
    for kind, members in groups.items():
        if kind is None or (kind[0] == "cpu" and len(members) < CPU_FEWEST):  # type: ignore[index]
            continue
        most = max(1, CPU_MATRIX // pairs[members[0]].actual.numel()) if kind[0] == "cpu" else len(members)  # type: ignore[index]
        for first in range(0, len(members), most):
            part = members[first : first + most]
            for i, each in zip(part, measure_group([pairs[i] for i in part]), strict=True):
                found[i] = each
    return [alone(pair) if each is None else each for pair, each in zip(pairs, found, strict=True)]


def alone(pair: Pair) -> Found:
    """Measure a pair by itself."""
    actual, expected, axes, valid, rtol, atol, equal_nan = pair
    return Found(measure(actual, expected, axes=axes, valid=valid, rtol=rtol, atol=atol, equal_nan=equal_nan), pair)


def kind_of(pair: Pair) -> Hashable:
    """Return what pairs that are measured together have in common; None for one that is measured by itself."""
    actual, expected, axes, valid, *bounds = pair
    size, dtypes = actual.numel(), (actual.dtype, expected.dtype)
    if not size or not FLOATS.issuperset(dtypes) or (axes and len(axes) != actual.dim()):
        return None
    if usable(actual):
        there = actual.device == expected.device and size < QUICK
        return ("cuda", actual.device, dtypes, valid is None) if there else None
    if size > CPU_ELEMENTS or actual.device.type != "cpu" or expected.device.type != "cpu":
        return None
    return ("cpu", dtypes, actual.shape, tuple(axes), valid is None, *bounds)


def measure_group(pairs: Sequence[Pair]) -> list[Found | None]:
    """Measure pairs of one kind; None for one that has to be measured by itself."""
    layouts = [layout_of(pair.expected.shape, tuple(pair.axes)) for pair in pairs]
    rules = [rules_of(p.actual.dtype, p.expected.dtype, p.rtol, p.atol, p.equal_nan) for p in pairs]
    sides = flattened(pairs)
    counts = np.array([math.prod(each.lead) for each in layouts])
    if usable(pairs[0].actual):
        with torch.cuda.device(pairs[0].actual.device):
            sums = on_cuda(sides, np.repeat([each.row for each in layouts], counts), rules)
    else:
        sums = on_cpu(sides, layouts[0].row, rules[0])
    return assembled(pairs, layouts, rules, sums, counts.cumsum() - counts)


def assembled(
    pairs: Sequence[Pair], layouts: Sequence[Layout], rules: Sequence[Rules], sums: Sums, starts: Any
) -> list[Found | None]:
    """Return what sums mean, by pair; ``starts``: each pair's first element row."""
    alike: dict[Layout, list[int]] = {}
    for i, layout in enumerate(layouts):
        alike.setdefault(layout, []).append(i)
    splits: list[dict[str, tuple[float, ...]]] = [{}] * len(pairs)
    rows: list[Any] = [None] * len(pairs)
    for layout, members in alike.items():
        at = starts[members][:, None] + np.arange(math.prod(layout.lead))
        parts = sums.rows[:, at].reshape(2, len(members), *layout.lead)
        for i, split in zip(members, splits_of(layout, parts), strict=True):
            splits[i] = split
        for k, i in enumerate(members):
            rows[i] = parts[:, k]
    shown = [Shown(p.actual.shape, p.actual.dtype, rule) for p, rule in zip(pairs, rules, strict=True)]
    metrics = metrics_of(sums.found, sums.octaves, shown, splits, sums.quantiles)
    plain = sums.plain.tolist()
    return [Found(*each) if fit else None for *each, fit in zip(metrics, pairs, rows, plain, strict=True)]


def splits_of(layout: Layout, sums: Floats) -> list[dict[str, tuple[float, ...]]]:
    """Return the errors along each axis, by pair, from squared errors and sizes [2, pairs, *lead]."""
    found: list[dict[str, tuple[float, ...]]] = [{} for _ in range(sums.shape[1])]
    for name, dim in layout.splits:
        others = tuple(i + 2 for i in range(len(layout.lead)) if i != dim)
        errors, sizes = sums.sum(others) if others else sums
        with np.errstate(all="ignore"):
            ratios = np.where(errors == 0, 0.0, np.sqrt(errors) / np.sqrt(sizes))
        for each, ratio in zip(found, ratios.tolist(), strict=True):
            each[name] = tuple(ratio)
    return found


def flattened(pairs: Sequence[Pair]) -> list[list[torch.Tensor]]:
    """Return both sides of each pair, and the masks where there are any, as flat tensors."""
    sides = [[side.detach().reshape(-1) for side in both] for both in zip(*(pair[:2] for pair in pairs), strict=True)]
    if pairs[0].valid is None:
        return sides
    return [*sides, [expanded(pair).reshape(-1) for pair in pairs]]


def expanded(pair: Pair) -> torch.Tensor:
    """Return the mask of a pair in its shape."""
    assert pair.valid is not None
    return pair.valid.to(pair.actual.device, torch.bool).expand(pair.actual.shape)


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
