"""The HTML report: one file that needs no network, of one comparison or several."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import UsageError
from ditto_core.report import text
from ditto_core.report.page import STATES, Budget, run_data, state

if TYPE_CHECKING:
    from jinja2 import Environment

    from ditto_core.backends.base import SessionInfo
    from ditto_core.compare.comparison import Comparison, TokenResult

LIMIT = 6_000_000
"""Bytes that a report may have: it is attached to issues and opened from CI."""

WORST = 20


def html_report(runs: Comparison | Mapping[str, Comparison], *, limit: int = LIMIT) -> str:
    """Return the report as a page: a comparison, or several by name (a pytest node id, for instance).

    Scatter plots and worst elements come from the comparison's dump, where there is one. What does not fit into
    ``limit`` bytes is left out, details of the least important results first, and the page says so. Raises
    :class:`UsageError` when the extra ``report`` is not installed or there is nothing to report.
    """
    named = runs if isinstance(runs, Mapping) else {"": runs}
    if not named:
        raise UsageError("no comparison to report: no test has compared anything")
    budget = Budget()
    while True:
        page = render(named, share(budget, len(named)))
        if len(page.encode()) <= limit or not budget.details:
            return page
        budget = budget.halved()


def write_html(runs: Comparison | Mapping[str, Comparison], path: Path) -> None:
    """Write the report. Raises :class:`UsageError` as :func:`html_report` does."""
    path.write_text(html_report(runs), encoding="utf-8")


def share(budget: Budget, count: int) -> Budget:
    """Divide what a page may hold among its comparisons."""
    return Budget(budget.details // count, budget.points // count)


def render(named: Mapping[str, Comparison], budget: Budget) -> str:
    """Return the page with as much detail as the budget allows."""
    from ditto_core import __version__

    data = [run_data(run, budget) for run in named.values()]
    views = [view(i, name, run) for i, (name, run) in enumerate(named.items())]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            runs=views,
            version=__version__,
            states=STATES,
            css=asset("report.css"),
            script=asset("report.js"),
            payload=squeezed(json.dumps(data, separators=(",", ":"), allow_nan=False)),
            plotly=plotly_squeezed(),
        )
    )


def view(number: int, name: str, run: Comparison) -> dict[str, Any]:
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
        "counts": [(label, found[label]) for label in STATES[1:] if found[label]],
        "engine": session_facts(run.engine),
        "reference": session_facts(run.reference),
        "worst": [dict(zip(HEAD, cells(result), strict=True)) for result in list(run)[:WORST]],
        "tokens": [token_view(row) for row in run.tokens],
        "causes": causes(run),
        "commands": commands(name, run),
        "receipt": run.receipt.facts() if run.receipt else {},
    }


HEAD = ("state", "margin", "step", "site", "metric", "value", "bound", "max_abs", "rule")


def cells(result: Any) -> tuple[Any, ...]:
    """Return one row of the table of the worst results."""
    v, m = result.verdict, result.metrics
    numbers = (f"{v.value:.2e}", f"{v.bound:.2e}", f"{m.max_abs:.2e}")
    return (STATES[state(result)], f"{v.margin:.3g}", result.step, result.site, v.metric, *numbers, v.rule)


def session_facts(info: SessionInfo) -> list[tuple[str, str]]:
    """Return what is known of a session, as names and values."""
    known = [("model", info.model), ("backend", info.backend), ("dtype", info.dtype), ("device", info.device)]
    kernels = [(kernel.name, kernel.evidence) for kernel in info.kernels]
    return [(name, str(value)) for name, value in (*known, *info.facts.items(), *kernels) if value]


def token_view(row: TokenResult) -> dict[str, Any]:
    """Return a row of tokens: for each step both sides' tokens, and ``same``, ``near tie`` or ``flip``."""
    pairs = enumerate(zip(row.engine, row.reference, strict=False))
    marks = [(i, a, b, "same" if a == b else "near tie" if i in row.near_ties else "flip") for i, (a, b) in pairs]
    return {"row": row, "steps": marks, "count": Counter(mark for *_, mark in marks)}


def causes(run: Comparison) -> Sequence[Any]:
    """Return the named causes of a comparison, most likely first: its own, or those of its localization."""
    found: Iterable[Any] = getattr(run, "causes", ()) or getattr(getattr(run, "localization", None), "causes", ())
    return tuple(found)


def commands(name: str, run: Comparison) -> list[tuple[str, str]]:
    """Return what to type to see more, with what it does."""
    found = [("run this test again", f"pytest '{name}'")] if "::" in name else []
    if run.dump:
        found.append(("compare the dumped tensors", f"ditto compare {run.dump}/engine {run.dump}/reference"))
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


@cache
def plotly_squeezed() -> str:
    """Return Plotly's script as :func:`squeezed` does: 4.8 MB become 2.0."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise missing(error) from error
    return squeezed(get_plotlyjs())


def squeezed(content: str) -> str:
    """Return base64 of a text's gzip, which browsers unpack by themselves."""
    return base64.b64encode(gzip.compress(content.encode(), 9, mtime=0)).decode()


def missing(error: ImportError) -> UsageError:
    """Return the error for an extra that is not installed."""
    return UsageError(f"the HTML report needs {error.name}: pip install 'pytest-ditto-engine[report]'")
