"""Metrics that are measured only where a rule asks for them: exact percentiles, moved places, and the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
import torch

from ditto_core.compare.bounds import METRIC_GROUP, METRICS, QUALITIES, REQUESTED, Rule
from ditto_core.compare.metrics import Metrics, measure
from ditto_core.errors import UsageError, first_line

FARTHEST = 256
"""Places over which an entry is looked for; beyond them it counts as absent."""


def measure_requested(
    rules: Iterable[Rule],
    metrics: Metrics,
    actual: torch.Tensor,
    expected: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> tuple[tuple[str, float], ...]:
    """Return ``(name, value)`` of what ``rules`` ask for beyond ``metrics``, which are those of the same two tensors.

    Elements where ``valid`` is False do not count: preparations and functions of the user's get the reference's values
    there on both sides. Raises :class:`UsageError` where such a function cannot be found or fails.
    """
    asked = {rule.requested: rule for rule in rules if rule.requested}
    if not asked:
        return ()
    expected = expected.to(actual.device)
    return tuple((name, value_of(rule, metrics, actual, expected, valid)) for name, rule in asked.items())


def value_of(
    rule: Rule, metrics: Metrics, actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None
) -> float:
    """Return the value that a rule bounds; its element-wise tolerance is its own, else that of ``metrics``."""
    rtol = metrics.rtol if rule.rtol is None else rule.rtol
    atol = metrics.atol if rule.atol is None else rule.atol
    if rule.prepare:
        actual, expected, valid = *prepared(rule, alike(actual, expected, valid), expected), None
        metrics = measure(actual, expected, rtol=rtol, atol=atol)
        if metrics.nonfinite_mismatch:
            return -math.inf if rule.at_least else math.inf
    if rule.metric in METRICS + QUALITIES:
        return float(getattr(metrics, rule.metric))
    found = REQUESTED.fullmatch(rule.metric)
    if found and found["kind"]:
        return percentile(errors(actual, expected, valid, found["kind"] == "rel"), float(found["percent"]))
    if rule.metric == "outside_both":
        return float(outside_both(actual, expected, valid, rtol, atol))
    actual = alike(actual, expected, valid)
    if rule.metric == "moved":
        return max(moved(actual, expected, rtol, atol), moved(expected, actual, rtol, atol))
    return number(rule.metric, called(rule, rule.metric, actual, expected))


def alike(actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return ``actual`` with the reference's values where the elements are not valid."""
    return actual if valid is None else torch.where(valid.to(actual.device), actual, expected.to(actual.dtype))


def errors(
    actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None, relative: bool
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return |d|, or |d| / |b| (0 for 0/0, inf for x/0), of the valid elements that are finite on both sides."""
    a, b = actual.double(), expected.double()
    there = a.isfinite() & b.isfinite()
    if valid is not None:
        there &= valid.to(there.device)
    d, size = (a - b).abs()[there], b.abs()[there]
    if relative:
        d = torch.where(d == 0, 0, d / size)
    found: np.ndarray[Any, np.dtype[np.float64]] = d.cpu().numpy()
    return found


def percentile(numbers: np.ndarray[Any, np.dtype[np.float64]], percent: float) -> float:
    """Return a percentile as ``numpy.percentile`` does, linear between ranks; 0 of nothing.

    Beside an infinite neighbour the line is not defined: the upper rank counts.
    """
    if not numbers.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        found = float(np.percentile(numbers, percent))
    return found if not math.isnan(found) else float(np.percentile(numbers, percent, method="higher"))


def outside_both(
    actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None, rtol: float, atol: float
) -> int:
    """Count the finite elements with |d| > atol and |d| > rtol |b|: Polygraphy passes one that is within either."""
    a, b = actual.double(), expected.double()
    outside = a.isfinite() & b.isfinite() & ((a - b).abs() > (rtol * b.abs()).clamp(min=atol))
    return int((outside if valid is None else outside & valid.to(outside.device)).sum())


def moved(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> float:
    """Return the largest number of places by which an entry of ``expected`` stands elsewhere in ``actual``.

    Entries are the integers of the last axis, or the rows of floats [..., entries, width], equal where every number is
    within atol + rtol |b|. One of n that is absent from place i has left the list, by n - i places at least; the first
    must not: infinity.
    """
    floats = actual.is_floating_point() or expected.is_floating_point()
    rows = floats and expected.dim() > 1
    count, width = (*expected.shape[-2:],) if rows else (expected.shape[-1] if expected.dim() else 1, 1)
    if not expected.numel():
        return 0.0
    a, b = (side.to(torch.float64 if floats else torch.int64).reshape(-1, count, width) for side in (actual, expected))
    far = torch.full(b.shape[:2], -1, dtype=torch.int64, device=b.device)
    for places in range(min(count, FARTHEST + 1)):
        late, early = slice(places, None), slice(None, count - places)
        for ours, theirs in ((late, early), (early, late)):
            part, due = far[:, theirs], b[:, theirs]
            near = (a[:, ours] - due).abs() <= atol + rtol * due.abs() if floats else a[:, ours] == due
            part[near.all(-1) & (part < 0)] = places
        if bool((far >= 0).all()):
            break
    if bool((far[:, 0] < 0).any()):
        return math.inf
    left = torch.arange(count, 0, -1, device=b.device).clamp(min=FARTHEST + 1 if count > FARTHEST + 1 else 0)
    return float(torch.where(far < 0, left, far).max())


def prepared(rule: Rule, actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors as the rule's preparation gives them back."""
    a, b = called(rule, rule.prepare, actual), called(rule, rule.prepare, expected)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        raise UsageError(
            f"{rule.prepare} gives {kind(a)} for the engine and {kind(b)} for the reference, expected "
            "tensors of one shape"
        )
    if not a.numel():
        raise UsageError(f"{rule.prepare} leaves no element of either side for {rule.selector!r}: nothing to judge")
    return a, b


def kind(value: Any) -> str:
    """Say what a value is."""
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def number(name: str, value: Any) -> float:
    """Return what a metric gave back as a number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"the metric {name} gives {kind(value)}, expected a number") from error


def called(rule: Rule, name: str, *tensors: torch.Tensor) -> Any:
    """Call a function of the user's. Raises :class:`UsageError` for one that raises."""
    function = rule.functions.get(name) or function_named(name)
    try:
        return function(*tensors)
    except Exception as error:
        raise UsageError(f"{name} raised {type(error).__name__} for {rule.selector!r}: {first_line(error)}") from error


def function_named(name: str) -> Callable[..., Any]:
    """Return the function of an entry point, or of ``package.module:function``. Raises :class:`UsageError`."""
    registered = {point.name: point for point in entry_points(group=METRIC_GROUP)}
    try:
        point = registered.get(name) or EntryPoint(name, name, METRIC_GROUP)
        found = point.load()
    except (ImportError, AttributeError, ValueError) as error:
        known = f" (registered: {', '.join(sorted(registered))})" if registered else ""
        raise UsageError(
            f"{name!r} is no function that can be imported: {first_line(error)}; expected 'package.module:function' or "
            f"an entry point of {METRIC_GROUP}{known}"
        ) from error
    if not callable(found):
        raise UsageError(f"{name!r} is a {type(found).__name__}, expected a function")
    return found  # type: ignore[no-any-return]
