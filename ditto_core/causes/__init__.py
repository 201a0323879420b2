"""Named causes of a divergence.

Most come from the model's own code: see :mod:`ditto_core.causes.search`. Rules say what no change of that code is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ditto_core.causes import cache, guards, runs
from ditto_core.causes.evidence import Evidence, Rule, first_cause, name_of
from ditto_core.causes.kinds import KINDS, Kind
from ditto_core.causes.mutants import NAMES
from ditto_core.compare.blame import Cause

ENTRY_POINTS = "ditto_core.causes"
"""Group of entry points: rules of other distributions, which are asked first."""

FIRST: tuple[Rule, ...] = (
    *(guards.norm_overflow, guards.masked_row, guards.not_finite, guards.zero),
    *(cache.read_back, cache.repeated, cache.quantized),
)
"""Rules that are asked before the model's code is changed, in this order."""

LAST: tuple[Rule, ...] = (guards.other_ids, guards.changed_rows)
"""Rules that say what is seen, where no change of the model's code explains it."""

OURS: tuple[Callable[..., Any], ...] = (*FIRST, *LAST, *runs.ONE_RUN, *runs.TWO_RUNS)
RULES: frozenset[str] = frozenset((*map(name_of, OURS), *(f"mutants.{name}" for name in NAMES)))
"""The names of all rules, as :attr:`Cause.rule` has them."""

LISTED = 4
"""Sites named when one cause holds at several."""

__all__ = ["FIRST", "KINDS", "LAST", "RULES", "Cause", "Evidence", "Kind", "Rule", "first_cause", "merge", "rules"]


def rules() -> tuple[Rule, ...]:
    """Return the rules that are asked first, those of other distributions before our own."""
    return (*map(foreign, entry_points(group=ENTRY_POINTS)), *FIRST)


def foreign(point: EntryPoint) -> Rule:
    """Return a rule of another distribution, which is loaded when it is asked: one that cannot be names nothing."""

    def rule(evidence: Evidence) -> Cause | None:
        found: Cause | None = point.load()(evidence)
        return found

    rule.__module__, rule.__name__ = point.module, point.name
    return rule


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
