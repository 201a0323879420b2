"""The KV cache: what the engine reads back is not what it wrote, or it wrote the wrong thing."""

from __future__ import annotations

import torch

from ditto_core.causes.base import Evidence, first_cause
from ditto_core.causes.generic import NARROWER
from ditto_core.causes.kinds import Kind
from ditto_core.causes.linear import slope
from ditto_core.compare.blame import Cause
from ditto_core.compare.tolerance import EPSILON

MOST_CODES = 256

COARSE = 2.0
"""Steps of a quantized cache that are so many times those of a fitting scale come from a wrong scale."""


def cache(evidence: Evidence) -> Cause | None:
    """Explain keys and values [batch, kv_head, total, dim]; other sites are ignored."""
    if evidence.tap.value.startswith("present."):
        return first_cause(evidence, RULES)
    return None


def before(evidence: Evidence) -> torch.Tensor | None:
    """Return what the engine had in this place of its cache before the step, [batch, kv_head, past, dim]."""
    past = evidence.past.get(evidence.site)
    return None if past is None or not past.shape[2] else past.double()


def real(evidence: Evidence, tensor: torch.Tensor) -> torch.Tensor:
    """Return the real tokens of the past as [token, …]."""
    mask = evidence.inputs["attention_mask"][:, : tensor.shape[2]].bool()
    return tensor.transpose(1, 2)[mask]


def close(evidence: Evidence, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two parts of the past are the same but for rounding."""
    x, y = real(evidence, a), real(evidence, b)
    return float((x - y).norm()) <= max(evidence.blame.bound, 1e-6) * float(y.norm())


def past_changed(evidence: Evidence) -> Cause | None:
    """The step sees another past than the one that the engine itself put out before."""
    past = before(evidence)
    if past is None:
        return None
    seen = evidence.actual[:, :, : past.shape[2]]
    if close(evidence, seen, past):
        return None
    return first_cause(evidence, PAST_RULES)


def past_scaled(evidence: Evidence) -> Cause | None:
    """The past comes back multiplied."""
    past = before(evidence)
    assert past is not None
    seen = evidence.actual[:, :, : past.shape[2]]
    factor = slope(real(evidence, seen), real(evidence, past))
    if not factor or not close(evidence, seen, past * factor):
        return None
    line = f"cached tokens come back multiplied by {factor:.6g}, new ones are right"
    return evidence.cause("KV cache scale", 0.97, [line], "check the scale of the KV cache (write and read must agree)")


def past_lost(evidence: Evidence) -> Cause | None:
    """The past comes back as zeros."""
    past = before(evidence)
    assert past is not None
    if real(evidence, evidence.actual[:, :, : past.shape[2]]).any():
        return None
    return evidence.cause(
        "KV cache lost", 0.97, ["all cached tokens come back as zeros"], "check how the cache is bound"
    )


def past_stale(evidence: Evidence) -> Cause | None:
    """Cached tokens are those of an earlier step, of another row or of another tensor."""
    past = before(evidence)
    assert past is not None
    length = past.shape[2]
    seen = evidence.actual[:, :, :length]
    if length > 1 and close(evidence, seen[:, :, 1:], past[:, :, :-1]):
        line = "cached tokens are shifted by one: each step reads the row before"
        return evidence.cause("stale KV cache", 0.95, [line], "check the write position of the cache")
    last = seen[:, :, -1] - past[:, :, -1]
    if (
        length > 1
        and not bool((last == 0).all())
        and float((seen[:, :, -1] - past[:, :, -2]).norm()) < 1e-6 * float(past.norm())
    ):
        line = "the last cached token is a copy of the one before it"
        return evidence.cause("stale KV cache", 0.95, [line], "run the same prompt cold, warm and without a cache")
    order = [row_of(evidence, seen, past, row) for row in range(past.shape[0])]
    if None not in order and order != list(range(past.shape[0])):
        line = f"the rows read the caches of the rows {order}"
        return evidence.cause("KV cache of another row", 0.97, [line], "check how cache blocks are assigned to rows")
    for site, other in evidence.past.items():
        if site != evidence.site and other.shape == past.shape and close(evidence, seen, other.double()):
            same = site.partition(":")[0] == evidence.site.partition(":")[0]
            kind: Kind = "keys and values exchanged" if same else "KV cache of another layer"
            line = f"the cached tokens are those of {site}"
            return evidence.cause(kind, 0.97, [line], "check the order of the cache tensors")
    return None


def row_of(evidence: Evidence, seen: torch.Tensor, past: torch.Tensor, row: int) -> int | None:
    """Return the row of the cache that a row of the batch reads, itself if it does; None when it is none."""
    real = evidence.inputs["attention_mask"][row, : past.shape[2]].bool()
    part = seen[row][:, real]
    errors = (past[:, :, real] - part).flatten(1).norm(dim=1)
    best = row if errors[row] == errors.min() else int(errors.argmin())
    return best if float(errors[best]) <= max(evidence.blame.bound, 1e-6) * float(part.norm()) else None


def past_cast(evidence: Evidence) -> Cause | None:
    """The past comes back rounded to a narrower format."""
    past = before(evidence)
    assert past is not None
    seen = evidence.actual[:, :, : past.shape[2]]
    for name in NARROWER.get(evidence.dtype, ()):
        rounded = past.float().to(getattr(torch, name)).double()
        if torch.equal(real(evidence, seen), real(evidence, rounded)):
            line = f"cached tokens come back rounded to {name}, new ones are right"
            return evidence.cause("narrow cast", 0.97, [line], "compare the dtype of the KV cache on both sides")
    return None


def quantized(evidence: Evidence) -> Cause | None:
    """All values lie on a coarse grid."""
    past = before(evidence)
    parts = [("cached", evidence.actual[:, :, : past.shape[2]], past)] if past is not None else []
    start = evidence.past_length
    parts.append(("new", evidence.actual[:, :, start:], evidence.expected[:, :, start:]))
    for name, seen, wanted in parts:
        grid = step_of(seen, EPSILON.get(evidence.dtype, EPSILON["float32"]))
        if grid is None or float((seen - wanted).norm()) < 1e-5 * float(wanted.norm()):
            continue
        peak = float(wanted.abs().max())
        codes = len(torch.unique((seen / grid).round()))
        rounded = (wanted / grid).round() * grid
        if float((seen - rounded).norm()) > 0.3 * float((seen - wanted).norm()):
            continue
        lines = [f"{name} values are multiples of {grid:.4g}: the cache uses {codes} of 256 codes"]
        lines.append(f"largest value {peak:.4g}; int8 with a fitting scale would use steps of {peak / 127:.2g}")
        kind: Kind = "quantized KV cache scale" if grid > COARSE * peak / 127 else "quantized KV cache"
        step = (
            "calibrate the scale of the KV cache; 1.0 is a default"
            if kind.endswith("scale")
            else "nothing, if intended"
        )
        return evidence.cause(kind, 0.95, lines, step)
    return None


def step_of(tensor: torch.Tensor, epsilon: float = EPSILON["float32"]) -> float | None:
    """Return the coarsest grid of at most :data:`MOST_CODES` steps that all values lie on, but for the rounding of a
    format with this ``epsilon``; None where there is none. A few values need not be neighbours on it.
    """
    values = torch.unique(tensor.abs())
    values = values[values > 0]
    if len(values) < 2 or len(values) > MOST_CODES:
        return None
    peak, most = values[-1], torch.arange(1, MOST_CODES + 1, dtype=values.dtype)
    ratio = values * most[:, None] / peak  # a row for each code that the largest value may have
    fits = ((ratio - ratio.round().clamp(min=1)).abs() <= 2 * epsilon * ratio).all(1)
    return float(peak / most[fits][0]) if bool(fits.any()) else None


def new_stale(evidence: Evidence) -> Cause | None:
    """The new token's entry repeats the last cached one."""
    past = before(evidence)
    if past is None or evidence.actual.shape[2] != past.shape[2] + 1:
        return None
    new, last = evidence.actual[:, :, -1], past[:, :, -1]
    if float((new - last).norm()) > 1e-5 * float(last.norm()):
        return None
    line = "the new token's entry repeats the last cached one"
    return evidence.cause("stale KV cache", 0.96, [line], "run the same prompt cold, warm and without a cache")


def new_scaled(evidence: Evidence) -> Cause | None:
    """New values are a multiple of the projection's output."""
    x = states(evidence)
    if x is None or evidence.port != "v_states":
        return None
    new = evidence.actual[:, :, -x.shape[2] :]
    factor = slope(new, x)
    if factor <= 0 or abs(factor - 1) < 1e-4 or float((new - x * factor).norm()) > 1e-5 * float(new.norm()):
        return None
    line = f"new values = {factor:.6g} x those of the projection"
    return evidence.cause("KV cache scale", 0.95, [line], "check the scale of the KV cache (write and read must agree)")


def states(evidence: Evidence) -> torch.Tensor | None:
    """Return the engine's queries, keys or values of the new tokens before rotation, [batch, head, length, dim].

    They are the output of the head's norm where the model has one, else of the projection.
    """
    base = evidence.site.partition(":")[0]
    letter = evidence.port[0]
    dim = evidence.actual.shape[-1]
    normed = evidence.tensor(f"{base}.{letter}_norm")
    if normed is not None and normed.ndim == 4:
        return normed if normed.shape[1] == evidence.actual.shape[1] else normed.transpose(1, 2)
    flat = evidence.tensor(f"{base}.{letter}_proj")
    if flat is None or flat.ndim != 3 or flat.shape[-1] % dim:
        return None
    return flat.reshape(*flat.shape[:2], -1, dim).transpose(1, 2)


PAST_RULES = (past_scaled, past_lost, past_cast, past_stale)
NEW_RULES = (new_stale, quantized, new_scaled)
RULES = (past_changed, *NEW_RULES)
