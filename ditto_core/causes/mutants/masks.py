"""Attention masks: a small grammar of which keys a query sees, over keys, queries, window, chunk, padding, causal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import Edits, Model, Mutant, changed, is_float, place_of
from ditto_core.causes.slices import Edit, Slice, Values
from ditto_core.compare.masks import is_mask


@dataclass(frozen=True)
class View:
    """``own``: what the model shows, bool [batch, 1, query, key]; ``q`` and ``k``: indices in the whole sequence,
    [query, 1] and [1, key]; ``real``: keys that are no padding, bool [batch, 1, 1, key]."""

    own: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    real: torch.Tensor


Rule = Callable[[View], torch.Tensor]

FIXED: tuple[tuple[str, float, Kind, Rule], ...] = (
    ("shows every key", 1, "causal mask missing", lambda v: v.real | ~v.real),
    ("is not causal", 1, "causal mask missing", lambda v: v.real),
    ("has no window", 1, "sliding window ignored", lambda v: (v.k <= v.q) & v.real),
    ("shows padding", 1, "padding not masked", lambda v: v.own | ((v.k <= v.q) & ~v.real)),
    ("shows the next key as well", 1.5, "mask off by one", lambda v: v.own | ((v.k == v.q + 1) & v.real)),
    ("hides each query's own key", 1.5, "mask off by one", lambda v: v.own & (v.k != v.q)),
    ("shows what is causal or real", 1.5, "padding not masked", lambda v: (v.k <= v.q) | v.real),
    ("is that of row 0 in every row", 1.5, "rows displaced", lambda v: v.own[:1]),
    ("is inverted", 2, "mask inverted", lambda v: ~v.own),
    (
        "is transposed",
        2,
        "mask inverted",
        lambda v: v.own.transpose(-1, -2) if v.own.shape[-1] == v.own.shape[-2] else v.own,
    ),
    ("starts at the top left", 1.5, "mask anchor", lambda v: (v.k <= v.q - v.q[0]) & v.real),
)


def numbered(n: int) -> Iterator[tuple[str, float, Kind, Rule]]:
    """Yield the predicates with a number."""
    yield f"has a window of {n}", 2.5, "sliding window size", lambda v: (v.k <= v.q) & (v.q - v.k < n) & v.real
    yield f"is in chunks of {n}", 2.5, "mask shifted", lambda v: (v.k <= v.q) & (v.q // n == v.k // n) & v.real
    yield f"hides keys from {n} on", 2.5, "mask shifted", lambda v: v.own & (v.k < n)
    yield f"hides keys before {n}", 2.5, "mask shifted", lambda v: v.own & (v.k >= n)
    yield f"shows keys before {n} to all", 2.5, "mask shifted", lambda v: v.own | ((v.k < n) & v.real)
    yield f"shows nothing to queries before {n}", 2.5, "fully masked row", lambda v: v.own & (v.q >= n)
    yield f"hides the nearest {n} keys", 2.5, "mask shifted", lambda v: v.own & (v.q - v.k >= n)
    yield f"shows {n} keys ahead", 2.5, "mask shifted", lambda v: (v.k <= v.q + n) & v.real
    for first in (1, 2, 4):
        text = f"has a window of {n} and shows the first {first}"
        near: Rule = lambda v, first=first: (v.k <= v.q) & ((v.q - v.k < n) | (v.k < first)) & v.real  # type: ignore[misc]  # noqa: E731
        yield text, 3.5, "sliding window size", near


def masks(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield other masks in the place of each that the slice has."""
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not is_float(value) or node.name in ("__getitem__", "to", "expand") or not is_mask(value):
            continue
        predicates = [*FIXED, *(p for n in range(1, value.shape[-1] + 4) for p in numbered(n))]
        for text, price, kind, rule in predicates:
            what = "the mask" if i == part.root.node else f"the mask of {place_of(part, i)}"
            yield Mutant(f"{what} {text}", price, "masks", kind, {i: shown_by(rule)})
        if i != part.root.node:
            what = f"the mask of {place_of(part, i)} hides with {{}} only"
            yield Mutant(what, 3, "masks", "other constant", fit=partial(weak, i), starts=(-1.0, -4.0, -10.0))


def weak(i: int, number: float) -> Edits:
    """Hide with another number."""
    return {i: changed(lambda own: torch.where(own < 0, number, own))}


def shown_by(rule: Rule) -> Edit:
    """Make a mask of a predicate, in the model's own numbers."""

    def edit(part: Slice, values: Values, i: int) -> torch.Tensor:
        own = part.base[i]
        queries, keys = own.shape[-2:]
        real = part.seen.inputs.get("attention_mask")
        if real is None or real.ndim != 2 or real.shape[-1] != keys:
            real = torch.ones(own.shape[0], keys)
        q, k = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
        shown = rule(View(own >= 0, q, k, real.bool()[:, None, None, :])).expand(own.shape)
        return torch.zeros_like(own).masked_fill(~shown, torch.finfo(own.dtype).min)

    return edit
