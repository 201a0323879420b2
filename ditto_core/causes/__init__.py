"""Named causes of a divergence: rules that test an explanation on the tensors of the blamed site.

Most rules compute, from the engine's own captured inputs, what the engine would output if it had a certain fault. They
name the fault only if the result matches the engine's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ditto_core.causes import attention, cache, embedding, generic, linear, norm, rope, runs
from ditto_core.causes.base import Evidence, Rule, attempt, name_of
from ditto_core.causes.kinds import KINDS, Kind
from ditto_core.causes.mutants import NAMES
from ditto_core.compare.blame import Cause

FAMILIES: tuple[Rule, ...] = (
    embedding.embedding,
    linear.linear,
    norm.norm,
    rope.rope,
    cache.cache,
    *attention.RULES,
    *generic.RULES,
)
"""Applied at each blamed site; a family ignores the sites that it does not cover."""

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *embedding.RULES,
    *linear.RULES,
    *norm.RULES,
    *rope.RULES,
    *cache.PAST_RULES,
    *cache.NEW_RULES,
    *attention.RULES,
    *generic.RULES,
    *runs.ONE_RUN,
    *runs.TWO_RUNS,
)
RULES: frozenset[str] = frozenset((*map(name_of, FUNCTIONS), *(f"mutants.{name}" for name in NAMES)))
"""The names of all rules, as :attr:`Cause.rule` has them."""

LISTED = 4
"""Sites named when one cause holds at several."""

__all__ = ["FAMILIES", "KINDS", "RULES", "Cause", "Evidence", "Kind", "Rule", "diagnose", "merge"]


def diagnose(evidence: Evidence, rules: Iterable[Rule] = FAMILIES) -> Cause | None:
    """Return the most confident cause of one site; among equals the more specific family wins."""
    found = [cause for rule in rules if (cause := attempt(evidence, rule)) is not None]
    return max(found, key=lambda cause: cause.confidence, default=None)


def merge(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Merge causes of one kind, in the order of their first site."""
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
    sites = "1 more site" if len(others) == 1 else f"{len(others)} more sites"
    return replace(first, evidence=(*first.evidence, f"likewise at {sites}: {shown}"))
