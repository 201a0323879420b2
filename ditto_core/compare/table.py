"""A comparison as a table of its sites, under a sparkline of the error along the depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ditto_core.compare.text import summary_line

if TYPE_CHECKING:
    from ditto_core.compare.data import ComparisonData
    from ditto_core.compare.result import SiteResult

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
ROWS = 15
HEAD = ("margin", "fails", "worst step", "site", "value", "bound", "max abs", "rule")


@dataclass(frozen=True)
class SiteRow:
    """A site in a table: its worst result (one that fails, if any does), and at how many of its steps it fails."""

    worst: SiteResult
    failed: int
    steps: int


def site_rows(comparison: ComparisonData) -> list[SiteRow]:
    """Return a row for each site, worst margin first."""
    by_site: dict[str, list[SiteResult]] = {}
    for result in comparison:
        by_site.setdefault(result.site, []).append(result)
    rows = [
        SiteRow(max(found, key=lambda r: (not r.ok, r.verdict.margin)), sum(not r.ok for r in found), len(found))
        for found in by_site.values()
    ]
    return sorted(rows, key=lambda row: -row.worst.verdict.margin)


def table(comparison: ComparisonData, rows: int = ROWS) -> str:
    """Return the sites as a compact table, worst margin first, under a sparkline of the error along the depth."""
    comparison = comparison.shown
    step = comparison.first_bad.step if comparison.first_bad else comparison.worst.step if comparison.worst else 0
    found = site_rows(comparison)
    cells = [HEAD, *map(cells_of, found[:rows])]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    last = filter(None, (*more(found, rows), str(comparison.risk or "")))
    return "\n".join([summary_line(comparison), *depth(comparison, step), *lines, *last])


def more(found: Sequence[SiteRow], rows: int) -> list[str]:
    """Return the line that says what a table leaves out, if it does."""
    left = len(found) - rows
    return [f"and {left} more site{'s' * (left != 1)} with smaller margins"] if left > 0 else []


def cells_of(row: SiteRow) -> tuple[str, ...]:
    """Return one row of the table."""
    result, v = row.worst, row.worst.verdict
    mark = " not judged" if not v.judged else "" if v.ok else " recovered" if result.healed else " !"
    head = (f"{v.margin:.3g}{mark}", f"{row.failed} of {row.steps}", str(result.step), result.site)
    return (*head, f"{v.metric} {v.value:.1e}", f"{v.bound:.1e}", f"{result.metrics.max_abs:.1e}", v.rule)


def depth(comparison: ComparisonData, step: int) -> Iterator[str]:
    """Yield a line with the rel-L2 error of a step's sites in topological order, on a logarithmic scale."""
    results = sorted((r for r in comparison.results if r.step == step), key=lambda r: r.order)
    errors = [r.metrics.rel_l2 for r in results]
    finite = [e for e in errors if 0 < e < math.inf]
    if finite:
        yield f"rel_l2 by depth at step {step}, {min(finite):.0e} to {max(finite):.0e}:  {sparkline(errors)}"


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw values as bars on a logarithmic scale; of several that share a column the largest shows.

    Zero is a space, infinity and NaN are ``!``.
    """
    columns = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    tops = [largest(column) for column in (columns if len(values) > width else [[v] for v in values])]
    logs = [math.log10(v) for v in tops if 0 < v < math.inf]
    low, high = min(logs, default=0.0), max(logs, default=0.0)
    return "".join(bar(v, low, high) for v in tops)


def largest(values: Sequence[float]) -> float:
    """Return the maximum, where NaN counts as infinity."""
    return max(math.inf if math.isnan(v) else v for v in values)


def bar(value: float, low: float, high: float) -> str:
    """Return one column of a sparkline; ``low`` and ``high`` are logarithms."""
    if value == 0:
        return " "
    if value == math.inf:
        return "!"
    share = (math.log10(value) - low) / (high - low) if high > low else 1.0
    return BARS[round(share * (len(BARS) - 1))]
