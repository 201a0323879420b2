"""A figure for papers: error, bound and noise floor along the depth, and the heat map of error / bound."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import UsageError, first_line
from ditto_core.system.atomic import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ditto_core.compare.comparison import Comparison

SPAN = 2.0
"""Decades of error / bound on either side of 1 that have colours of their own."""


def figure(comparison: Comparison, *, width: float = 7.0) -> Figure:
    """Return a matplotlib figure, ``width`` inches wide. Raises :class:`UsageError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("the figure needs matplotlib: pip install matplotlib") from error
    result = Figure(figsize=(width, width * 0.62), layout="constrained")
    depth, heat = result.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_depth(depth, comparison)
    draw_heat(result, heat, comparison)
    heat.set_xlabel("sites, in the order of the computation")
    return result


def write_figure(comparison: Comparison, path: Path) -> None:
    """Write the figure; the suffix decides the format. Raises :class:`UsageError` for one that matplotlib lacks."""
    made = figure(comparison)
    if not path.suffix:
        raise UsageError(f"{path}: a figure's name needs a suffix, expected .pdf, .svg or .png")
    drawn = BytesIO()
    try:
        made.savefig(drawn, dpi=200, format=path.suffix[1:])
    except ValueError as error:
        raise UsageError(f"{path}: {first_line(error)}") from error
    write_atomic(path, drawn.getvalue())


def draw_depth(axes: Any, comparison: Comparison) -> None:
    """Draw the errors of one step: the first bad one, else the worst."""
    shown = comparison.first_bad or comparison.worst
    place = {site: i for i, site in enumerate(comparison.sites)}
    results = sorted((r for r in comparison.results if shown and r.step == shown.step), key=lambda r: r.order)
    x = [place[r.site] for r in results]
    axes.plot(x, [r.metrics.rel_l2 for r in results], "k.-", lw=1, ms=3, label="error")
    bounds = [r.verdict.bound if r.verdict.metric == "rel_l2" else math.nan for r in results]
    axes.plot(x, bounds, "--", color="#2166ac", lw=1, label="bound")
    floors = [math.nan if r.floor is None else r.floor for r in results]
    axes.plot(x, floors, ":", color="0.4", lw=1, label="noise floor")
    bad = [(place[r.site], r.metrics.rel_l2) for r in results if not r.ok and math.isfinite(r.metrics.rel_l2)]
    axes.plot(*(zip(*bad, strict=True) if bad else ((), ())), "x", color="#b35806", ms=6, label="diverged")
    axes.set_yscale("log")
    axes.set_ylabel(f"rel-L2, step {shown.step if shown else 0}")
    axes.legend(fontsize="small", ncols=4)


def draw_heat(made: Figure, axes: Any, comparison: Comparison) -> None:
    """Draw log10(error / bound) of every step and site; what diverged is dotted."""
    place = {site: i for i, site in enumerate(comparison.sites)}
    cells = [[math.nan] * len(place) for _ in range(comparison.steps)]
    for r in comparison.results:
        margin = r.verdict.margin
        cells[r.step][place[r.site]] = max(-SPAN, min(SPAN, math.log10(margin) if margin > 0 else -SPAN))
    image = axes.imshow(cells, cmap="PuOr_r", vmin=-SPAN, vmax=SPAN, aspect="auto", interpolation="nearest")
    bad = [(place[r.site], r.step) for r in comparison.results if not r.ok]
    axes.plot(*(zip(*bad, strict=True) if bad else ((), ())), "k.", ms=2)
    axes.set_ylabel("step")
    made.colorbar(image, ax=axes, label="log10(error / bound)")
