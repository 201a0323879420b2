"""The attention core: scale, head grouping, softcap, rows that see nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ditto_core.causes.base import Evidence, first_cause
from ditto_core.causes.linear import slope
from ditto_core.causes.norm import LARGEST_HALF
from ditto_core.compare.blame import Cause


def attention(evidence: Evidence) -> Cause | None:
    """Explain attention probabilities or their product with the values; other sites are ignored."""
    if evidence.port == "probs" and core(evidence) is not None and evidence.reproduces(own(evidence)):
        return first_cause(evidence, PROBS_RULES)
    if evidence.port == "context":
        return first_cause(evidence, CONTEXT_RULES)
    return None


def core(evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the engine's queries [batch, head, length, dim] and keys [batch, kv_head, total, dim]."""
    query = evidence.sibling("q_rope")
    key = evidence.sibling("k_rope")
    if query is None or key is None:
        query, key = evidence.sibling("q_states"), evidence.sibling("k_states")
    return None if query is None or key is None else (query, key)


def own(evidence: Evidence) -> torch.Tensor:
    """Return the probabilities that the formula of these rules gives."""
    return softmax(evidence, capped(evidence, scores(evidence) * scaling(evidence)))


def groups(evidence: Evidence, kv: torch.Tensor) -> int:
    """Return how many query heads share a key/value head."""
    heads = evidence.actual.shape[1] if evidence.port == "probs" else evidence.actual.shape[2]
    return max(1, int(heads) // int(kv.shape[1]))


def scaling(evidence: Evidence) -> float:
    """Return the model's factor on the scores."""
    core_tensors = core(evidence)
    dim = core_tensors[0].shape[-1] if core_tensors else 1
    return float(getattr(evidence.module, "scaling", None) or dim**-0.5)


def softcap(evidence: Evidence) -> float:
    """Return the model's cap on the scores, or 0."""
    return float(getattr(evidence.module, "attn_logit_softcapping", None) or 0)


def scores(evidence: Evidence, key_heads: torch.Tensor | None = None) -> torch.Tensor:
    """Return query-key products without scale or mask [batch, head, length, total].

    ``key_heads`` gives the key head of each query head; by default groups of neighbours share one.
    """
    found = core(evidence)
    assert found is not None
    query, key = found
    order = torch.arange(query.shape[1]) // groups(evidence, key) if key_heads is None else key_heads
    return query @ key[:, order].transpose(-1, -2)


def softmax(evidence: Evidence, logits: torch.Tensor) -> torch.Tensor:
    """Apply softmax over the keys that the model's own probabilities allow."""
    return logits.masked_fill(~(evidence.expected > 0), float("-inf")).softmax(-1).nan_to_num(0.0)


def capped(evidence: Evidence, logits: torch.Tensor) -> torch.Tensor:
    """Apply the model's softcap, where it has one."""
    cap = softcap(evidence)
    return torch.tanh(logits / cap) * cap if cap else logits


def masked_row(evidence: Evidence) -> Cause | None:
    """NaN from a softmax over nothing: all inputs are finite, and a query's scores are all -inf."""
    found = core(evidence)
    bad = torch.isnan(evidence.actual).any(-1).any(1)
    if found is None or not bad.any() or not all(torch.isfinite(t).all() for t in found):
        return None
    if evidence.dtype == "float16" and float(scores(evidence).abs().amax((1, 3))[bad].max()) > LARGEST_HALF:
        return None  # the products themselves do not fit: Inf less Inf is NaN too
    row, query = (int(i) for i in bad.nonzero()[0])
    line = f"{int(bad.sum())} queries have NaN probabilities from finite inputs: first row {row}, query {query}"
    mask = evidence.inputs.get("attention_mask")
    padding = mask is not None and not bool(mask[row, evidence.past_length + query])
    more = (
        "that query is padding; NaN spreads from there, as 0 x NaN, to the row's real tokens"
        if padding
        else "a real token"
    )
    step = "build the mask once, with the dtype's lowest number instead of -inf, and do not add it twice"
    return evidence.cause("fully masked row", 0.95, [line, more], step)


def key_grouping(evidence: Evidence) -> Cause | None:
    """Each query head attends to another key head than the model's."""
    found = core(evidence)
    assert found is not None
    heads, kv = found[0].shape[1], found[1].shape[1]
    if kv == 1 or heads == 1:
        return None
    order = torch.zeros(heads, dtype=torch.int64)
    errors = torch.full((heads,), float("inf"), dtype=torch.float64)
    for head in range(kv):
        every = torch.full((heads,), head)
        probs = softmax(evidence, capped(evidence, scores(evidence, every) * scaling(evidence)))
        error = head_errors(evidence, probs)
        order, errors = torch.where(error < errors, head, order), torch.minimum(error, errors)
    candidate = softmax(evidence, capped(evidence, scores(evidence, order) * scaling(evidence)))
    return grouping_cause(evidence, order, candidate, heads, kv, "key")


def head_errors(evidence: Evidence, candidate: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each head, [head]."""
    difference = (evidence.actual - candidate).square()
    if evidence.valid is not None:
        difference = difference * evidence.valid.expand(difference.shape)
    head = 1 if evidence.port == "probs" else 2
    return difference.sum([i for i in range(4) if i != head])


def grouping_cause(
    evidence: Evidence, order: torch.Tensor, candidate: torch.Tensor, heads: int, kv: int, name: str
) -> Cause | None:
    """Name a wrong map from query heads to key/value heads."""
    own = torch.arange(heads) // (heads // kv)
    if torch.equal(order, own) or not evidence.explains(candidate):
        return None
    tiled = torch.equal(order, torch.arange(heads) % kv)
    how = " (Tile: h0 h1 h0 h1; the model repeats: h0 h0 h1 h1)" if tiled else ""
    line = f"query heads use the {name} heads {order.tolist()} instead of {own.tolist()}{how}"
    step = "expand grouped heads with repeat_interleave, not with Tile"
    return evidence.cause("head grouping", evidence.confidence(candidate), [line], step)


def scale(evidence: Evidence) -> Cause | None:
    """The scores are multiplied by another factor."""
    raw = scores(evidence)
    use = (evidence.expected > 1e-9) & (evidence.actual > 1e-9)
    if evidence.valid is not None:
        use = use & evidence.valid.expand(use.shape)
    logs = torch.where(use, evidence.actual.clamp(min=1e-300).log(), 0.0)
    count = use.sum(-1, keepdim=True).clamp(min=1)
    centred_raw = torch.where(use, raw - torch.where(use, raw, 0.0).sum(-1, keepdim=True) / count, 0.0)
    factor = slope(torch.where(use, logs - logs.sum(-1, keepdim=True) / count, 0.0), centred_raw)
    candidate = softmax(evidence, raw * factor)
    own = scaling(evidence)
    if softcap(evidence) or abs(factor / own - 1) < 1e-6 or not evidence.explains(candidate):
        return None
    line = f"scores are multiplied by {factor:.6g}{known_scale(factor, raw, evidence)}, the model's factor is {own:.6g}"
    return evidence.cause("attention scale", evidence.confidence(candidate), [line], "compare the scale of the scores")


def known_scale(factor: float, raw: torch.Tensor, evidence: Evidence) -> str:
    """Say what a factor looks like."""
    found = core(evidence)
    dim = found[0].shape[-1] if found else 1
    names = {
        "1 (no scale)": 1.0,
        "1 / head_dim": 1 / dim,
        "1 / sqrt(head_dim)": dim**-0.5,
        "applied twice": scaling(evidence) ** 2,
    }
    return next((f" = {name}" for name, value in names.items() if abs(factor / value - 1) < 1e-3), "")


def cap_missing(evidence: Evidence) -> Cause | None:
    """The softcap is left out, or put on another scale."""
    cap = softcap(evidence)
    if not cap or not evidence.explains(softmax(evidence, scores(evidence) * scaling(evidence))):
        return None
    line = f"scores are not capped; config.attn_logit_softcapping = {cap:g}"
    if evidence.dtype != "float32":
        line += f" (in {evidence.dtype} a cap far above the scores looks the same)"
    return evidence.cause("softcap missing", 0.97, [line], "export the softcap, or use an attention that knows it")


def other_cap(evidence: Evidence) -> Cause | None:
    """Scores are capped at another bound than the model's, or where the model caps none."""
    raw = scores(evidence) * scaling(evidence)
    peak = float(evidence.chosen(torch.where(evidence.expected > 0, raw.abs(), 0.0)).max())
    if not 0 < peak < float("inf"):
        return None

    def with_cap(logarithm: float) -> torch.Tensor:
        cap = peak * 10**logarithm
        return softmax(evidence, torch.tanh(raw / cap) * cap)

    found = least(lambda logarithm: evidence.distance(with_cap(logarithm)), -1.5, 2.5)
    cap, own, candidate = peak * 10**found, softcap(evidence), with_cap(found)
    if abs(cap / own - 1 if own else 1) < 1e-3 or not evidence.explains(candidate):
        return None
    line = f"scores are capped at {cap:.4g}, the model's {f'at {own:g}' if own else 'are not capped'}"
    return evidence.cause("softcap differs", evidence.confidence(candidate), [line], "compare the cap of the scores")


def least(error: Callable[[float], float], low: float, high: float, points: int = 17) -> float:
    """Return where ``error`` is least between two numbers: the best of so many points, then by golden section."""
    step = (high - low) / (points - 1)
    start = min((low + step * i for i in range(points)), key=error)
    a, b, share = start - step, start + step, (5**0.5 - 1) / 2
    for _ in range(40):
        c, d = b - share * (b - a), a + share * (b - a)
        a, b = (a, d) if error(c) < error(d) else (c, b)
    return (a + b) / 2


def not_normalized(evidence: Evidence) -> Cause | None:
    """Rows of probabilities do not sum to one."""
    each = evidence.actual.sum(-1, keepdim=True)
    sums = evidence.chosen(each.expand_as(evidence.actual))
    low, high = float(sums.min()), float(sums.max())
    if not sums.all() or max(abs(low - 1), abs(high - 1)) < 1e-3 or not evidence.explains(evidence.expected * each):
        return None
    between = f"{low:.4g}" if high - low < 1e-3 else f"{low:.4g} to {high:.4g}"
    line = f"probabilities of a query sum to {between}; divided by that they are right"
    return evidence.cause("softmax not normalized", 0.9, [line], "compare the softmax in the engine")


def value_grouping(evidence: Evidence) -> Cause | None:
    """Each query head takes the values of another head."""
    for order, candidate in value_orders(evidence):
        heads, kv = candidate.shape[2], int(order.max()) + 1
        found = grouping_cause(evidence, order, candidate, heads, kv, "value")
        if found is not None:
            return found
    return None


def value_orders(evidence: Evidence) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the map of query heads to value heads that fits best, and what it gives."""
    probs, value = evidence.sibling("probs"), evidence.sibling("v_states")
    if probs is None or value is None or value.shape[1] in (1, probs.shape[1]):
        return
    heads, kv = probs.shape[1], value.shape[1]
    if not evidence.reproduces((probs @ value.repeat_interleave(heads // kv, 1)).transpose(1, 2)):
        return
    order = torch.zeros(heads, dtype=torch.int64)
    errors = torch.full((heads,), float("inf"), dtype=torch.float64)
    for head in range(kv):
        context = (probs @ value[:, [head] * heads]).transpose(1, 2)
        error = head_errors(evidence, context)
        order, errors = torch.where(error < errors, head, order), torch.minimum(error, errors)
    yield order, (probs @ value[:, order]).transpose(1, 2)


PROBS_RULES = (masked_row, key_grouping, scale, cap_missing, other_cap, not_normalized)
CONTEXT_RULES = (value_grouping,)
