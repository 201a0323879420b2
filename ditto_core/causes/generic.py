"""Causes that any site can have: residual additions, saturation, narrow formats, overflow, a constant factor."""

from __future__ import annotations

import torch

from ditto_core.causes.base import Evidence
from ditto_core.causes.kinds import Kind
from ditto_core.causes.linear import slope
from ditto_core.causes.naming import role_of
from ditto_core.compare.blame import Cause

NARROWER = {
    "float32": ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"),
    "float16": ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
    "bfloat16": ("float8_e4m3fn", "float8_e5m2"),
}
"""Formats that hold fewer values than an engine's dtype, the narrowest first."""


def residual(evidence: Evidence) -> Cause | None:
    """A sum of two captured tensors in which one has another weight than 1."""
    names = evidence.blame.inputs
    terms = [t for t in map(evidence.tensor, names) if t is not None and t.shape == evidence.actual.shape]
    if len(terms) != 2 or len(names) != 2 or not evidence.reproduces(terms[0] + terms[1]):
        return None
    columns = torch.stack([evidence.chosen(term) for term in terms], 1)
    if not (torch.isfinite(columns).all() and torch.isfinite(evidence.chosen(evidence.actual)).all()):
        return None
    found = torch.linalg.lstsq(columns, evidence.chosen(evidence.actual)[:, None]).solution.flatten().tolist()
    candidate = terms[0] * found[0] + terms[1] * found[1]
    if not evidence.explains(candidate):
        return None
    weights = dict(zip(names, found, strict=True))
    lost = [name for name, weight in weights.items() if abs(weight) < 1e-3]
    text = " + ".join(f"{weight:.4g} x {name}" for name, weight in weights.items())
    kind: Kind = "residual missing" if lost else "residual scaled"
    lines = [f"sum = {text}", *(f"{name} is not added" for name in lost)]
    return evidence.cause(kind, evidence.confidence(candidate), lines, "compare the addition in the engine's graph")


def overflow(evidence: Evidence) -> Cause | None:
    """Values beyond the dtype's range."""
    largest = {"float16": 65504.0}.get(evidence.dtype)
    if largest is None or not evidence.metrics.inf_actual or evidence.metrics.max_expected < largest:
        return None
    line = (
        f"{evidence.metrics.inf_actual} values are infinite; the largest should be {evidence.metrics.max_expected:.4g}"
    )
    return evidence.cause(
        "overflow", 0.95, [line], f"keep this operator in float32: {evidence.dtype} ends at {largest:.0f}"
    )


def saturated(evidence: Evidence) -> Cause | None:
    """Values are cut off at a bound that several of them share."""
    actual, expected = evidence.chosen(evidence.actual), evidence.chosen(evidence.expected)
    if not torch.isfinite(actual).all() or not len(actual):
        return None
    low, high = float(actual.min()), float(actual.max())
    if low == high or evidence.mask:
        return None
    room = evidence.blame.bound * max(abs(low), abs(high))
    cut_high, cut_low = int((expected > high + room).sum()), int((expected < low - room).sum())
    candidate = evidence.expected.clamp(low, high)
    at_high, at_low = int((actual == high).sum()), int((actual == low).sum())
    cut = " and ".join([f"above {high:.6g}"] * bool(cut_high) + [f"below {low:.6g}"] * bool(cut_low))
    shared = (cut_high == 0 or at_high >= cut_high) and (cut_low == 0 or at_low >= cut_low)
    if cut_high + cut_low == 0 or not shared or not evidence.explains(candidate):
        return None
    peak = float(expected.abs().max())
    line = f"{cut_high + cut_low} of {len(actual)} values are cut off {cut}; the largest magnitude should be {peak:.4g}"
    return evidence.cause(
        "saturation", evidence.confidence(candidate), [line], "calibrate with representative inputs, or widen the cast"
    )


def narrow_format(evidence: Evidence) -> Cause | None:
    """Every value is one that a narrower format holds: it was cast on the way."""
    actual = evidence.chosen(evidence.actual)
    if len(actual) < 64 or not torch.isfinite(actual).all() or bool((actual == actual.round()).all()):
        return None
    for name in NARROWER.get(evidence.dtype, ()):
        how = cast_to(evidence, getattr(torch, name))
        if how:
            line = f"every value is one that {name} holds: the tensor was {how} {name} and back"
            return evidence.cause(
                "narrow cast", 0.95, [line], "look for a cast in the engine's graph, or a precision flag"
            )
    return None


def cast_to(evidence: Evidence, dtype: torch.dtype) -> str:
    """Say how the right values become the engine's, all of which ``dtype`` holds; an empty string if they do not."""
    actual, expected = evidence.actual.float(), evidence.expected.float()
    held = evidence.chosen(actual.to(dtype).float() == actual)
    if not bool(held.all()):
        return ""
    nearest = expected.to(dtype).double()
    if evidence.explains(nearest, share=0.3):
        return "cast to"
    # the neighbour of a value towards zero is between 0.5 and 1 epsilons of it away, relatively
    inward = (nearest * (1 - 0.6 * torch.finfo(dtype).eps)).float().to(dtype).double()
    beyond = nearest.abs() > expected.double().abs()
    return "cut to" if evidence.explains(torch.where(beyond, inward, nearest), share=0.3) else ""


def constant_factor(evidence: Evidence) -> Cause | None:
    """One factor on everything; what a norm, a rotary table or scores are made of says more."""
    if role_of(evidence.site, evidence.root):
        return None
    factor = slope(evidence.chosen(evidence.actual), evidence.chosen(evidence.expected))
    candidate = evidence.expected * factor
    if not factor or abs(factor - 1) < 1e-9 or not evidence.explains(candidate):
        return None
    line = f"output = {factor:.6g} x expected, {evidence.distance(candidate):.1e} is left after that"
    kind: Kind = "sign" if abs(factor + 1) < 1e-3 else "constant factor"
    return evidence.cause(kind, 0.9, [line], "look for a scale in the engine's operator")


def all_zero(evidence: Evidence) -> Cause | None:
    """Nothing comes out. A mask of zeros shows every key."""
    if evidence.mask:
        return None
    if evidence.chosen(evidence.actual).any() or not evidence.chosen(evidence.expected).any():
        return None
    return evidence.cause("all zero", 0.8, ["the engine's tensor is zero everywhere"], "check the operator's inputs")


def not_finite(evidence: Evidence) -> Cause | None:
    """NaN or Inf from finite inputs."""
    bad = ~torch.isfinite(evidence.chosen(evidence.actual))
    if not bad.any() or not torch.isfinite(evidence.chosen(evidence.expected)).all():
        return None
    line = f"{int(bad.sum())} of {bad.numel()} values are NaN or Inf here first; everything upstream is finite"
    return evidence.cause("not finite", 0.6, [line], "check the operator's range in this dtype")


def displaced(evidence: Evidence) -> Cause | None:
    """The right values at another position or in another row."""
    if evidence.actual.ndim != 3 or not (evidence.valid is None or bool(evidence.valid.all())):
        return None
    axes: tuple[tuple[int, str, Kind], ...] = ((1, "position", "positions displaced"), (0, "row", "rows displaced"))
    for axis, name, kind in axes:
        for shift in (1, -1):
            if evidence.actual.shape[axis] > 1 and evidence.explains(evidence.expected.roll(shift, axis)):
                line = f"each {name} has what belongs to the {name} {'before' if shift > 0 else 'after'} it"
                return evidence.cause(kind, 0.9, [line], "check the gather or slice before this site")
    return None


RULES = (overflow, residual, saturated, narrow_format, displaced, constant_factor, all_zero, not_finite)
