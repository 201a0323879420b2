"""Normalization layers: epsilon, weight offset, mean subtraction, overflow."""

from __future__ import annotations

import torch
from torch import nn

from ditto_core.causes.base import Evidence, first_cause, parameter
from ditto_core.causes.kinds import Kind
from ditto_core.causes.linear import rows, slope
from ditto_core.compare.blame import Cause

LARGEST_HALF = 65504.0


def norm(evidence: Evidence) -> Cause | None:
    """Explain a LayerNorm's or RMSNorm's output from its captured input; other sites are ignored."""
    if evidence.port or not is_norm(evidence.module):
        return None
    given, weight = layer_input(evidence), parameter(evidence.module, "weight")
    if given is None or weight is None or given.shape[-1] != weight.shape[0]:
        return None
    if not evidence.reproduces(own(evidence)):
        return None
    return first_cause(evidence, RULES)


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module normalizes over its last dimension. Norms of channels do not."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase):
        return False
    return "Norm" in type(module).__name__ and isinstance(weight, torch.Tensor) and weight.ndim == 1


def layer_input(evidence: Evidence) -> torch.Tensor | None:
    """Return the captured input."""
    return evidence.tensor(f"{evidence.site}:in")


def parts(evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return the input, its weight, its bias (zeros if it has none) and epsilon, as the formula has them.

    The effective weight is read off the module's own output, so that ``1 + w`` needs no special case.
    """
    x, module = layer_input(evidence), evidence.module
    assert x is not None
    weight, bias = parameter(module, "weight"), parameter(module, "bias")
    assert weight is not None
    bias = torch.zeros_like(weight) if bias is None else bias
    return x, weight, bias, epsilon_of(module)


def own(evidence: Evidence) -> torch.Tensor | None:
    """Return what the formula of these rules gives for the captured input; None where it does not fit the shapes."""
    x, weight = layer_input(evidence), parameter(evidence.module, "weight")
    if x is None or weight is None or x.shape[-1:] != weight.shape or x.shape != evidence.expected.shape:
        return None
    x, weight, bias, eps = parts(evidence)
    return normalized(x, eps, mean=centred(evidence)) * (weight + offset(evidence)) + bias


def epsilon_of(module: nn.Module) -> float:
    """Return the module's epsilon under whatever name it has."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return 0.0


def centred(evidence: Evidence) -> bool:
    """Tell whether the module subtracts the mean."""
    return "RMS" not in type(evidence.module).__name__ and isinstance(
        getattr(evidence.module, "bias", None), torch.Tensor
    )


def normalized(x: torch.Tensor, eps: float, *, mean: bool) -> torch.Tensor:
    """Return x, less its mean where wanted, divided by the root of its mean square plus epsilon."""
    base = x - x.mean(-1, keepdim=True) if mean else x
    return base / (base.square().mean(-1, keepdim=True) + eps).sqrt()


def offset(evidence: Evidence) -> float:
    """Return 1 for a norm that multiplies by ``1 + w``, else 0."""
    x, weight, bias, eps = parts(evidence)
    unit = normalized(x, eps, mean=centred(evidence))
    plain = evidence.distance_between(unit * weight + bias, evidence.expected)
    shifted = evidence.distance_between(unit * (1 + weight) + bias, evidence.expected)
    return 1.0 if shifted < plain else 0.0


def overflow(evidence: Evidence) -> Cause | None:
    """The sum of squares does not fit float16, and x / sqrt(inf) is zero."""
    x = layer_input(evidence)
    assert x is not None
    bias = parts(evidence)[2]
    actual, squares = rows(evidence, evidence.actual), rows(evidence, x).square()
    gone = ((actual == bias).all(-1) | ~torch.isfinite(actual).all(-1)) & (squares.sum(-1) > 0)
    if not gone.any() or float(squares[gone].sum(-1).min()) < LARGEST_HALF:
        return None
    total, peak = float(squares[gone].sum(-1).max()), float(rows(evidence, x)[gone].abs().max())
    single = "; one square alone is too large" if peak * peak > LARGEST_HALF else ""
    line = (
        f"the output of {int(gone.sum())} tokens is zero or not finite; "
        f"max |x| = {peak:.4g}, sum x^2 = {total:.4g} > {LARGEST_HALF:.0f}, float16's largest{single}"
    )
    return evidence.cause("norm overflow", 0.97, [line], "keep this norm (its square and its sum) in float32")


def epsilon(evidence: Evidence) -> Cause | None:
    """One other epsilon explains every token."""
    x, weight, bias, eps = parts(evidence)
    weight = weight + offset(evidence)
    base = x - x.mean(-1, keepdim=True) if centred(evidence) else x
    variance = base.square().mean(-1)
    y, z = evidence.actual - bias, base * weight
    gain = (y * z).sum(-1) / z.square().sum(-1).clamp(min=1e-300)
    found = rows(evidence, (gain.clamp(min=1e-300) ** -2 - variance).unsqueeze(-1)).flatten()
    weights = rows(evidence, variance.unsqueeze(-1)).flatten().clamp(min=1e-300) ** -2
    other = float((found * weights).sum() / weights.sum())
    if (other < 0 and abs(other) > 0.5 * eps) or abs(other - eps) < 0.02 * eps:
        return None
    other = max(other, 0.0)
    candidate = base * weight / (variance.unsqueeze(-1) + other).sqrt() + bias
    if not evidence.explains(candidate) or evidence.explains(by_factor(evidence)[1]):
        return None
    text = "0 (it is missing)" if other < 0.05 * eps else f"about {other:.2g}"
    line = f"an epsilon of {text} explains the output; the model has {eps:.2g}"
    return evidence.cause("norm epsilon", evidence.confidence(candidate), [line], "compare the epsilon in the engine")


def outside(evidence: Evidence) -> Cause | None:
    """One epsilon, added to the root of the mean square rather than under it, explains every token."""
    x, weight, bias, eps = parts(evidence)
    base = x - x.mean(-1, keepdim=True) if centred(evidence) else x
    z = base * (weight + offset(evidence))
    size = base.square().mean(-1, keepdim=True).sqrt()
    inverse = (evidence.actual - bias).mul(z).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True).clamp(min=1e-300)
    found, sizes = rows(evidence, inverse.clamp(min=1e-300).reciprocal() - size), rows(evidence, size)
    weights = sizes.clamp(min=1e-300) ** -2
    other = float((found * weights).sum() / weights.sum())
    candidate = z / (size + other) + bias
    if other <= 0 or not evidence.explains(candidate) or evidence.explains(by_factor(evidence)[1]):
        return None
    line = (
        f"an epsilon of about {other:.2g} added outside the root explains the output; the model adds {eps:.2g} under it"
    )
    return evidence.cause("norm epsilon", evidence.confidence(candidate), [line], "compare the epsilon in the engine")


def variant(evidence: Evidence) -> Cause | None:
    """A near relative of the norm explains the output."""
    x, weight, bias, eps = parts(evidence)
    mean, one = centred(evidence), offset(evidence)
    unit, other = normalized(x, eps, mean=mean), normalized(x, eps, mean=not mean)
    own = weight + one
    mean_text = ("subtracts no mean", "RMSNorm") if mean else ("subtracts the mean", "LayerNorm")
    variants: tuple[tuple[Kind, torch.Tensor, str], ...] = (
        ("norm weight offset", unit * (weight + 1 - one) + bias, f"it multiplies by {'w' if one else '1 + w'}"),
        ("norm weight ignored", unit + bias, "it does not multiply by the weight"),
        ("norm kind", other * own + bias, f"it {mean_text[0]}, as {mean_text[1]} does"),
        ("norm missing", x, "it passes its input on"),
        ("bias missing", unit * own, "it does not add the bias"),
        ("norm missing", x * own + bias, "it does not normalize, it only multiplies by the weight"),
    )
    for kind, candidate, text in variants:
        if evidence.explains(candidate):
            return evidence.cause(
                kind, evidence.confidence(candidate), [text], "compare the norm's formula in the engine"
            )
    return None


def by_factor(evidence: Evidence) -> tuple[float, torch.Tensor]:
    """Return the factor that fits best, and what the module's output times it is."""
    bias = parts(evidence)[2]
    base = evidence.expected - bias
    factor = slope(rows(evidence, evidence.actual - bias), rows(evidence, base))
    return factor, base * factor + bias


def scaled(evidence: Evidence) -> Cause | None:
    """The weight is multiplied by a constant; where all tokens are of one size, a small one may be an epsilon."""
    factor, candidate = by_factor(evidence)
    if not evidence.explains(candidate):
        return None
    sizes = rows(evidence, parts(evidence)[0]).square().mean(-1)
    if 0.9 < factor < 1.1 and float(sizes.max() / sizes.min().clamp(min=1e-300)) < 1.1:
        return None
    lines = [f"output = {factor:.6g} x expected, {evidence.distance(candidate):.1e} is left after that"]
    width = evidence.actual.shape[-1]
    if abs(factor * width**0.5 - 1) < 1e-3:
        lines.append(f"that is 1 / sqrt({width}): a sum of squares instead of their mean has the same effect")
    kind: Kind = "weight scaled" if factor else "weights zeroed"
    return evidence.cause(kind, evidence.confidence(candidate), lines, "compare the norm's weight")


def other_weight(evidence: Evidence) -> Cause | None:
    """Another norm's weight explains the output."""
    x, weight, _, eps = parts(evidence)
    one = offset(evidence)
    for name, module in evidence.root.named_modules():
        other = parameter(module, "weight")
        if name == evidence.blame.module or not is_norm(module) or other is None or other.shape != weight.shape:
            continue
        bias = parameter(module, "bias")
        candidate = normalized(x, eps, mean=centred(evidence)) * (other + one) + (0 if bias is None else bias)
        if evidence.explains(candidate):
            line = f"the weight of {name} explains the output"
            return evidence.cause("weights of another layer", 0.97, [line], "check the mapping of weight names")
    return None


RULES = (overflow, variant, scaled, epsilon, outside, other_weight)
