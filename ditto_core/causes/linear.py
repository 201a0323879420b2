"""Linear layers: what was done to the weight that explains the output."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import nn

from ditto_core.causes.base import Evidence, first_cause, parameter
from ditto_core.causes.kinds import Kind
from ditto_core.causes.rounding import QUANTIZERS, Format, narrow_sums, round_bits
from ditto_core.compare.blame import Cause

LARGEST_PERMUTATION = 8192
"""Output channels up to which a permutation is searched (memory grows with the square)."""

RANKS = (2, 4, 8, 16)
"""Numbers of ranks whose shares of a row-parallel layer are tried."""

SAMPLED = 64
"""Output channels on which the format of a quantized weight is chosen."""


def linear(evidence: Evidence) -> Cause | None:
    """Explain a linear layer's output from its captured input; other sites are ignored."""
    weight, x = weight_of(evidence.module), layer_input(evidence)
    if evidence.port or weight is None or x is None:
        return None
    if (evidence.expected.shape[-1], x.shape[-1]) != weight.shape:
        return None  # a norm over two axes has a matrix too
    if not evidence.reproduces(apply(evidence, weight)):
        return None
    return first_cause(evidence, RULES)


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """Return the weight [out, in] of a linear layer, also of GPT-2's transposed ``Conv1D``; else None."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        return None
    return (weight.T if type(module).__name__ == "Conv1D" else weight).double()


def bias_of(module: nn.Module) -> torch.Tensor | None:
    """Return the bias [out], or None."""
    return parameter(module, "bias")


def layer_input(evidence: Evidence) -> torch.Tensor | None:
    """Return the captured input [..., in]."""
    return evidence.tensor(f"{evidence.site}:in")


def apply(evidence: Evidence, weight: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
    """Return the layer's output with another weight, or another input."""
    data = layer_input(evidence) if x is None else x
    assert data is not None
    bias = bias_of(evidence.module)
    return data @ weight.T + (0 if bias is None else bias)


def fit_weight(evidence: Evidence) -> torch.Tensor:
    """Return the engine's output without the bias, as [token, out]."""
    bias = bias_of(evidence.module)
    return evidence.actual - (0 if bias is None else bias)


def not_finite(evidence: Evidence) -> Cause | None:
    """Output channels that are NaN or Inf for every token come from the weights."""
    bad = ~torch.isfinite(rows(evidence, evidence.actual))
    x = layer_input(evidence)
    if len(bad) < 2 or not bad.any() or x is None or not torch.isfinite(x).all() or beyond_range(evidence):
        return None
    always, ever = bad.all(0), bad.any(0)
    if not always.any() or not torch.equal(always, ever):
        return None
    text = f"{int(always.sum())} of {len(always)} output channels are NaN or Inf for every token, the input is finite"
    return evidence.cause("weights not finite", 0.97, [text], "look for NaN in the engine's copy of the weight")


def beyond_range(evidence: Evidence) -> bool:
    """Tell whether the right output does not fit the engine's dtype: then finite weights give Inf."""
    return evidence.metrics.max_expected > torch.finfo(getattr(torch, evidence.dtype)).max


def zeroed(evidence: Evidence) -> Cause | None:
    """The output is the bias alone."""
    if rows(evidence, fit_weight(evidence)).any() or not rows(evidence, evidence.expected).any():
        return None
    line = "the output is zero (the bias alone) for every token, the input is not"
    return evidence.cause("weights zeroed", 0.97, [line], "check that the weight was loaded into the engine")


def scaled(evidence: Evidence) -> Cause | None:
    """Every output is the same multiple of what it should be."""
    bias = bias_of(evidence.module)
    base = evidence.expected - (0 if bias is None else bias)
    scale = slope(rows(evidence, fit_weight(evidence)), rows(evidence, base))
    candidate = base * scale + (0 if bias is None else bias)
    if not evidence.explains(candidate):
        return None
    line = f"output = {scale:.6g} x expected, {evidence.distance(candidate):.1e} is left after that"
    return evidence.cause(
        "weight scaled", evidence.confidence(candidate), [line], "compare the scale that the engine's weight has"
    )


def bias_lost(evidence: Evidence) -> Cause | None:
    """The bias is missing, or counted another number of times."""
    bias = bias_of(evidence.module)
    if bias is None or not bias.any():
        return None
    times = 1 + slope(
        rows(evidence, evidence.actual - evidence.expected), bias.expand_as(rows(evidence, evidence.actual))
    )
    candidate = evidence.expected + (times - 1) * bias
    if not evidence.explains(candidate):
        return None
    kind: Kind = "bias missing" if abs(times) < 0.05 else "bias scaled"
    line = f"output = expected {times - 1:+.4g} x bias"
    return evidence.cause(kind, evidence.confidence(candidate), [line], "check the layer's bias in the engine")


def transposed(evidence: Evidence) -> Cause | None:
    """A square weight is transposed."""
    weight = weight_of(evidence.module)
    if weight is None or weight.shape[0] != weight.shape[1]:
        return None
    candidate = apply(evidence, weight.T)
    if not evidence.explains(candidate):
        return None
    line = f"output = x W instead of x W^T (W is {weight.shape[0]} x {weight.shape[1]})"
    return evidence.cause("weight transposed", evidence.confidence(candidate), [line], "transpose the weight on import")


def permuted(evidence: Evidence) -> Cause | None:
    """The right output channels in the wrong order, as a wrongly split fused weight gives."""
    actual, expected = rows(evidence, evidence.actual), rows(evidence, evidence.expected)
    if actual.shape[1] > LARGEST_PERMUTATION or not torch.isfinite(actual).all():
        return None
    order = torch.cdist(actual.T.contiguous(), expected.T.contiguous()).argmin(1)
    moved = int((order != torch.arange(len(order))).sum())
    if moved == 0 or len(torch.unique(order)) != len(order):
        return None
    candidate = evidence.expected[..., order]
    if not evidence.explains(candidate):
        return None
    lines = [f"a permutation of the weight's rows restores the output: {moved} of {len(order)} rows are displaced"]
    lines.append(f"row order begins {order[:8].tolist()}{pattern_of(order)}")
    return evidence.cause(
        "fused weight order",
        evidence.confidence(candidate),
        lines,
        "check how the fused weight was split or interleaved",
    )


def partial_sum(evidence: Evidence) -> Cause | None:
    """One rank's share of the products alone: what the ranks computed was not added up."""
    bias = bias_of(evidence.module)
    for ranks, products in shares(evidence):
        for rank, product in enumerate(products):
            for candidate in (product,) if bias is None else (product, product + bias):
                if evidence.explains(candidate):
                    line = f"the output is what rank {rank} of {ranks} computes from its share of the input"
                    step = "add the all-reduce behind this row-parallel layer; or all other ranks' weights are zero"
                    return evidence.cause("all-reduce missing", evidence.confidence(candidate), [line], step)
    return None


def exchanged(evidence: Evidence) -> Cause | None:
    """Two ranks of a row-parallel layer have each other's share of the weight."""
    weight, x = as_weight(evidence.module), layer_input(evidence)
    assert x is not None
    for ranks, _ in shares(evidence):
        inputs, weights = x.chunk(ranks, -1), weight.chunk(ranks, -1)
        for i, j in combinations(range(ranks), 2):
            candidate = evidence.expected + (inputs[i] - inputs[j]) @ (weights[j] - weights[i]).T
            if evidence.explains(candidate):
                line = f"the weight's shares of ranks {i} and {j} of {ranks} in each other's place explain the output"
                step = "check which share of the weight each rank loads"
                return evidence.cause("ranks exchanged", evidence.confidence(candidate), [line], step)
    return None


def shares(evidence: Evidence) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield numbers of ranks with each rank's products [..., out], where the layer's inputs are split over them."""
    weight, x = as_weight(evidence.module), layer_input(evidence)
    assert x is not None
    for ranks in RANKS:
        if weight.shape[1] % ranks == 0:
            pairs = zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)
            yield ranks, [own @ part.T for own, part in pairs]


def other_weight(evidence: Evidence) -> Cause | None:
    """Another layer's weight explains the output."""
    x = layer_input(evidence)
    assert x is not None
    for name, module in same_kind(evidence):
        bias = bias_of(module)
        candidate = x @ as_weight(module).T + (0 if bias is None else bias)
        if evidence.explains(candidate):
            line = f"the weight of {name} explains the output"
            return evidence.cause(
                "weights of another layer", evidence.confidence(candidate), [line], "check the mapping of weight names"
            )
    return None


def quantized(evidence: Evidence) -> Cause | None:
    """The weight, and perhaps the input, rounded to a coarser format explains the output.

    The format is chosen on some output channels: all of a wide layer's would take seconds.
    """
    weight, x = as_weight(evidence.module), layer_input(evidence)
    assert x is not None
    some, bias = sample(weight), bias_of(evidence.module)

    def output(format_: Format, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        _, of_weight, of_input = format_
        product = (of_input(x) if of_input else x) @ (of_weight(weight) if of_weight else weight).T
        return product if bias is None else product + bias

    def error(format_: Format) -> float:
        candidate = output(format_, weight[some], None if bias is None else bias[some])
        return evidence.distance_between(evidence.actual[..., some], candidate)

    best = min(QUANTIZERS, key=error)
    candidate = output(best, weight, bias)
    if not evidence.explains(candidate, share=0.7):
        return None
    share = 1 - evidence.distance(candidate) / evidence.distance(evidence.expected)
    line = f"{best[0]} accounts for {share:.0%} of the error of {evidence.blame.local:.1e}"
    step = "leave this layer out of quantization, or calibrate it"
    return evidence.cause("weights quantized", 0.95 if share > 0.9 else 0.8, [line], step)


def sample(weight: torch.Tensor) -> torch.Tensor:
    """Return output channels of a weight [out, in]: the first ones, and those with the extremes that set its scale."""
    extremes = [int(weight.argmax()) // weight.shape[1], int(weight.argmin()) // weight.shape[1]]
    return torch.tensor(sorted({*range(min(len(weight), SAMPLED)), *extremes}))


def reduced_precision(evidence: Evidence) -> Cause | None:
    """Products of inputs that were rounded to fewer mantissa bits: TF32, bfloat16."""
    weight, x = weight_of(evidence.module), layer_input(evidence)
    assert weight is not None
    assert x is not None
    formats: tuple[tuple[int, Kind, str], ...] = (
        (10, "TF32", "TF32 (10 mantissa bits)"),
        (7, "bfloat16 products", "bfloat16"),
    )
    for bits, kind, name in formats:
        candidate = apply(evidence, round_bits(weight, bits), round_bits(x, bits))
        if evidence.explains(candidate, share=0.7):
            line = f"rounding both factors to {name} accounts for the error of {evidence.blame.local:.1e}"
            if bits == 10:
                line += "; float16 rounds to as many"
            step = (
                "set NVIDIA_TF32_OVERRIDE=0 or the builder's TF32 flag off, and look for casts to float16"
                if bits == 10
                else "compute in float32"
            )
            return evidence.cause(kind, 0.95, [line], step)
    return None


def some_rows(evidence: Evidence) -> Cause | None:
    """Only some output channels are wrong: part of the weight was changed."""
    actual, expected = rows(evidence, evidence.actual), rows(evidence, evidence.expected)
    error = (actual - expected).norm(dim=0) / expected.norm(dim=0).clamp(min=1e-30)
    bad = ~(error <= 20 * evidence.blame.bound)
    count = int(bad.sum())
    others = float((actual - expected)[:, ~bad].norm() / expected[:, ~bad].norm().clamp(min=1e-30))
    rank = share_of_a_rank(bad)
    if not 0 < count <= len(bad) // (2 if rank else 4) or others > evidence.blame.bound:
        return None
    wrong = (actual - expected)[:, bad]
    if len(wrong) < 2 or float((wrong - wrong.mean(0)).norm()) < 0.01 * float(wrong.norm()):
        return None  # what does not depend on the input is no product with a weight
    where = bad.nonzero().flatten().tolist()
    how = "zero" if not actual[:, bad].any() else "wrong"
    shown = f"{where[:8]}{' …' if count > 8 else ''}"
    lines = [f"{count} of {len(bad)} output channels are {how}: {shown}; the others are exact{rank}"]
    lines.append(f"largest error in channel {int(error.argmax())}: {float(error.max()):.1e}")
    return evidence.cause("weight rows changed", 0.7, lines, "compare these rows of the weight with the checkpoint")


def share_of_a_rank(bad: torch.Tensor) -> str:
    """Say which rank's share of the channels ``bad`` is true in; empty for anything else."""
    for ranks in RANKS:
        whole = [bool(part.all()) for part in bad.chunk(ranks)]
        if len(bad) % ranks == 0 and sum(whole) == 1 and int(bad.sum()) == len(bad) // ranks:
            return f"; they are the share of rank {whole.index(True)} of {ranks}"
    return ""


def low_accumulation(evidence: Evidence) -> Cause | None:
    """Summing in the engine's dtype, so many products at a time, reproduces the output."""
    weight, x = weight_of(evidence.module), layer_input(evidence)
    assert weight is not None
    assert x is not None
    if evidence.dtype not in ("float16", "bfloat16") or not evidence.distance(evidence.expected) <= 0.05:
        return None
    for chunk, candidate in narrow_sums(x, weight, getattr(torch, evidence.dtype)):
        bias = bias_of(evidence.module)
        if evidence.explains(candidate + (0 if bias is None else bias), share=0.6):
            line = (
                f"rounding the sum to {evidence.dtype} after every {chunk} of {weight.shape[1]} products accounts for "
                f"the error of {evidence.blame.local:.1e}"
            )
            step = "accumulate in float32 (strongly typed network, or cast around it)"
            return evidence.cause("narrow accumulation", 0.9, [line], step)
    return None


def rows(evidence: Evidence, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of real tokens as [token, channel]."""
    if evidence.valid is None:
        return tensor.reshape(-1, tensor.shape[-1])
    return tensor[evidence.valid.expand(tensor.shape)[..., 0]]


def slope(y: torch.Tensor, x: torch.Tensor) -> float:
    """Return the least-squares factor from x to y."""
    size = float((x * x).sum())
    return float((x * y).sum()) / size if size else 0.0


def as_weight(module: nn.Module) -> torch.Tensor:
    """Return the weight of what is known to be a linear layer."""
    weight = weight_of(module)
    assert weight is not None
    return weight


def same_kind(evidence: Evidence) -> Iterator[tuple[str, nn.Module]]:
    """Yield the other linear layers of the same shape."""
    shape = as_weight(evidence.module).shape
    for name, module in evidence.root.named_modules():
        if name != evidence.blame.module and type(module) is type(evidence.module) and as_weight(module).shape == shape:
            yield name, module


def pattern_of(order: torch.Tensor) -> str:
    """Recognize the order of an interleaved split: ``order = arange(n).view(a, b).T``."""
    size = len(order)
    for groups in (g for g in range(2, size) if size % g == 0):
        if torch.equal(order, torch.arange(size).reshape(groups, -1).T.reshape(-1)):
            return f": {groups} groups are interleaved"
    return ""


RULES = (
    not_finite,
    zeroed,
    scaled,
    bias_lost,
    transposed,
    permuted,
    partial_sum,
    exchanged,
    other_weight,
    reduced_precision,
    quantized,
    some_rows,
    low_accumulation,
)
