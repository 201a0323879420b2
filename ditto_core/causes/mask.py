"""Attention masks: which keys a query may see in the engine, against the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ditto_core.causes.attention import capped, core, scaling, scores
from ditto_core.causes.base import Evidence, signed
from ditto_core.causes.kinds import Kind
from ditto_core.compare.blame import Cause

Found = tuple[Kind, str] | None
"""A kind of cause and the line that says what was seen."""


@dataclass(frozen=True)
class View:
    """What the engine's queries see and what they should see, bool [batch, query, total], real queries only.

    ``distance`` is key index less query index, int64 [query, total]; ``keys`` marks real keys, bool [batch, total];
    ``rows`` marks real queries, bool [batch, query].
    """

    seen: torch.Tensor
    wanted: torch.Tensor
    distance: torch.Tensor
    keys: torch.Tensor
    rows: torch.Tensor
    past: int

    @property
    def extra(self) -> torch.Tensor:
        """Seen, but should not be."""
        return self.seen & ~self.wanted & self.rows[..., None]

    @property
    def lost(self) -> torch.Tensor:
        """Not seen, but should be."""
        return self.wanted & ~self.seen & self.rows[..., None]


def mask(evidence: Evidence) -> Cause | None:
    """Explain a mask, or the zeros of attention probabilities; other sites are ignored."""
    view = view_of(evidence)
    if view is None or not (view.extra.any() or view.lost.any()):
        return None
    if evidence.port == "probs" and not evidence.explains(over_seen(evidence, view)):
        return None
    return name_pattern(evidence, view)


def over_seen(evidence: Evidence, view: View) -> torch.Tensor | None:
    """Return the probabilities over just the keys that the engine sees.

    A mask that is too weak lets every key through, and one that is right hides keys whose probability is cut to zero:
    neither is these.
    """
    if core(evidence) is None:
        return None
    logits = capped(evidence, scores(evidence) * scaling(evidence))
    return logits.masked_fill(~view.seen[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)


def view_of(evidence: Evidence) -> View | None:
    """Read who sees whom off a mask (allowed: not negative) or off probabilities (allowed: not zero)."""
    shape = evidence.actual.shape
    whole = evidence.inputs.get("attention_mask")
    if whole is None or len(shape) != 4 or shape[-1] != whole.shape[1]:
        return None
    if torch.isnan(evidence.actual).any() or (evidence.port == "probs" and not are_probabilities(evidence)):
        return None
    if evidence.port == "in.attention_mask":
        seen, wanted = seen_through(evidence.actual), evidence.expected >= 0
    elif evidence.port == "probs":
        seen, wanted = evidence.actual > 0, evidence.expected > 0
    else:
        return None
    length, total = shape[2], shape[3]
    distance = torch.arange(total)[None] - torch.arange(total - length, total)[:, None]
    seen, wanted = (part.any(1).expand(whole.shape[0], length, total) for part in (seen, wanted))
    return View(seen, wanted, distance, whole.bool(), whole[:, -length:].bool(), total - length)


def seen_through(mask: torch.Tensor) -> torch.Tensor:
    """Tell which keys an additive mask lets through: where it adds much to some of them, those alone."""
    top = mask.amax(-1, keepdim=True).clamp(min=0)
    return mask >= torch.where(top > 1, top, 0)


def are_probabilities(evidence: Evidence) -> bool:
    """Tell whether each query's probabilities sum to one, or to zero where it sees no key."""
    sums = evidence.actual.sum(-1)
    fair = ((sums - 1).abs() < 0.02) | (evidence.actual == 0).all(-1)
    return bool(fair.all()) and not bool((evidence.actual < 0).any())


def name_pattern(evidence: Evidence, view: View) -> Cause | None:
    """Name the pattern of what is seen too much and too little."""
    step = "compare the mask that the engine builds with the model's"
    for rule in RULES:
        found = rule(evidence, view)
        if found is not None:
            kind, line = found
            return signed(evidence.cause(kind, 0.97, [line, counts(view.extra, view.lost)], step), rule)
    return None


def counts(extra: torch.Tensor, lost: torch.Tensor) -> str:
    """Say how many pairs of query and key are concerned."""
    return f"{int(extra.sum())} pairs of query and key are seen too much, {int(lost.sum())} too little"


def anchor(evidence: Evidence, view: View) -> Found:
    """The causal mask starts at the top left instead of the bottom right."""
    if not view.past:
        return None
    top = (view.distance + view.past <= 0) & view.keys[:, None]
    if not agrees(view, top):
        return None
    return "mask anchor", f"a query at row i sees keys 0..i only, without the {view.past} cached ones before it"


def inverted(evidence: Evidence, view: View) -> Found:
    """Masked keys are visible, and visible keys are masked."""
    real = view.rows[..., None]
    if not view.lost.any() or not view.extra.any():
        return None
    causal = (view.distance <= 0)[None]
    if not bool(view.keys.all()) and agrees(view, causal & ~view.keys[:, None]):
        return "mask inverted", "queries see padding and no real token"
    # an additive mask does not change a query that may see every key
    partial = real & ~view.wanted.all(-1, keepdim=True)
    if torch.equal(view.seen & partial, ~view.wanted & partial):
        return "mask inverted", "queries see the keys that they should not, and not those that they should"
    return None


def other_rows(evidence: Evidence, view: View) -> Found:
    """Rows of the batch have the padding of other rows."""
    causal = (view.distance <= 0)[None]
    for shift in range(1, len(view.keys)):
        keys = view.keys.roll(shift, 0)
        if not torch.equal(keys, view.keys) and agrees(view, causal & keys[:, None]):
            return "rows displaced", f"each row has the padding of the row {shift} before it"
    return None


def padding(evidence: Evidence, view: View) -> Found:
    """Padding keys are seen."""
    extra, lost = view.extra, view.lost
    at_padding = extra & ~view.keys[:, None]
    if not extra.any() or lost.any() or not torch.equal(at_padding, extra):
        return None
    rows = extra.flatten(1).any(1).nonzero().flatten().tolist()
    return "padding not masked", f"only keys that are padding are seen too much, in rows {rows}"


def blind_rows(evidence: Evidence, view: View) -> Found:
    """Queries that see nothing."""
    blind = ~view.seen.any(-1) & view.rows & view.wanted.any(-1)
    if not blind.any() or view.extra.any() or bool((view.lost & ~blind[..., None]).any()):
        return None
    if evidence.port == "probs" and torch.equal(blind, view.rows):
        return None  # nothing comes out at all
    row, query = (int(i) for i in blind.nonzero()[0])
    return "fully masked row", f"{int(blind.sum())} queries see no key at all, the first is row {row}, query {query}"


def off_by_one(evidence: Evidence, view: View) -> Found:
    """The diagonal is in the wrong place by one."""
    extra, lost = view.extra, view.lost
    real = view.keys[:, None] & view.rows[..., None]
    diagonal, next_key = (view.distance == 0) & real, (view.distance == 1) & real
    if not lost.any() and torch.equal(extra, next_key & ~view.wanted):
        return "mask off by one", "each query sees the token after it"
    if not extra.any() and torch.equal(lost, diagonal & view.wanted):
        return "mask off by one", "no query sees itself"
    if view.seen.shape[1] == 1:
        return None
    for ahead in (a for a in range(2 - view.seen.shape[1], view.seen.shape[1] - 1) if a not in (-1, 0, 1)):
        if agrees(view, (view.distance <= ahead)[None] & view.keys[:, None]):
            what = f"{ahead} tokens after it" if ahead > 0 else f"only tokens at least {-ahead} before it"
            return "mask shifted", f"each query sees {what}"
    return None


def window(evidence: Evidence, view: View) -> Found:
    """The sliding window is ignored, or has another size."""
    extra, lost = view.extra, view.lost
    size = getattr(evidence.config, "sliding_window", None)
    if not size or not torch.equal(view.wanted & view.rows[..., None], inside(view, size) & view.rows[..., None]):
        return None  # a layer without a window, or with another mask than the window's
    causal = (view.distance <= 0) & view.keys[:, None]
    if extra.any() and not lost.any() and agrees(view, causal):
        first = int((extra.any(-1) | torch.zeros_like(view.rows)).nonzero()[0][1]) + view.past
        return "sliding window ignored", f"first bad position = {first}, config.sliding_window = {size}"
    reach = torch.where(view.seen & view.rows[..., None], -view.distance, 0)
    other = int(reach.max()) + 1
    if not agrees(view, causal & (view.distance > -other)):
        return None
    return "sliding window size", f"the engine's window is {other} tokens, config.sliding_window = {size}"


def inside(view: View, size: int) -> torch.Tensor:
    """Return which keys a causal mask with a window of ``size`` tokens shows."""
    return ((view.distance <= 0) & (view.distance > -size))[None] & view.keys[:, None]


def not_causal(evidence: Evidence, view: View) -> Found:
    """Every later token is seen, and perhaps padding as well."""
    real = view.keys[:, None].expand_as(view.seen)
    everything = agrees(view, torch.ones_like(real))
    if view.lost.any() or not view.extra.any() or not (everything or agrees(view, real)):
        return None
    padded = ", and padding as well" if everything and not bool(real.all()) else ""
    return "causal mask missing", f"every query sees all later tokens{padded}"


def agrees(view: View, pattern: torch.Tensor) -> bool:
    """Tell whether the engine's real queries see just what a pattern says."""
    rows = view.rows[..., None]
    return torch.equal(view.seen & rows, pattern.expand_as(view.seen) & rows)


RULES: tuple[Callable[[Evidence, View], Found], ...] = (
    anchor,
    inverted,
    other_rows,
    padding,
    off_by_one,
    blind_rows,
    window,
    not_causal,
)
