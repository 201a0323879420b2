"""A comparison as Markdown, for pull requests and GitHub's job summary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ditto_core.compare import text
from ditto_core.compare.table import SiteRow, cells_of, more, site_rows
from ditto_core.visible import visible

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

ROWS = 10
HEAD = ("error / bound", "fails", "worst step", "site", "value", "bound", "max abs", "rule")


def markdown(comparison: Comparison, rows: int = ROWS) -> str:
    """Return the verdict, the sides and a table of the worst results, as GitHub-flavoured Markdown."""
    comparison = comparison.shown
    sign = "✅" if comparison else "❌"
    facts = [
        f"{comparison.engine.label} against {comparison.reference.label}: {len(comparison.sites)} sites, "
        f"{comparison.steps} steps",
        text.where(comparison, comparison.first_bad) if comparison.first_bad else "",
        text.numbers(comparison.first_bad) if comparison.first_bad else "",
        text.cause(comparison),
        text.output_error(comparison),
        text.observer_effect(comparison),
        text.missing(comparison),
        str(comparison.risk or ""),
        comparison.receipt.summary if comparison.receipt else "",
    ]
    listed = "\n".join(f"- {escape(fact)}" for fact in facts if fact)
    return f"{sign} **{escape(text.headline(comparison))}**\n\n{listed}\n\n{table(comparison, rows)}"


def table(comparison: Comparison, rows: int) -> str:
    """Return the worst sites as a table."""
    found = site_rows(comparison)
    lines = [row(HEAD), row(("---",) * len(HEAD)), *(row(cells(site)) for site in found[:rows])]
    return "\n".join(lines) + "\n" + "".join(f"\n{line}\n" for line in more(found, rows))


def row(cells: tuple[str, ...]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def cells(found: SiteRow) -> tuple[str, ...]:
    """Return one site's cells; sites are code."""
    margin, fails, step, site, value, bound, largest, rule = cells_of(found)
    return (escape(margin), fails, step, code(site), escape(value), bound, largest, escape(rule))


def summary(runs: Mapping[str, Comparison]) -> str:
    """Return a table of all comparisons, then those that fail in full."""
    runs = {visible(name): run.shown for name, run in runs.items()}
    lines = [row(("", "test", "engine", "worst error / bound", "where")), row(("---",) * 5)]
    for name, run in runs.items():
        worst = run.worst
        margin, where = (f"{worst.verdict.margin:.3g}", f"{code(worst.site)}, step {worst.step}") if worst else ("", "")
        lines.append(row(("✅" if run else "❌", code(name), escape(run.engine.label), margin, where)))
    failed = [f"\n### {code(name)}\n\n{markdown(run)}" for name, run in runs.items() if not run]
    return "\n".join(["## ditto-engine", "", *lines, *failed]) + "\n"


def escape(content: str) -> str:
    """Escape what Markdown would take for markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", content)


def code(content: str) -> str:
    """Return a code span that a table can hold."""
    return f"`{content.replace('|', chr(92) + '|').replace('`', chr(39))}`"
