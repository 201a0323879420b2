"""The HTML report: one file that needs no network, of one comparison or several."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ditto_core.compare import text
from ditto_core.compare.table import SiteRow, site_rows
from ditto_core.errors import UsageError
from ditto_core.report.page import STATES, Budget, run_data, state
from ditto_core.system.atomic import write_atomic
from ditto_core.visible import visible

if TYPE_CHECKING:
    from jinja2 import Environment

    from ditto_core.compare.comparison import Comparison
    from ditto_core.compare.result import TokenResult
    from ditto_core.report.history import Entry
    from ditto_core.session import SessionInfo

LIMIT = 6_000_000
"""Bytes that a report may have: it is attached to issues and opened from CI."""

WORST = 20
CAUSES = 8
"""Causes, and blamed sites, that a page lists; the first of each are the likeliest."""


def html_report(
    runs: Comparison | Mapping[str, Comparison],
    *,
    limit: int = LIMIT,
    folder: Path | None = None,
    history: Sequence[Entry] = (),
) -> str:
    """Return the report as a page: a comparison, or several by name (a pytest node id, for instance).

    ``folder`` is where the page will lie, from which links lead to dumps and repros (default: the working directory).
    ``history``: what the runs of earlier commits found, which is drawn for each test. Scatter plots and worst elements
    come from the comparison's dump, if there is one. What does not fit into ``limit`` bytes is left out, details of the
    least important results first, and the page says so. Raises
    :class:`UsageError` when the extra ``report`` is not installed or there is nothing to report.
    """
    named = runs if isinstance(runs, Mapping) else {"": runs}
    if not named:
        raise UsageError("no comparison to report: no test has compared anything")
    named = {visible(name): run.shown for name, run in named.items()}
    budget = Budget()
    while True:
        page = render(named, share(budget, len(named)), folder or Path(), history)
        if len(page.encode()) <= limit or not budget.details:
            return page
        budget = budget.halved()


def write_html(runs: Comparison | Mapping[str, Comparison], path: Path) -> None:
    """Write the report. Raises :class:`UsageError` as :func:`html_report` does."""
    write_atomic(path, html_report(runs, folder=path.parent))


def share(budget: Budget, count: int) -> Budget:
    """Divide what a page may hold among its comparisons."""
    return Budget(budget.details // count, budget.points // count)


def render(named: Mapping[str, Comparison], budget: Budget, folder: Path, history: Sequence[Entry]) -> str:
    """Return the page with as much detail as the budget allows."""
    from ditto_core.version import __version__

    data = [run_data(run, budget) for run in named.values()]
    views = [view(i, name, run, folder) | trend(name, history) for i, (name, run) in enumerate(named.items())]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            runs=views,
            version=__version__,
            states=STATES,
            css=asset("report.css"),
            script=asset("report.js"),
            charts=asset("charts.js"),
            uplot=asset("uplot/uPlot.iife.min.js"),
            uplot_css=asset("uplot/uPlot.min.css"),
            payload=squeezed(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        )
    )


def view(number: int, name: str, run: Comparison, folder: Path) -> dict[str, Any]:
    """Return what the template writes of one comparison."""
    found = Counter(STATES[state(result)] for result in run.results)
    return {
        "number": number,
        "name": name,
        "run": run,
        "ok": bool(run),
        "title": f"{run.engine.label} against {run.reference.label}",
        "headline": text.headline(run),
        "where": text.where(run, run.first_bad) if run.first_bad else "",
        "numbers": text.numbers(run.first_bad) if run.first_bad else "",
        "observer": text.observer_effect(run),
        "risk": str(run.risk or "").partition(": ")[2],
        "counts": [(label, found[label]) for label in STATES[1:] if found[label]],
        "engine": session_facts(run.engine),
        "reference": session_facts(run.reference),
        "worst": [dict(zip(HEAD, cells(row), strict=True)) for row in site_rows(run)[:WORST]],
        "tokens": [token_view(row) for row in run.tokens],
        "blame": blame(run),
        "kl_lost": sum(not math.isfinite(m.kl_mean) for m in run.logits),
        "dump": link(run.dump, folder) if run.dump else None,
        "repros": [(site, link(path, folder)) for site, path in run.repros.items()],
        "commands": commands(name, run),
        "receipt": run.receipt.facts() if run.receipt else {},
    }


def trend(name: str, history: Sequence[Entry]) -> dict[str, Any]:
    """Return the picture of a test's error over the commits, where there are several."""
    from ditto_core.report.history import of_test, picture

    known = of_test(history, name)
    return {"trend": picture(known) if len(known) > 1 else "", "commits": len(known)}


HEAD = ("state", "margin", "fails", "step", "site", "metric", "value", "bound", "max_abs", "rule")


def cells(row: SiteRow) -> tuple[Any, ...]:
    """Return one row of the table of the worst sites."""
    result, v, m = row.worst, row.worst.verdict, row.worst.metrics
    numbers = (f"{v.value:.2e}", f"{v.bound:.2e}", f"{m.max_abs:.2e}")
    margin = f"{v.margin:.0f}" if 1000 <= v.margin < 1e6 else f"{v.margin:.3g}"
    where = (f"{row.failed} of {row.steps}", result.step, result.site)
    return (STATES[state(result)], margin, *where, v.metric, *numbers, v.rule)


def session_facts(info: SessionInfo) -> list[tuple[str, str]]:
    """Return what is known of a session, as names and values."""
    known = [("model", info.model), ("backend", info.backend), ("dtype", info.dtype), ("device", info.device)]
    kernels = [(kernel.name, kernel.evidence) for kernel in info.kernels]
    return [(name, str(value)) for name, value in {**dict(known), **info.facts, **dict(kernels)}.items() if value]


def token_view(row: TokenResult) -> dict[str, Any]:
    """Return a row of tokens: for each step both sides' tokens, and ``same``, ``near tie`` or ``flip``."""
    pairs = enumerate(zip(row.engine, row.reference, strict=False))
    marks = [(i, a, b, "same" if a == b else "flip" if i in row.flips else "near tie") for i, (a, b) in pairs]
    return {"row": row, "steps": marks, "count": Counter(mark for *_, mark in marks)}


def blame(run: Comparison) -> dict[str, Any] | None:
    """Return what the localization says: its verdict, the likeliest causes and the first blamed sites."""
    from ditto_core.report.localization import headline

    found = run.localization
    if found is None:
        return None
    return {
        "headline": headline(found),
        "causes": found.causes[:CAUSES],
        "sites": found.blamed[:CAUSES],
        "notes": found.notes,
    }


def link(path: str, folder: Path) -> tuple[str, str]:
    """Return where a link from a page in ``folder`` leads, relative so that both can be moved, and what it shows."""
    return quote(os.path.relpath(path, folder).replace(os.sep, "/")), path


def commands(name: str, run: Comparison) -> list[tuple[str, str]]:
    """Return what to type to see more, with what it does."""
    found = [("run this test again", f"pytest '{name}'")] if "::" in name else []
    if run.dump:
        found.append(("compare the dumped tensors", f"ditto compare {run.dump}/engine {run.dump}/reference"))
    bad = run.first_bad
    if bad is not None and run.localization is None and "::" in name:
        found.append(("measure each site's own error, and name causes", f"pytest --ditto-localize '{name}'"))
    if bad is not None and bad.site in run.tap_of and bad.site not in run.repros:
        found.append(("reproduce it without the model, in the test", f'ditto.save_repro("{bad.site}", "repro")'))
    return found


def environment() -> Environment:
    """Return jinja2's environment, which escapes everything but our own assets."""
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
    except ImportError as error:
        raise missing(error) from error
    loader = DictLoader({"report.html.j2": asset("report.html.j2")})
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def asset(name: str) -> str:
    """Return a file that belongs to the report."""
    return resources.files("ditto_core.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def squeezed(content: str) -> str:
    """Return base64 of a text's gzip, which browsers unpack by themselves."""
    return base64.b64encode(gzip.compress(content.encode(), 9, mtime=0)).decode()


def missing(error: ImportError) -> UsageError:
    """Return the error for an extra that is not installed."""
    return UsageError(f"the HTML report needs {error.name}: pip install 'pytest-ditto-engine[report]'")
