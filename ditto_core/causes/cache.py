"""The KV cache: the engine reads back something else than it wrote, or values on a grid."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ditto_core.causes.confidence import confidence
from ditto_core.causes.evidence import Evidence, rel_l2, slope
from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import CASTS
from ditto_core.compare.blame import Cause
from ditto_core.compare.tolerance import EPSILON

SURE = confidence("cache")
MOST_CODES = 256

COARSE = 2.0
"""Steps of a quantized cache that are so many times those of a fitting scale come from a wrong scale."""

Past = tuple[Kind, str, torch.Tensor, str]
"""Kind, line, what the past would be, and what to do."""


def before(evidence: Evidence) -> torch.Tensor | None:
    """Return what the engine had in this place of its cache before the step, [batch, kv_head, past, dim]."""
    past = evidence.past.get(evidence.site)
    return None if past is None or not past.shape[2] else past.double()


def read_back(evidence: Evidence) -> Cause | None:
    """The step sees another past than the one that the engine itself put out before."""
    past = before(evidence)
    if past is None:
        return None
    seen = evidence.actual[:, :, : past.shape[2]]
    if close(evidence, seen, past):
        return None
    found = (p for p in pasts(evidence, seen, past) if close(evidence, seen, p[2]))
    kind, line, _, step = next(found, ("", "", seen, ""))
    return evidence.cause(kind, SURE, [line], step) if kind else None


def close(evidence: Evidence, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two pasts are the same but for rounding, padding left out."""
    mask = evidence.inputs["attention_mask"][:, : a.shape[2]].bool()
    x, y = a.transpose(1, 2)[mask], b.transpose(1, 2)[mask]
    return float((x - y).norm()) <= max(evidence.bound, 1e-6) * float(y.norm())


def pasts(evidence: Evidence, seen: torch.Tensor, past: torch.Tensor) -> Iterator[Past]:
    """Yield what could have become of the past."""
    mask = evidence.inputs["attention_mask"][:, : past.shape[2]].bool()
    real = [side.transpose(1, 2)[mask] for side in (seen, past)]
    factor, bind = slope(*real), "check the scale of the KV cache (write and read must agree)"
    if not real[0].any():
        yield "KV cache lost", "all cached tokens come back as zeros", past * 0, "check how the cache is bound"
    elif factor:
        line = f"cached tokens come back multiplied by {factor:.6g}, new ones are right"
        yield "KV cache scale", line, past * factor, bind
    for dtype in CASTS[::-1]:
        rounded = past.float().to(dtype).double()
        if torch.equal(real[0], rounded.transpose(1, 2)[mask]):
            line = f"cached tokens come back rounded to {str(dtype).removeprefix('torch.')}, new ones are right"
            yield "narrow cast", line, rounded, "compare the dtype of the KV cache on both sides"
    if past.shape[2] > 1:
        if close(evidence, seen[:, :, 1:], past[:, :, :-1]):
            line = "cached tokens are shifted by one: each step reads the row before"
            yield "stale KV cache", line, seen, "check the write position of the cache"
        twice = torch.cat([past[:, :, :-1], past[:, :, -2:-1]], 2)
        if float((seen - twice).norm()) < 1e-6 * float(past.norm()):
            line = "the last cached token is a copy of the one before it"
            yield "stale KV cache", line, twice, "run the same prompt cold, warm and without a cache"
    order = [nearest(seen[row][:, mask[row]], past[:, :, mask[row]], row) for row in range(len(past))]
    line = f"the rows read the caches of the rows {order}"
    yield "KV cache of another row", line, past[order], "check how cache blocks are assigned to rows"
    for site, other in evidence.past.items():
        if site != evidence.site and other.shape == past.shape:
            same = site.partition(":")[0] == evidence.site.partition(":")[0]
            kind = "keys and values exchanged" if same else "KV cache of another layer"
            yield kind, f"the cached tokens are those of {site}", other.double(), "check the order of the cache tensors"


def nearest(part: torch.Tensor, past: torch.Tensor, row: int) -> int:
    """Return the row of the cache that a row of the batch reads: itself if none is nearer."""
    errors = (past - part).flatten(1).norm(dim=1)
    return row if errors[row] == errors.min() else int(errors.argmin())


def repeated(evidence: Evidence) -> Cause | None:
    """The new token's entry repeats the last cached one, and should not: two tokens of one id may have one value."""
    past = before(evidence)
    if past is None or evidence.actual.shape[2] != past.shape[2] + 1:
        return None
    new, last, wanted = evidence.actual[:, :, -1], past[:, :, -1], evidence.expected[:, :, -1]
    if float((new - last).norm()) > 1e-5 * float(last.norm()) or rel_l2(new, wanted) <= evidence.bound:
        return None
    line = "the new token's entry repeats the last cached one"
    return evidence.cause("stale KV cache", SURE, [line], "run the same prompt cold, warm and without a cache")


def quantized(evidence: Evidence) -> Cause | None:
    """All values lie on a coarse grid."""
    if not evidence.cached:
        return None
    past, start = before(evidence), evidence.past_length
    parts = [("cached", evidence.actual[:, :, : past.shape[2]], past)] if past is not None else []
    for name, seen, wanted in (*parts, ("new", evidence.actual[:, :, start:], evidence.expected[:, :, start:])):
        grid = step_of(seen, EPSILON.get(evidence.dtype, EPSILON["float32"]))
        error = float((seen - wanted).norm())
        if grid is None or error < 1e-5 * float(wanted.norm()):
            continue
        if float((seen - (wanted / grid).round() * grid).norm()) > 0.3 * error:
            continue
        peak, codes = float(wanted.abs().max()), len(torch.unique((seen / grid).round()))
        lines = [f"{name} values are multiples of {grid:.4g}: the cache uses {codes} of 256 codes"]
        lines.append(f"largest value {peak:.4g}; int8 with a fitting scale would use steps of {peak / 127:.2g}")
        if grid > COARSE * peak / 127:
            step = "calibrate the scale of the KV cache; 1.0 is a default"
            return evidence.cause("quantized KV cache scale", SURE, lines, step)
        return evidence.cause("quantized KV cache", SURE, lines, "nothing, if intended")
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
