"""Measure the local error of every tap during a lockstep run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ditto_core.backends.eager import HIGHER
from ditto_core.causes.evidence import rel_l2
from ditto_core.compare.blame import LocalResult
from ditto_core.compare.masks import as_masks, is_mask
from ditto_core.compare.metrics import Metrics, ShapeMismatch, measure
from ditto_core.compare.packed import TensorPair, measure_all
from ditto_core.compare.tolerance import EPSILON, widened
from ditto_core.errors import first_line
from ditto_core.localize.kernels import CoarseKernels
from ditto_core.localize.replay import Replay
from ditto_core.model.loading import LoadedModel
from ditto_core.model.states import state_of
from ditto_core.sites import Tap
from ditto_core.stepping.choices import in_order
from ditto_core.stepping.prompts import valid_elements

FACTORS: Mapping[str, float] = {"float64": 6.0, "float32": 6.0, "float16": 4.0, "bfloat16": 4.0}
"""Multiple of the local noise floor from which a site is flagged, by dtype; measured in ``benchmarks/localize.md``."""

SMALLEST = 0.5
"""The floor is at least this share of the dtype's epsilon: where eager happens to be exact, an engine need not be."""


@dataclass(frozen=True)
class Kept:
    """One of the first steps, healthy or not: what it can be replayed from.

    ``actual`` holds all taps of the engine by site, in the engine's dtype.
    """

    step: int
    inputs: Mapping[str, torch.Tensor]
    actual: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Capture(Kept):
    """A step that shows a fault: what the replay ``expected`` at the flagged sites, and the cache before."""

    expected: Mapping[str, torch.Tensor]
    previous: Mapping[str, torch.Tensor]


KEPT = 3
"""Steps that are kept whole: the prefill and two of decoding show where a fault begins and whether it lasts."""

LARGEST = 1 << 30
"""Bytes up to which they are kept."""


class Localizer:
    """Takes the engine's taps of each step from the lockstep run, before they are dropped.

    The noise floor is measured on the engine's own tensors at the first two steps, prefill and decode; later steps use
    the second. Tensors are kept for the first ``keep`` steps that have something flagged, for the causes. ``kernels``
    tells what the engine's kernels explain, ``parallel`` that it runs on several ranks.
    """

    def __init__(
        self,
        model: LoadedModel,
        taps: Sequence[Tap],
        dtype: str,
        *,
        kernels: CoarseKernels | None = None,
        factor: float | None = None,
        keep: int = 2,
        parallel: bool = False,
    ) -> None:
        self.taps = tuple(taps)
        self.parallel = parallel
        self.model = model
        self.dtype = dtype
        self._kernels = kernels
        self.factor = FACTORS[dtype] if factor is None else factor
        self.truth = Replay(model, self.taps, engine_dtype=dtype, dtype=HIGHER[dtype])
        self._noisy = Replay(model, self.taps, engine_dtype=dtype, dtype=dtype)
        self._order = {tap.site: i for i, tap in enumerate(self.taps)}
        self._keep = keep
        self._past: dict[str, torch.Tensor] = {}
        self.results: list[LocalResult] = []
        self.captures: list[Capture] = []
        self.kept: list[Kept] = []
        self._floors: dict[str, float] = {}
        self.failure = ""
        """Why no step from some step on was measured; empty if all were."""

    def start(self) -> None:
        """Begin a new sequence."""
        self.results.clear()
        self.captures.clear()
        self.kept.clear()
        self._past.clear()
        self._floors.clear()
        self.failure = ""
        for replay in (self.truth, self._noisy):
            replay.start()

    def take(self, step: int, inputs: Mapping[str, torch.Tensor], captured: Mapping[str, torch.Tensor]) -> None:
        """Measure one step: its ``inputs``, and the engine's taps by site, which are only read.

        The model is replayed on the CPU: taps that lie on a GPU are copied there. What fails here does not end the run,
        whose verdict does not depend on it: :attr:`failure` says why, and later steps are not measured.
        """
        if self.failure:
            return
        try:
            self._take(step, inputs, captured)
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever a model does on these tensors
            self.failure = f"not localized from step {step} on: {type(error).__name__}: {first_line(error)}"

    def _take(self, step: int, inputs: Mapping[str, torch.Tensor], captured: Mapping[str, torch.Tensor]) -> None:
        inputs, captured = on_host(inputs), on_host(captured)
        valid = Valid(inputs)
        values: dict[str, torch.Tensor] = {}
        self.truth.step(inputs, captured, lambda tap, tensor: values.update({tap.site: tensor.clone()}))
        floors = self._floor(step, inputs, captured, values, valid)
        taps = [tap for tap in self.taps if tap.site in values]
        measured = errors([pair_of(captured[tap.site], values[tap.site], tap, valid) for tap in taps])
        found = [self._judge(step, tap, metrics, floors) for tap, metrics in zip(taps, measured, strict=True)]
        self.results += found
        self._keep_whole(step, inputs, captured)
        if any(result.flagged for result in found) and len(self.captures) < self._keep:
            self._capture(step, inputs, captured, {r.site: values[r.site] for r in found if r.flagged})
        self._past = {
            tap.site: captured[tap.site].clone() for tap in self.taps if is_cache(tap) and tap.site in captured
        }

    def _floor(
        self,
        step: int,
        inputs: Mapping[str, torch.Tensor],
        captured: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
        valid: Valid,
    ) -> Mapping[str, float]:
        if step > 1:
            return self._floors
        floors: dict[str, float] = {}

        def compare(tap: Tap, tensor: torch.Tensor) -> None:
            if tap.site in values and not is_mask(tensor):
                floors[tap.site] = rel_error(tensor, values[tap.site], tap, valid)

        self._noisy.step(inputs, captured, compare)
        self._floors = floors
        return floors

    def _judge(self, step: int, tap: Tap, metrics: Metrics, floors: Mapping[str, float]) -> LocalResult:
        measured = floors.get(tap.site, 0.0)
        # An overflow of eager itself in the engine's dtype is no licence for the engine.
        floor = max(measured if measured < 1 else 0.0, SMALLEST * EPSILON[self.dtype])
        factor = widened(self.factor, metrics.count)
        result = LocalResult(step, tap.site, self._order[tap.site], metrics, floor, factor * floor)
        if self._kernels is None or not result.flagged:
            return result
        why = self._kernels.explain(step, tap.site, metrics.rel_l2, floor, factor)
        return replace(result, explained=why)

    def _keep_whole(self, step: int, inputs: Mapping[str, torch.Tensor], captured: Mapping[str, torch.Tensor]) -> None:
        """Keep one of the first steps, in an unbroken row from the first one on, as far as the memory goes."""
        size = sum(t.nbytes for t in captured.values()) + sum(t.nbytes for k in self.kept for t in k.actual.values())
        if step < KEPT and len(self.kept) == step and size <= LARGEST:
            self.kept.append(Kept(step, dict(inputs), {site: t.clone() for site, t in captured.items()}))

    def _capture(
        self,
        step: int,
        inputs: Mapping[str, torch.Tensor],
        captured: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
    ) -> None:
        held = self.kept[-1].actual if self.kept and self.kept[-1].step == step else None
        actual = {site: tensor.clone() for site, tensor in captured.items()} if held is None else held
        self.captures.append(Capture(step, dict(inputs), actual, dict(expected), dict(self._past)))


class Valid:
    """Which elements of a step's tensors belong to real tokens."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self._mask = inputs.get("attention_mask")
        self._length = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0

    def of(self, tap: Tap) -> torch.Tensor | None:
        """Return a mask that broadcasts to the tap, or None when everything counts."""
        return None if self._mask is None else valid_elements(tap.axes, self._mask, self._length)


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors on the CPU; tensors already there are not copied."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def pair_of(actual: torch.Tensor, expected: torch.Tensor, tap: Tap, valid: Valid) -> TensorPair:
    """Return what is measured of a tap; a mask is compared as what it masks, and a NaN on both sides came in from
    upstream."""
    actual, expected = as_masks(in_order(actual, expected, tap.axes), expected)
    chosen = valid.of(tap)
    if chosen is not None and bool(torch.isnan(actual).any()) and not bool(torch.isnan(expected).any()):
        # A NaN in padding does count: 0 x NaN carries it to real tokens in the next layer.
        chosen = None
    return TensorPair(actual, expected, tap.axes, chosen, None, None, equal_nan=True)


def errors(pairs: Sequence[TensorPair]) -> Iterator[Metrics]:
    """Measure pairs, in their order."""
    for pair, found in zip(pairs, measure_all(pairs), strict=True):
        if isinstance(found, ShapeMismatch):
            raise found
        yield found.metrics if math.isfinite(found.metrics.rel_l2) else error_of_finite(pair, found.metrics)


def error_of_finite(pair: TensorPair, metrics: Metrics) -> Metrics:
    """Measure a pair without the rows that are not finite on the right side, if there are any.

    ONNX Runtime's CPU provider shows Inf at a float16 tap and goes on with the float32 value behind it: a row that the
    replay of what was shown makes not finite says nothing about this site.
    """
    seen = torch.isfinite(pair.expected).all(-1, keepdim=True)
    if bool(seen.all()):
        return metrics
    valid = seen if pair.valid is None else pair.valid & seen
    return measure(pair.actual, pair.expected, axes=pair.axes, valid=valid, equal_nan=True)


def rel_error(actual: torch.Tensor, expected: torch.Tensor, tap: Tap, valid: Valid) -> float:
    """Return the rel-L2 of :func:`errors`, at a fraction of the cost where all numbers are finite."""
    if actual.shape == expected.shape and bool(torch.isfinite(actual).all()):
        chosen = valid.of(tap)
        sides = (side.double() for side in as_masks(in_order(actual, expected, tap.axes), expected))
        found = rel_l2(*(side if chosen is None else side[chosen.expand(side.shape)] for side in sides))
        if math.isfinite(found):
            return found
    return next(errors([pair_of(actual, expected, tap, valid)])).rel_l2


def is_cache(tap: Tap) -> bool:
    """Tell whether a tap is a tensor of the KV cache."""
    return bool(state_of(tap.value))
