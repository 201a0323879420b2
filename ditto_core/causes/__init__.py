"""Named causes of a divergence: rules that test an explanation on the tensors of the blamed site.

Most rules compute what the engine would put out if it had a certain fault, from the engine's own captured inputs, and
name it only when that accounts for the engine's tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ditto_core.causes.activation import activation
from ditto_core.causes.attention import attention
from ditto_core.causes.base import Cause, Evidence, Rule
from ditto_core.causes.cache import cache
from ditto_core.causes.embedding import embedding
from ditto_core.causes.generic import RULES as GENERIC
from ditto_core.causes.linear import linear
from ditto_core.causes.mask import mask
from ditto_core.causes.norm import norm
from ditto_core.causes.rope import rope

FAMILIES: tuple[Rule, ...] = (embedding, linear, norm, activation, rope, cache, mask, attention, *GENERIC)

LISTED = 4
"""Sites named when one cause holds at several."""

__all__ = ["FAMILIES", "Cause", "Evidence", "Rule", "diagnose", "merge"]


def diagnose(evidence: Evidence, rules: Iterable[Rule] = FAMILIES) -> Cause | None:
    """Return the most confident cause of one site; among equals the more specific family wins."""
    found = [cause for rule in rules if (cause := rule(evidence)) is not None]
    return max(found, key=lambda cause: cause.confidence, default=None)


def merge(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Put causes of one kind together, in the order of their first site."""
    kinds: dict[str, list[Cause]] = {}
    for cause in causes:
        kinds.setdefault(cause.kind, []).append(cause)
    return tuple(merge_kind(group) for group in kinds.values())


def merge_kind(group: Sequence[Cause]) -> Cause:
    """Describe one kind of cause at all its sites."""
    first = group[0]
    others = list(dict.fromkeys(cause.site for cause in group if cause.site != first.site))
    if not others:
        return first
    shown = ", ".join(others[:LISTED]) + (" …" if len(others) > LISTED else "")
    return replace(first, evidence=(*first.evidence, f"likewise at {len(others)} more sites: {shown}"))
