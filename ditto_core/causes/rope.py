"""Rotary embedding: the frequencies and the positions that the engine uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ditto_core.causes.base import Evidence, first_cause, parameter
from ditto_core.compare.blame import Cause

FARTHEST = 64
"""Offset of the positions up to which it is searched."""

LONGEST = 4096
"""Tokens before the last among which the end of the positions is searched."""

BASES = (1e3, 1e4, 1e5, 5e5, 1e6, 1e7)


def rope(evidence: Evidence) -> Cause | None:
    """Explain cosines and sines; other sites are ignored."""
    return first_cause(evidence, RULES) if is_table(evidence) else None


def is_table(evidence: Evidence) -> bool:
    """Tell whether the site is the cosine or sine output of a rotary embedding module."""
    return hasattr(evidence.module, own_name(evidence)) and evidence.port in ("", "out.1") and evidence.actual.ndim == 3


def own_name(evidence: Evidence) -> str:
    """Return the name of the module's frequencies; if there are several, the call's text decides."""
    word = evidence.site.partition(":")[0].partition("@")[2]
    name = f"{word}_inv_freq"
    return name if hasattr(evidence.module, name) else "inv_freq"


def tables(evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the engine's cosine and sine [batch, length, dim]."""
    base = evidence.site.partition(":")[0]
    cos, sin = evidence.tensor(base), evidence.tensor(f"{base}:out.1")
    return None if cos is None or sin is None else (cos, sin)


def frequencies(evidence: Evidence) -> Cause | None:
    """The engine's frequencies, read off a row at position 1, against the model's."""
    found, place = tables(evidence), position_one(evidence)
    if found is None or place is None:
        return None
    half = found[0].shape[-1] // 2
    engine = torch.atan2(found[1][place][:half], found[0][place][:half])
    own = own_frequencies(evidence)
    if own is None or len(own) != half or bool((engine <= 0).any()):
        return None
    ratio = engine / own
    if float((ratio - 1).abs().max()) < 1e-5:
        return None
    rounded = cast_frequencies(evidence, own)
    if rounded is not None:
        return rounded
    if not evidence.explains(table(evidence, engine)):
        return None
    return describe(evidence, engine, own, ratio)


def cast_frequencies(evidence: Evidence, own: torch.Tensor) -> Cause | None:
    """The model's frequencies, rounded to a narrower format, as casting the whole model does with its buffers."""
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        candidate = table(evidence, own.to(dtype).double())
        if evidence.explains(candidate):
            line = f"the rotary frequencies are those of the model, rounded to {name}"
            step = "keep inv_freq in float32 when the model is cast"
            return evidence.cause("narrow cast", evidence.confidence(candidate), [line], step)
    return None


def own_frequencies(evidence: Evidence) -> torch.Tensor | None:
    """Return the model's frequencies [dim / 2], radians a token: its buffer, or where its table is made otherwise
    (scaling that depends on the length), the angles of the table at position 1."""
    inverse = parameter(evidence.module, own_name(evidence))
    if inverse is not None and evidence.distance_between(table(evidence, inverse), evidence.expected) <= 1e-6:
        return inverse
    place = position_one(evidence)
    expected = evidence.expected[place][: evidence.expected.shape[-1] // 2] if place is not None else None
    scale = float(getattr(evidence.module, "attention_scaling", 1.0) or 1.0)
    if expected is None:
        return None
    ratio = (expected / scale).clamp(-1, 1)
    return torch.arcsin(ratio) if evidence.port == "out.1" else torch.arccos(ratio)


def position_one(evidence: Evidence) -> tuple[int, int] | None:
    """Return a (row, column) of the step whose position is 1."""
    positions = evidence.inputs.get("position_ids")
    if positions is None or not bool((positions == 1).any()):
        return None
    row, column = (positions == 1).nonzero()[0].tolist()
    return int(row), int(column)


def describe(evidence: Evidence, engine: torch.Tensor, own: torch.Tensor, ratio: torch.Tensor) -> Cause | None:
    """Name what relates two sets of frequencies."""
    where = "error 0 at position 0, growing with the position"
    parameters = own_parameters(evidence)
    theta = parameters.get("rope_theta") or getattr(evidence.config, "rope_theta", None) or 1e4
    exponents = torch.arange(len(own), dtype=torch.float64) / len(own)
    fitted = fit_base(engine, exponents)
    unscaled = table(evidence, torch.tensor(theta, dtype=torch.float64) ** -exponents)
    if evidence.explains(unscaled) and not is_base(fit_base(own, exponents), theta):
        kind = str(parameters.get("rope_type", "scaling"))
        line = f"the engine's frequencies are the unscaled ones of base {theta:g}; the model applies {kind!r} scaling"
        return evidence.cause("RoPE scaling ignored", 0.98, [line, where], "export rope_scaling, or compare its values")
    if evidence.explains(table(evidence, own * ratio.mean())):
        factor = 1 / float(ratio.mean())
        line = f"all frequencies are divided by {factor:.6g}"
        return evidence.cause("RoPE scaling factor", 0.97, [line, where], "compare rope_scaling's factor on both sides")
    if fitted is not None and evidence.explains(table(evidence, fitted**-exponents)):
        near = min(BASES, key=lambda base: abs(math.log(base / fitted)))
        shown = near if abs(near / fitted - 1) < 0.02 and near != theta else fitted
        line = f"the engine's frequencies have the base {shown:.6g}, the model's {theta:g}"
        return evidence.cause("RoPE base", 0.97, [line, where], "compare rope_theta on both sides")
    changed = ((ratio - 1).abs() > 1e-4).nonzero().flatten().tolist()
    line = (
        f"{len(changed)} of {len(ratio)} frequencies differ (from number {changed[0]}), "
        f"by factors {float(ratio[changed].min()):.4g} to {float(ratio[changed].max()):.4g}"
    )
    return evidence.cause("RoPE scaling differs", 0.85, [line, where], "compare rope_scaling's parameters")


def is_base(fitted: float | None, theta: float) -> bool:
    """Tell whether a fitted base is ``theta``."""
    return fitted is not None and abs(fitted / theta - 1) < 1e-3


def own_parameters(evidence: Evidence) -> Mapping[str, Any]:
    """Return the site's rotary parameters; if each layer type has its own set, the call's text decides."""
    config = evidence.config
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = {name: value for name, value in found.items() if isinstance(value, dict)}
    word = evidence.site.partition(":")[0].partition("@")[2]
    return nested.get(word) or next(iter(nested.values()), found)


def fit_base(frequency: torch.Tensor, exponents: torch.Tensor) -> float | None:
    """Return theta when frequency = theta ** -exponent for every entry, else None."""
    logs = frequency.log()
    slope = float((logs * exponents).sum() / exponents.square().sum())
    if float((logs - slope * exponents).abs().max()) > 2e-3:
        return None
    return math.exp(-slope)


def shifted(evidence: Evidence) -> Cause | None:
    """The right table at other positions."""
    found, positions = tables(evidence), evidence.inputs.get("position_ids")
    inverse = parameter(evidence.module, own_name(evidence))
    if found is None or positions is None or inverse is None or not evidence.reproduces(table(evidence, inverse)):
        return None
    mask = evidence.inputs["attention_mask"]
    plain = torch.arange(evidence.past_length, mask.shape[1]).expand_as(positions)[:, -positions.shape[1] :]
    if not mask.bool().all() and evidence.explains(table(evidence, inverse, plain)):
        bad = (~mask.bool().all(1)).nonzero().flatten().tolist()
        line = f"positions count padding: only the padded rows {bad} are wrong"
        return evidence.cause("padding positions", 0.97, [line], "pass position_ids made from the attention mask")
    for offset in (-evidence.past_length, *sorted(range(-FARTHEST, FARTHEST + 1), key=abs)):
        if offset and evidence.explains(table(evidence, inverse, (positions + offset).clamp(min=0))):
            line = f"every position is off by {offset:+d}"
            return evidence.cause("positions shifted", 0.97, [line], "check where the engine starts to count")
    return bounded(evidence, inverse, positions)


def bounded(evidence: Evidence, inverse: torch.Tensor, positions: torch.Tensor) -> Cause | None:
    """Positions end before the last token's."""
    real = positions[evidence.inputs["attention_mask"].bool()[:, -positions.shape[1] :]]
    for last in range(max(int(real.min()) + 1, int(real.max()) - LONGEST), int(real.max())):
        if evidence.explains(table(evidence, inverse, positions.clamp(max=last))):
            line = f"positions end at {last}: all later tokens have that one"
            return evidence.cause("positions bounded", 0.95, [line], "compare the longest position on both sides")
    return None


def table(
    evidence: Evidence,
    frequency: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    sine: bool | None = None,
) -> torch.Tensor:
    """Return a cosine or sine table of frequencies [dim / 2], at the step's positions or at others.

    ``sine`` None: whichever the site is.
    """
    where = evidence.inputs["position_ids"] if positions is None else positions
    angles = where.double()[..., None] * frequency
    both = torch.cat([angles, angles], -1)
    scale = float(getattr(evidence.module, "attention_scaling", 1.0) or 1.0)
    wanted = evidence.port == "out.1" if sine is None else sine
    return (both.sin() if wanted else both.cos()) * scale


RULES = (shifted, frequencies)
