"""Which value of a file is which site of the model: nearest by a loose bound, right by a tight one.

Identity and agreement are kept apart. A site and a value are one when each is the other's nearest, however wrong the
numbers are within reason; they agree when the error is within the tolerance. What agreeing values are computed from is
vouched for: an operator that hides it in the file computes it rightly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ditto_core.align.eager import WITHOUT_BIAS
from ditto_core.align.layout import Layout
from ditto_core.align.nearest import Candidate, candidates, column_blocks
from ditto_core.align.values import Value, classes, with_ancestors

LOOSE = 0.5
"""Two tensors this far apart may still be one: a fault of 50 %. Unrelated ones are 1.4 apart."""
TOLERANCES: Mapping[str, float] = {"float64": 1e-5, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""Relative L2 errors of right values by the file's dtype. Of float32 files they are 2e-7 to 3e-6, the next best
candidate is 1e4 times worse."""
AMBIGUOUS = 2.0
"""A match is ambiguous when another candidate's error is less than this many times as large."""
SMALLEST_ERROR = 1e-9


@dataclass(frozen=True)
class Match:
    """A site's value. ``ratio`` is the next best candidate's error by this one's."""

    value: int
    error: float
    layout: Layout
    ratio: float
    before_bias: bool = False

    @property
    def ambiguous(self) -> bool:
        """Whether another candidate is nearly as good."""
        return self.ratio < AMBIGUOUS


@dataclass
class Matching:
    """Both sides and what belongs together. ``matches`` are by the first site of a class of equal ones."""

    sites: Sequence[Value]
    values: list[Value]
    tolerance: float
    site_class: dict[int, int] = field(default_factory=dict)
    value_class: dict[int, int] = field(default_factory=dict)
    matches: dict[int, Match] = field(default_factory=dict)

    def title(self, site: int) -> str:
        """Return the name of a site or of one that holds the same numbers, else where the model computes it."""
        kind = self.site_class.get(site)
        same = [site, *(i for i, other in self.site_class.items() if other == kind)] if kind is not None else [site]
        named = next((self.sites[i].sites[0] for i in same if self.sites[i].sites), "")
        return named or f"{self.sites[site].name} ({self.sites[site].where})"

    def of(self, site: int) -> Match | None:
        """Return the match of a site's class."""
        kind = self.site_class.get(site)
        return None if kind is None else self.matches.get(kind)

    def right(self, match: Match | None) -> bool:
        """Tell whether a match agrees."""
        return match is not None and match.error <= self.tolerance

    @cached_property
    def agreeing(self) -> set[int]:
        """The sites, by index, whose values agree."""
        return {site for site in self.site_class if self.right(self.of(site))}

    @cached_property
    def vouched(self) -> set[int]:
        """The sites that agree, that agreeing ones are computed from, and that are equal to one of these."""
        return with_ancestors(self.sites, self.site_class, self.agreeing)

    @cached_property
    def sites_of(self) -> dict[int, list[int]]:
        """The classes of sites that a value was found to be, by the class of the value (of the packed one)."""
        found: dict[int, list[int]] = {}
        for site, match in sorted(self.matches.items()):
            value = self.values[match.value]
            key = self.value_class.get(match.value, match.value) if value.base < 0 else value.base
            found.setdefault(self.value_class.get(key, key), []).append(site)
        return found


def match(sites: Sequence[Value], values: list[Value], tolerance: float, loose: float = LOOSE) -> Matching:
    """Match the classes of both sides. Blocks of columns that were found are appended to ``values``."""
    made = Matching(sites, values, tolerance, classes(sites), classes(values))
    left, right = (sorted(set(kinds.values())) for kinds in (made.site_class, made.value_class))
    near = candidates(sites, values, left, right)
    rest = [i for i in left if not near.get(i) or near[i][0].error > tolerance]
    start = len(values)
    values += column_blocks(values, right, sites, rest)
    for site, found in candidates(sites, values, rest, range(start, len(values))).items():
        near[site] = sorted((*near.get(site, ()), *found), key=lambda c: (c.error, c.value))
    made.matches = mutual(made, near, loose)
    drop_near_misses(made)
    return made


def mutual(made: Matching, near: Mapping[int, list[Candidate]], loose: float) -> dict[int, Match]:
    """Return the matches of which each side is the other's nearest. Constants match exactly or not at all."""
    owner: dict[int, tuple[float, int]] = {}
    for site, found in near.items():
        for candidate in found:
            owner[candidate.value] = min(owner.get(candidate.value, (9.0, -1)), (candidate.error, site))
    rivals: dict[int, list[float]] = {}
    for found in near.values():
        for candidate in found:
            rivals.setdefault(candidate.value, []).append(candidate.error)
    matches = {}
    for site, found in sorted(near.items()):
        best = found[0] if found else None
        bound = made.tolerance if made.sites[site].constant else loose
        if best is None or best.error > bound or owner[best.value][1] != site:
            continue
        others = [candidate.error for candidate in found[1:]] + sorted(rivals[best.value])[1:]
        ratio = min([*others, 1.5]) / max(best.error, SMALLEST_ERROR)
        matches[site] = Match(best.value, best.error, best.layout, ratio)
    return matches


def drop_near_misses(made: Matching) -> None:
    """Match projections to their values before the bias; drop loose matches of sites that are vouched for.

    Half of the keys before the rotary embedding is 0.45 from the half after it: where a right value is computed from a
    site, the site is right and hidden, and what resembles it is another value.
    """
    for index, site in enumerate(made.sites):
        if site.operator != WITHOUT_BIAS or index not in made.site_class:
            continue
        bare, full = made.matches.get(made.site_class[index]), made.site_class.get(index - 1)
        if full is not None and bare is not None and made.right(bare) and not made.right(made.matches.get(full)):
            made.matches[full] = Match(bare.value, bare.error, bare.layout, bare.ratio, before_bias=True)
    vouched = made.vouched
    made.matches = {i: m for i, m in made.matches.items() if made.right(m) or i not in vouched}
