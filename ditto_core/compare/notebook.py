"""A comparison in a notebook: a small table and chart, without a script or a style sheet of their own."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from ditto_core.compare import text
from ditto_core.compare.table import cells_of, site_rows

if TYPE_CHECKING:
    from ditto_core.compare.data import ComparisonData
    from ditto_core.compare.result import SiteResult

ROWS = 10
WIDTH, HEIGHT, EDGE = 720, 120, 6
DECADES = 3
"""What lies further below the bound is drawn at the bottom."""
HEAD = ("error / bound", "fails", "worst step", "site", "value", "bound", "max abs", "rule")


def notebook_html(comparison: ComparisonData, rows: int = ROWS) -> str:
    """Return the verdict, a chart of the error along the depth, and the worst sites."""
    comparison = comparison.shown
    shown = comparison.first_bad or comparison.worst
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells_of(row))}</tr>"
        for row in site_rows(comparison)[:rows]
    )
    sign = "✓" if comparison else "✗"
    lines = [f"<p><b>{sign} {escape(text.headline(comparison))}</b><br/>{escape(sides(comparison))}</p>"]
    lines += [chart(comparison, shown.step)] if shown else []
    return f"<div>{''.join(lines)}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def sides(comparison: ComparisonData) -> str:
    """Return what was compared with what."""
    count = f"{len(comparison.sites)} sites, {comparison.steps} steps"
    return f"{comparison.engine.label} against {comparison.reference.label}, {count}"


def chart(comparison: ComparisonData, step: int) -> str:
    """Return error / bound of a step's judged sites in topological order as SVG: logarithmic, the bound dashed, a cross
    where a site fails. A pointer shows the site and its number.
    """
    results = sorted((r for r in comparison.results if r.step == step and r.verdict.judged), key=lambda r: r.order)
    finite = [r.verdict.margin for r in results if math.isfinite(r.verdict.margin)]
    top = math.log10(max([10.0, *finite]))

    def height(margin: float) -> float:
        level = math.log10(max(margin, 10**-DECADES)) if math.isfinite(margin) else top
        return HEIGHT - EDGE - (level + DECADES) / (top + DECADES) * (HEIGHT - 2 * EDGE)

    gap = (WIDTH - 2 * EDGE) / max(1, len(results) - 1)
    points = [(EDGE + i * gap, height(result.verdict.margin)) for i, result in enumerate(results)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = "".join(mark(x, y, result) for (x, y), result in zip(points, results, strict=True))
    return (
        f'<p>error / bound at step {step}, logarithmic; dashed: the bound</p><svg role="img" width="{WIDTH}" '
        f'height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" fill="none" stroke="currentColor">'
        f'<path stroke-dasharray="4" d="M0 {height(1.0):.1f}H{WIDTH}"/><polyline points="{line}"/>{marks}</svg>'
    )


def mark(x: float, y: float, result: SiteResult) -> str:
    """Return the mark of one site."""
    shape = f"M{x - 2:.1f} {y:.1f}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0"
    if not result.ok:
        shape = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
    said = escape(f"{result.site}: {result.verdict.margin:.3g}")
    return f'<path d="{shape}" pointer-events="all"><title>{said}</title></path>'
