"""Measures the pairs of a step: small ones together at its end, each large one at once, so that it can be dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ditto_core.compare.judging import OUTPUT
from ditto_core.compare.masks import as_masks, may_hide
from ditto_core.compare.metrics import ShapeMismatch
from ditto_core.compare.packed import Found, TensorPair, measure_all
from ditto_core.compare.requested import measure_requested
from ditto_core.compare.result import SiteResult
from ditto_core.compare.row_error import RowError
from ditto_core.compare.rows import SMALL, worst_row
from ditto_core.compare.tolerance import EPSILON, INTEGERS, TABLE, Tolerance
from ditto_core.compare.ulp import coarser
from ditto_core.sites import Tap
from ditto_core.stepping.floor import Noise
from ditto_core.stepping.measured import Elementwise, Measured

HELD = 1 << 25
"""Elements of small pairs that are held before they are measured: 128 MiB of a float32 reference."""


class StepPair(NamedTuple):
    """One tensor of a step on both sides.

    ``noisy``: samples of the reference's in the engine's dtype; ``first``: that of a run of the reference which the
    second has to repeat. ``valid``: the elements that count; ``names``: what a rule may call the tensor; ``final``: an
    output; ``tied``: why nothing of it is judged, empty for the most.
    """

    order: int
    tap: Tap
    actual: torch.Tensor
    expected: torch.Tensor
    noisy: Sequence[torch.Tensor]
    first: torch.Tensor | None
    valid: torch.Tensor | None
    names: tuple[str, ...]
    final: bool
    tied: str = ""


class Measuring:
    """Measures the pairs of a step, in the order in which they come, into ``found``.

    ``dtype`` is the engine's; ``usual``: what counts as a mismatched element where no rule says so.
    """

    def __init__(self, step: int, found: Measured, tolerance: Tolerance, dtype: str, usual: Elementwise) -> None:
        self._step = step
        self._found = found
        self._tolerance = tolerance
        self._dtype = dtype
        self._usual = usual
        self._waiting: list[Callable[[], StepPair] | SiteResult | None] = []
        self._held = 0

    def add(self, pair: Callable[[], StepPair], held: int | None) -> None:
        """Measure a pair; one that may be ``held``, so many elements, waits for others before it is even made: between
        the calls of a forward all work costs more."""
        if held is None:
            self._waiting += self._results([pair()])
            return
        self._waiting.append(pair)
        self._held += held
        if self._held > HELD:
            self.flush()

    def flush(self) -> None:
        """Measure what waits."""
        waiting, self._waiting, self._held = self._waiting, [], 0
        results = iter(self._results([each() for each in waiting if callable(each)]))
        done = (next(results) if callable(each) else each for each in waiting)
        self._found.results += [each for each in done if each is not None]

    def _results(self, pairs: Sequence[StepPair]) -> list[SiteResult | None]:
        """Measure pairs, each with its noise; None for one whose sides are of two shapes: it is missing."""
        asked = [self._asked(pair) for pair in pairs]
        found = iter(measure_all([each for part in asked for each in part]))
        return [self._result(pair, part, [next(found) for _ in part]) for pair, part in zip(pairs, asked, strict=True)]

    def _asked(self, pair: StepPair) -> list[TensorPair]:
        """Return what is measured for a tensor: both sides, the noise, and the reference against itself."""
        sides = pair.expected, pair.tap.axes, pair.valid
        asked = [self._with_bounds(pair, pair.actual, *sides)]
        asked += [self._with_bounds(pair, noisy, *sides, ruled=False) for noisy in pair.noisy]
        if pair.first is not None:
            # The engine may have the last token's logits only.
            first = pair.first[:, -pair.expected.shape[1] :] if pair.first.dim() == 3 else pair.first
            asked.append(TensorPair(first, *sides, equal_nan=True))
        return asked

    def _with_bounds(
        self,
        pair: StepPair,
        actual: torch.Tensor,
        expected: torch.Tensor,
        axes: Sequence[str],
        valid: torch.Tensor | None,
        *,
        ruled: bool = True,
    ) -> TensorPair:
        """Add the tolerances of the elements: a rule's, none of integers, the usual ones.

        Noise is not ``ruled``: it is kept for runs with other rules.
        """
        rtol, atol, equal_nan = self._usual
        if self._own_dtype(pair, actual, expected) in INTEGERS:
            rtol = atol = 0.0
        if ruled and self._tolerance.rules:
            own = self._tolerance.elementwise(pair.names, self._step)
            rtol, atol = (usual if mine is None else mine for mine, usual in zip(own, (rtol, atol), strict=True))
        return TensorPair(actual, expected, axes, valid, rtol, atol, equal_nan)

    def _result(
        self, pair: StepPair, asked: Sequence[TensorPair], found: Sequence[Found | ShapeMismatch]
    ) -> SiteResult | None:
        """Return what was found of a tensor, and keep its floor."""
        seen = []
        for each, measured in zip(asked, found, strict=True):
            if isinstance(measured, ShapeMismatch):
                self._found.missing.setdefault(pair.tap.site, str(measured))
                return None
            seen.append((each, measured))
        own, metrics = self._as_masks(pair, *seen[0])
        names = (*pair.names, pair.tap.value) if self._tolerance.rules else ()
        if names and (rules := self._tolerance.requests(names, self._step)):
            requested = measure_requested(rules, metrics.metrics, own.actual, own.expected, pair.valid)
            metrics.metrics = replace(metrics.metrics, requested=requested)
        if pair.noisy and metrics.metrics.count:
            samples, twice = seen[1 : 1 + len(pair.noisy)], seen[1 + len(pair.noisy) :]
            self._found.floor.setdefault(pair.tap.site, {})[self._step] = self._floor(pair, samples, twice)
        known = self.floor(pair.tap)
        return SiteResult.unjudged(
            step=self._step,
            site=pair.tap.site,
            order=pair.order,
            metrics=metrics.metrics,
            floor=None if known is None else known.rel_l2,
            final=pair.final,
            dtype=self._own_dtype(pair, own.actual, own.expected),
            row=row_of(own, metrics, known) if metrics.metrics.rel_l2 else None,
            element=None if known is None else known.max_abs,
            tied=pair.tied,
        )

    def floor(self, tap: Tap) -> Noise | None:
        """Return the noise floor of a tap in this step, None where it was not measured."""
        known = self._found.floor
        for name in (tap.site, OUTPUT + tap.value, tap.value) if known else ():
            if found := known.get(name):
                return found.get(self._step)
        return None

    def _as_masks(
        self, pair: StepPair, asked: TensorPair, found: Found, *, ruled: bool = True
    ) -> tuple[TensorPair, Found]:
        """Measure what two attention masks hide, and scores without what a mask hides, instead of their numbers."""
        if not may_hide(asked.expected, found.metrics):
            return asked, found
        actual, expected = as_masks(asked.actual, asked.expected)
        if expected is asked.expected:
            return asked, found
        again = self._with_bounds(pair, actual, expected, asked.axes, asked.valid, ruled=ruled)
        (measured,) = measure_all([again])
        return again, measured if isinstance(measured, Found) else found

    def _floor(
        self, pair: StepPair, samples: Sequence[tuple[TensorPair, Found]], twice: Sequence[tuple[TensorPair, Found]]
    ) -> Noise:
        """Return the reference's own error, as its samples show it; NaN where it is random, which its first two runs
        show."""
        for asked, found in twice:
            if not found.metrics.rel_l2 <= TABLE.get(name_of(asked.expected.dtype), 0.0):
                self._found.random.add(pair.tap.site)
        if pair.tap.site in self._found.random:
            return Noise(math.nan)
        return Noise.of_samples([self._noise(pair, *sample) for sample in samples])

    def _noise(self, pair: StepPair, asked: TensorPair, found: Found) -> Noise:
        own, seen = self._as_masks(pair, asked, found, ruled=False)
        if self._own_dtype(pair, own.actual, own.expected) in INTEGERS:
            return Noise(seen.metrics.mismatch_ratio)
        rows = seen.row_errors()
        # Three digits, so that a floor read from its file gives the same verdict.
        digits = () if rows is None else tuple(float(f"{error:.2e}") for error in rows.tolist())
        return Noise(seen.metrics.rel_l2, seen.metrics.max_abs, digits)

    def _own_dtype(self, pair: StepPair, actual: torch.Tensor, expected: torch.Tensor) -> str:
        """Return the dtype whose bounds are a tensor's own; see :func:`own_dtype`."""
        if pair.tap.dtype in INTEGERS:  # a dump may hold ids as floats
            return pair.tap.dtype
        return own_dtype(actual.dtype, expected.dtype, pair.expected.dtype, self._dtype)


def row_of(pair: TensorPair, found: Found, noise: Noise | None) -> RowError | None:
    """Return the row furthest beyond its floor; without floors small rows are measured against the usual row."""
    floors = np.array(noise.rows) if noise and noise.rows else None
    errors = found.row_errors(1.0 if floors is None else SMALL)
    if errors is None or (floors is not None and len(floors) != len(errors)):
        return None
    return worst_row(errors, floors, pair.expected.shape, pair.axes)


@lru_cache
def own_dtype(actual: torch.dtype, expected: torch.dtype, recorded: torch.dtype, engine: str) -> str:
    """Return the dtype whose bounds are a tensor's own: integers', and any where the engine's is not known; else empty.

    ``actual`` and ``expected`` are compared. A reference ``recorded`` in a coarser dtype than the ``engine``'s has its
    own rounding.
    """
    kind = name_of(judged_dtype(actual, expected))
    coarse = EPSILON.get(name_of(recorded), 0.0) > EPSILON.get(engine, math.inf)
    return kind if kind in INTEGERS or coarse or not engine else ""


def judged_dtype(actual: torch.dtype, expected: torch.dtype) -> torch.dtype:
    """Return the coarser dtype, or that of the side with integers: ids are ids though the other tool wrote them as
    floats. An 8-bit integer beside a float is a quantized number, and no id.
    """
    for one, other in ((actual, expected), (expected, actual)):
        if name_of(one) in INTEGERS and one.itemsize > 1 and other.is_floating_point:
            return one
    return coarser(actual, expected)


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without its prefix."""
    return str(dtype).removeprefix("torch.")
