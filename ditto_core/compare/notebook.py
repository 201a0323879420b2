"""A comparison in a notebook: a small table, without a script or a style sheet of its own."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ditto_core.compare import text

if TYPE_CHECKING:
    from ditto_core.compare.data import ComparisonData

ROWS = 10
HEAD = ("error / bound", "fails", "worst step", "site", "value", "bound", "max abs", "rule")


def notebook_html(comparison: ComparisonData, rows: int = ROWS) -> str:
    """Return the verdict, the error along the depth as a sparkline, and the worst sites."""
    comparison = comparison.shown
    shown = comparison.first_bad or comparison.worst
    depth = [*text.depth(comparison, shown.step)] if shown else []
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in text.cells_of(row))}</tr>"
        for row in text.site_rows(comparison)[:rows]
    )
    sign = "✓" if comparison else "✗"
    lines = [f"<p><b>{sign} {escape(text.headline(comparison))}</b><br/>{escape(sides(comparison))}</p>"]
    lines += [f"<pre>{escape(line)}</pre>" for line in depth]
    return f"<div>{''.join(lines)}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def sides(comparison: ComparisonData) -> str:
    """Return what was compared with what."""
    count = f"{len(comparison.sites)} sites, {comparison.steps} steps"
    return f"{comparison.engine.label} against {comparison.reference.label}, {count}"
