"""Two comparisons of one test, yesterday's and today's: which sites got worse, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ditto_core.report.markdown import code, escape, row

if TYPE_CHECKING:
    from ditto_core.compare.data import ComparisonData
    from ditto_core.compare.result import SiteResult

NOTABLE = 1.1
"""A site got worse, or better, when its error grew, or shrank, by more than this factor."""
ROWS = 10
HEAD = ("error before", "error now", "factor", "error / bound now", "")


@dataclass(frozen=True)
class Change:
    """The largest rel-L2 of a site over all steps in both runs, its margin now, and whether it held then and now.

    ``factor`` is now / before: infinite where there was no error before, or is NaN now.
    """

    site: str
    before: float
    now: float
    margin: float
    held: bool
    holds: bool

    @property
    def factor(self) -> float:
        """Return now / before."""
        if math.isnan(self.now):
            return 1.0 if math.isnan(self.before) else math.inf
        if math.isnan(self.before):
            return 0.0
        return self.now / self.before if self.before else (math.inf if self.now else 1.0)

    @property
    def worse(self) -> bool:
        """Tell whether the error grew notably, or the site no longer holds."""
        return self.factor > NOTABLE or (self.held and not self.holds)

    @property
    def better(self) -> bool:
        """Tell whether the error shrank notably, or the site holds again."""
        return not self.worse and (self.factor < 1 / NOTABLE or (self.holds and not self.held))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; infinities and NaN are strings."""
        numbers = {name: getattr(self, name) for name in ("before", "now", "margin", "factor")}
        texts = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
        return {**asdict(self), **texts, "worse": self.worse, "better": self.better}


@dataclass(frozen=True)
class Changes:
    """All changes between two comparisons, in the order of today's sites, and the sites that one of them lacks."""

    held: bool
    holds: bool
    first_bad: str
    sites: tuple[Change, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def worse(self) -> list[Change]:
        """Sites that got worse: those that no longer hold first, then by factor."""
        return sorted((c for c in self.sites if c.worse), key=lambda c: (c.holds or not c.held, -c.factor))

    @property
    def better(self) -> list[Change]:
        """Sites that got better, the most first."""
        return sorted((c for c in self.sites if c.better), key=lambda c: c.factor)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**asdict(self), "sites": [change.to_json() for change in self.sites]}


def changes(old: ComparisonData, new: ComparisonData) -> Changes:
    """Compare two comparisons site by site."""
    before, now = by_site(old), by_site(new)
    both = tuple(change(site, before[site], now[site]) for site in new.sites if site in before)
    gone = tuple(site for site in old.sites if site not in now)
    bad = new.first_bad
    first = f"{bad.site}, step {bad.step}" if bad else ""
    return Changes(bool(old), bool(new), first, both, gone, tuple(site for site in new.sites if site not in before))


def by_site(comparison: ComparisonData) -> dict[str, list[SiteResult]]:
    """Return the results of all steps by site."""
    found: dict[str, list[SiteResult]] = {}
    for result in comparison.results:
        found.setdefault(result.site, []).append(result)
    return found


def change(site: str, before: Sequence[SiteResult], now: Sequence[SiteResult]) -> Change:
    """Return how one site changed."""
    margin = largest([result.verdict.margin for result in now])
    held, holds = (all(result.ok for result in results) for results in (before, now))
    then, today = (largest([result.metrics.rel_l2 for result in results]) for results in (before, now))
    return Change(site, then, today, margin, held, holds)


def largest(numbers: Sequence[float]) -> float:
    """Return the maximum; a NaN among them is it."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def markdown(runs: Mapping[str, Changes]) -> str:
    """Return a comment for a pull request: the verdicts first, then what got worse in each test."""
    return "\n".join(part for name, found in runs.items() for part in section(name, found)) + "\n"


def section(name: str, found: Changes) -> list[str]:
    """Return the parts about one test."""
    title = f"{code(name)}: " if name else ""
    states = ["diverges", "agrees"]
    verdict = f"{states[found.held]} → {states[found.holds]}" if found.held != found.holds else states[found.holds]
    counts = f"{len(found.worse)} sites worse, {len(found.better)} better, of {len(found.sites)}"
    lines = [f"{'✅' if found.holds else '❌'} **{title}{verdict}: {counts}**", ""]
    lines += [f"- first bad site now: {code(found.first_bad)}"] if found.first_bad else []
    lines += [f"- {len(sites)} sites {what}: {listed(sites)}" for what, sites in absent(found) if sites]
    for heading, listed_changes in (("worse", found.worse), ("better", found.better)):
        lines += ["", *table(heading, listed_changes)] if listed_changes else []
    return [*lines, ""]


def absent(found: Changes) -> list[tuple[str, tuple[str, ...]]]:
    """Return the sites of one side, with what is to be said of them."""
    return [("no longer compared", found.gone), ("not compared before", found.new)]


def listed(sites: Sequence[str]) -> str:
    """Return the first sites and how many more there are."""
    more = f" and {len(sites) - ROWS} more" if len(sites) > ROWS else ""
    return ", ".join(map(code, sites[:ROWS])) + more


def table(heading: str, found: Sequence[Change]) -> list[str]:
    """Return a table of changes, the largest first."""
    lines = [
        row((f"{heading}: site", *HEAD)),
        row(("---",) * (len(HEAD) + 1)),
        *(row(cells(each)) for each in found[:ROWS]),
    ]
    return [*lines, *([f"\n{len(found) - ROWS} more"] if len(found) > ROWS else [])]


def cells(found: Change) -> tuple[str, ...]:
    """Return one row."""
    states = {(True, False): "fails now", (False, True): "holds again", (False, False): "failed before"}
    numbers = (f"{found.before:.2e}", f"{found.now:.2e}", f"{found.factor:.3g} x", f"{found.margin:.3g}")
    return (code(found.site), *numbers, escape(states.get((found.held, found.holds), "")))
