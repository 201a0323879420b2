"""Faults that no change of the model's code describes, or thousands would fit: NaN, zeros, single wrong rows."""

from __future__ import annotations

import torch
from torch import nn

from ditto_core.causes.confidence import confidence
from ditto_core.causes.evidence import Evidence
from ditto_core.causes.mutants.ranks import share_of_a_rank
from ditto_core.compare.blame import Cause
from ditto_core.compare.masks import is_mask

SURE = confidence("guards")
LARGEST_HALF = 65504.0
PIECE = 1 << 22
"""Elements of a table that are held in float64 at a time: a vocabulary of 256k rows would take gigabytes."""


def norm_overflow(evidence: Evidence) -> Cause | None:
    """The sum of squares of a norm does not fit float16, and x / sqrt(inf) is zero."""
    given, (weight, bias) = evidence.tensor(f"{evidence.site}:in"), weights(evidence)
    if given is None or weight is None or weight.shape != given.shape[-1:] or given.shape != evidence.actual.shape:
        return None
    x, actual = evidence.rows(given), evidence.rows(evidence.actual)
    nothing = torch.zeros(x.shape[-1]) if bias is None else bias.double()
    sums = x.square().sum(-1)
    gone = ((actual == nothing).all(-1) | ~torch.isfinite(actual).all(-1)) & (sums > 0)
    if not gone.any() or float(sums[gone].min()) < LARGEST_HALF:
        return None
    if evidence.dtype != "float16" and gone.all():
        return None  # zeros throughout may be the weight's as well
    line = (
        f"the output of {int(gone.sum())} tokens is zero or not finite; max |x| = {float(x[gone].abs().max()):.4g}, "
        f"sum x^2 = {float(sums[gone].max()):.4g} > {LARGEST_HALF:.0f}, float16's largest"
    )
    return evidence.cause("norm overflow", SURE, [line], "keep this norm (its square and its sum) in float32")


def weights(evidence: Evidence) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return weight and bias of the module whose output the site is, None for what is not there."""
    found = (None if evidence.port else getattr(evidence.module, name, None) for name in ("weight", "bias"))
    weight, bias = (value if isinstance(value, torch.Tensor) else None for value in found)
    return weight, bias


def masked_row(evidence: Evidence) -> Cause | None:
    """NaN from a softmax over nothing: all inputs are finite, and a query's scores all are -inf."""
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
    return evidence.cause("fully masked row", SURE, [line, more if padding else "a real token"], step)


def scores(evidence: Evidence) -> torch.Tensor | None:
    """Return the engine's query-key products without scale or mask, [batch, head, length, total], at probabilities."""
    path = evidence.site.partition(":")[0]
    found = ([evidence.tensor(f"{path}:{letter}_{kind}") for letter in "qk"] for kind in ("rope", "states"))
    query, key = next(((q, k) for q, k in found if q is not None and k is not None), (None, None))
    if evidence.port != "probs" or query is None or key is None:
        return None
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)


def not_finite(evidence: Evidence) -> Cause | None:
    """NaN or Inf from finite inputs: beyond the dtype's range, from a weight, or from nobody knows where."""
    actual, expected = evidence.chosen(evidence.actual), evidence.chosen(evidence.expected)
    bad = ~torch.isfinite(actual)
    if not bad.any() or not torch.isfinite(expected).all():
        return None
    peak, largest = float(expected.abs().max()), torch.finfo(getattr(torch, evidence.dtype)).max
    if torch.isinf(actual).any() and peak > largest:
        line = f"{int(torch.isinf(actual).sum())} values are infinite; the largest should be {peak:.4g}"
        step = f"keep this operator in float32: {evidence.dtype} ends at {largest:.5g}"
        return evidence.cause("overflow", SURE, [line], step)
    columns = ~torch.isfinite(evidence.rows(evidence.actual)) if evidence.actual.ndim else bad[None, None]
    always = columns.all(0)
    weight = weights(evidence)[0]
    if weight is not None and weight.ndim == 2 and len(columns) > 1 and torch.equal(always, columns.any(0)):
        line = (
            f"{int(always.sum())} of {len(always)} output channels are NaN or Inf for every token, the input is finite"
        )
        return evidence.cause("weights not finite", SURE, [line], "look for NaN in the engine's copy of the weight")
    line = f"{int(bad.sum())} of {bad.numel()} values are NaN or Inf here first; everything upstream is finite"
    return evidence.cause("not finite", SURE, [line], "check the operator's range in this dtype")


def zero(evidence: Evidence) -> Cause | None:
    """Nothing comes out. A mask of zeros shows every key."""
    if is_mask(evidence.expected) or evidence.chosen(evidence.actual).any():
        return None
    if not evidence.chosen(evidence.expected).any():
        return None
    if weights(evidence)[0] is not None:
        line, step = "the output is zero for every token, the input is not", "check that the weight was loaded"
        return evidence.cause("weights zeroed", SURE, [line], step)
    return evidence.cause("all zero", SURE, ["the engine's tensor is zero everywhere"], "check the operator's inputs")


def other_ids(evidence: Evidence) -> Cause | None:
    """An embedding's rows are right, and those of other ids."""
    module, ids = evidence.module, evidence.inputs.get("input_ids")
    if not isinstance(module, nn.Embedding) or evidence.port or ids is None:
        return None
    table, scale = module.weight.detach(), float(getattr(module, "embed_scale", 1.0))
    if evidence.actual.shape != (*ids.shape, table.shape[1]) or not torch.isfinite(evidence.actual).all():
        return None
    found = nearest_rows(evidence.actual.reshape(-1, table.shape[1]) / scale, table).reshape(ids.shape)
    given, taken = (evidence.chosen(side[..., None].expand_as(evidence.actual)) for side in (ids, found))
    rest = evidence.chosen(evidence.actual - table[found].double() * scale)
    wrong = given != taken
    if not wrong.any() or float(rest.norm()) > evidence.bound * float(evidence.chosen(evidence.expected).norm()):
        return None
    place = int(wrong.nonzero()[0])
    count, first = int(wrong.sum()) // table.shape[1], f"first {int(given[place])} as {int(taken[place])}"
    line = f"{count} of {len(wrong) // table.shape[1]} tokens were looked up under other ids, {first}"
    return evidence.cause("other ids", SURE, [line], "compare the inputs before the first layer")


def nearest_rows(wanted: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the index [n] of the table's row at the least distance from each of ``wanted`` [n, width], float64."""
    best = torch.full((wanted.shape[0],), torch.inf, dtype=torch.float64)
    found = torch.zeros_like(best, dtype=torch.int64)
    step = max(1, PIECE // table.shape[1])
    for start in range(0, table.shape[0], step):
        piece = table[start : start + step].double()
        # |w - r|^2 without |w|^2, which is the same for all rows
        least, index = (piece.square().sum(1) - 2 * wanted @ piece.T).min(1)
        nearer = least < best
        best[nearer], found[nearer] = least[nearer], index[nearer] + start
    return found


def changed_rows(evidence: Evidence) -> Cause | None:
    """Some output channels of a product are wrong, the others exact: part of the weight was changed."""
    weight = weights(evidence)[0]
    if weight is None or weight.ndim != 2 or isinstance(evidence.module, nn.Embedding):
        return None
    actual, expected = evidence.rows(evidence.actual), evidence.rows(evidence.expected)
    error = (actual - expected).norm(dim=0) / expected.norm(dim=0).clamp(min=1e-30)
    bad = ~(error <= 20 * evidence.bound)
    count = int(bad.sum())
    others = float((actual - expected)[:, ~bad].norm() / expected[:, ~bad].norm().clamp(min=1e-30))
    wrong, rank = (actual - expected)[:, bad], share_of_a_rank(bad)
    if not 0 < count <= len(bad) // (2 if rank else 4) or others > evidence.bound or len(wrong) < 2:
        return None
    if float((wrong - wrong.mean(0)).norm()) < 0.01 * float(wrong.norm()):
        return None  # what does not depend on the input is no product with a weight
    where, how = bad.nonzero().flatten().tolist(), "wrong" if actual[:, bad].any() else "zero"
    shown = f"{where[:8]}{' …' if count > 8 else ''}"
    lines = [f"{count} of {len(bad)} output channels are {how}: {shown}; the others are exact{rank}"]
    lines.append(f"largest error in channel {int(error.argmax())}: {float(error.max()):.1e}")
    return evidence.cause("weight rows changed", SURE, lines, "compare these rows of the weight with the checkpoint")
