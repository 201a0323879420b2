"""A localization as text: the blamed sites with inherited and own error side by side, then the causes."""

from __future__ import annotations

from collections.abc import Iterator

from ditto_core.compare.blame import Blame, Localization
from ditto_core.visible import visible

SHOWN = 10
"""Blamed sites that are listed unless all are asked for."""

LINES = 3
"""The model's lines before a site that are listed."""


def localization_text(found: Localization, *, verbose: bool = False) -> str:
    """Return the report; ``verbose`` lists every site."""
    found = visible(found)
    return "\n".join([headline(found), *table(found, verbose), *cause_lines(found), *found.notes])


def headline(found: Localization) -> str:
    """Return the verdict in one line."""
    sites = len(found.measured)
    if not sites:
        return "no local error was measured"
    if found.first is None:
        worst = max((r for r in found.results if not r.explained), key=lambda r: r.ratio, default=None)
        near = f"; largest at {worst.site}: {worst.metrics.rel_l2:.1e} <= {worst.bound:.1e}" if worst else ""
        return f"no site of {sites} adds more than {found.dtype} rounding ({found.factor:g} x local noise floor){near}"
    count = len(found.blamed)
    more = f" and {count - 1} more of {sites} sites" if count > 1 else f", alone of {sites} sites"
    return f"blame {found.first}{more}"


def table(found: Localization, verbose: bool) -> Iterator[str]:
    """Yield one line a blamed site, or a site where all are wanted."""
    if not found.blamed and not verbose:
        return
    yield f"{'local':>9} {'floor':>9} {'inherited':>9}  step  site"
    for item in found.blamed if verbose else found.blamed[:SHOWN]:
        yield from blame_lines(item)
    if verbose:
        blamed = {item.site for item in found.blamed}
        for site, results in found.by_site.items():
            if site not in blamed:
                worst = max(results, key=lambda r: r.ratio)
                yield f"{worst.metrics.rel_l2:9.1e} {worst.floor:9.1e} {'':9}  {worst.step:4}  {site}"
    elif len(found.blamed) > SHOWN:
        yield f"… {len(found.blamed) - SHOWN} more"


def blame_lines(item: Blame) -> Iterator[str]:
    """Yield a blamed site and the line of the model that computes it."""
    inherited = "" if item.accumulated is None else f"{item.accumulated:.1e}"
    yield f"{item.local:9.1e} {item.floor:9.1e} {inherited:>9}  {item.step:4}  {item.site}"
    if item.source:
        yield f"{'':37}{item.source}"
    if item.operator:
        yield f"{'':37}operator {item.operator}"
        return
    for line in item.between[:LINES]:
        yield f"{'':37}or before it: {line}"


def cause_lines(found: Localization) -> Iterator[str]:
    """Yield the causes, each with its evidence and the next step."""
    for cause in found.causes:
        yield f"cause: {cause.kind} at {cause.site} (confidence {cause.confidence:.0%})"
        yield from (f"  {line}" for line in cause.evidence)
        yield f"  next: {cause.next_step}"
