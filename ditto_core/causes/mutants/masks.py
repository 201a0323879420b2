"""Attention masks: a small grammar of which keys a query sees, over keys, queries, window, chunk, padding, causal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import Function, Model, Mutant, fitted, is_float, place_of
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
    # an additive mask does not change a query that may see every key
    ("is inverted", 1.5, "mask inverted", lambda v: ~v.own | v.own.all(-1, keepdim=True)),
    ("shows padding in the place of tokens", 1.5, "mask inverted", lambda v: (v.k <= v.q) & ~v.real),
    ("has the padding of the row before", 1.5, "rows displaced", lambda v: (v.k <= v.q) & v.real.roll(1, 0)),
    ("is transposed", 2, "mask inverted", lambda v: v.own.mT if v.own.shape[-1] == v.own.shape[-2] else v.own),
    ("starts at the top left", 1.5, "mask anchor", lambda v: (v.k <= v.q - v.q[0]) & v.real),
)


def numbered(n: int) -> Iterator[tuple[str, float, Kind, Rule]]:
    """Yield the predicates with a number."""
    yield f"has a window of {n}", 1.9, "sliding window size", lambda v: (v.k <= v.q) & (v.q - v.k < n) & v.real
    yield f"is in chunks of {n}", 2.5, "mask shifted", lambda v: (v.k <= v.q) & (v.q // n == v.k // n) & v.real
    yield f"hides keys from {n} on", 2.5, "mask shifted", lambda v: v.own & (v.k < n)
    yield f"hides keys before {n}", 2.5, "mask shifted", lambda v: v.own & (v.k >= n)
    yield f"shows keys before {n} to all", 2.5, "mask shifted", lambda v: v.own | ((v.k < n) & v.real)
    yield f"shows nothing to queries before {n}", 2.5, "fully masked row", lambda v: v.own & (v.q >= n)
    yield f"hides the nearest {n} keys", 1.9, "mask shifted", lambda v: v.own & (v.q - v.k >= n)
    yield f"shows {n} keys ahead", 1.9, "mask shifted", lambda v: (v.k <= v.q + n) & v.real
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
        what = "the mask" if i == part.root.node else f"the mask of {place_of(part, i)}"
        for text, price, kind, rule in predicates:
            yield Mutant(f"{what} {text}", price, kind, {i: shown_by(rule)})
        weak: Function = lambda own, n: torch.where(own < 0, n, own)  # noqa: E731
        yield fitted(f"{what} hides with {{}} only", 3, "other constant", i, weak, (-1.0, -4.0, -10.0))


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
        # not by torch.where of two numbers, whose own dtype does not hold the lowest float64
        return torch.zeros_like(own).masked_fill(~shown, torch.finfo(own.dtype).min)

    return edit
