"""Attention probabilities: a query that sees no key."""

from __future__ import annotations

import torch

from ditto_core.causes.base import Evidence
from ditto_core.causes.norm import LARGEST_HALF
from ditto_core.compare.blame import Cause


def masked_row(evidence: Evidence) -> Cause | None:
    """NaN from a softmax over nothing: all inputs are finite, and a query's scores are all -inf."""
    products = scores(evidence)
    bad = torch.isnan(evidence.actual).any(-1).any(1) if products is not None else torch.zeros(0)
    if products is None or not bad.any() or not torch.isfinite(products).all():
        return None
    if evidence.dtype == "float16" and float(products.abs().amax((1, 3))[bad].max()) > LARGEST_HALF:
        return None  # the products themselves do not fit: Inf less Inf is NaN too
    row, query = (int(i) for i in bad.nonzero()[0])
    line = f"{int(bad.sum())} queries have NaN probabilities from finite inputs: first row {row}, query {query}"
    mask = evidence.inputs.get("attention_mask")
    padding = mask is not None and not bool(mask[row, evidence.past_length + query])
    more = "that query is padding; NaN spreads from there, as 0 x NaN, to the row's real tokens"
    step = "build the mask once, with the dtype's lowest number instead of -inf, and do not add it twice"
    return evidence.cause("fully masked row", 0.95, [line, more if padding else "a real token"], step)


def scores(evidence: Evidence) -> torch.Tensor | None:
    """Return the engine's query-key products without scale or mask, [batch, head, length, total], at probabilities."""
    kinds = ("rope", "states")
    found = ((evidence.sibling(f"q_{kind}"), evidence.sibling(f"k_{kind}")) for kind in kinds)
    query, key = next(((q, k) for q, k in found if q is not None and k is not None), (None, None))
    if evidence.port != "probs" or query is None or key is None:
        return None
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)


RULES = (masked_row,)
