"""Write comparisons to a file, in the form that its kind names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ditto_core.errors import UsageError, nearest
from ditto_core.system.atomic import write_atomic

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

MANY = ("history", "html", "json", "markdown")
"""Kinds that hold several comparisons; ``pytest --ditto-report`` writes these."""

KINDS = (*MANY, "junit", "figure")


def write_report(kind: str, runs: Mapping[str, Comparison], path: Path, history: Path | None = None) -> None:
    """Write comparisons, by name; an empty name stands for the only one.

    ``history``: the file of kind ``history`` whose commits a page shows. JSON of several is an object of comparisons by
    name. Raises :class:`UsageError` for an unknown kind, for a file that cannot be written, and where ``junit`` and
    ``figure`` get several comparisons.
    """
    if kind not in KINDS:
        raise UsageError(f"no report of kind {kind!r}, expected {', '.join(KINDS)}{nearest(kind, KINDS)}")
    if kind not in MANY and len(runs) != 1:
        raise UsageError(f"{kind} holds one comparison, there are {len(runs)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(kind, runs, path, history)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _write(kind: str, runs: Mapping[str, Comparison], path: Path, history: Path | None) -> None:
    if kind == "figure":
        from ditto_core.report.figure import write_figure

        write_figure(only(runs), path)
    elif kind == "history":
        from ditto_core.report.history import update

        update(path, runs)
    else:
        write_atomic(path, content(kind, runs, path.parent, history))


def content(kind: str, runs: Mapping[str, Comparison], folder: Path, history: Path | None) -> str:
    """Return the text of a report that will lie in ``folder``."""
    if kind == "html":
        from ditto_core.report.history import read
        from ditto_core.report.html import html_report

        return html_report(runs, folder=folder, history=read(history) if history else ())
    if kind == "markdown":
        from ditto_core.report.markdown import markdown, summary

        return markdown(only(runs)) if [*runs] == [""] else summary(runs)
    if kind == "junit":
        from ditto_core.report.junit import junit

        return junit(only(runs))
    data = {name: run.to_json() for name, run in runs.items()}
    return json.dumps(data[""] if [*data] == [""] else data, indent=1, allow_nan=False) + "\n"


def only(runs: Mapping[str, Comparison]) -> Comparison:
    """Return the only comparison."""
    (run,) = runs.values()
    return run
