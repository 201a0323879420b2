"""`ditto report`: a comparison as a page, Markdown, JUnit XML, a figure, or on the model's graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ditto_core.errors import UsageError
from ditto_core.system.files import check_kept
from ditto_core.visible import visible

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison


def command(
    source: Annotated[
        Path, typer.Argument(metavar="TRACE_OR_JSON", help="JSON of a comparison, or the dump folder of a ditto test.")
    ],
    html: Annotated[Path | None, typer.Option(help="One HTML page that needs no network.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Markdown, for a pull request.")] = None,
    junit: Annotated[Path | None, typer.Option(help="JUnit XML, one test case a site.")] = None,
    figure: Annotated[Path | None, typer.Option(help="A figure for papers: .pdf, .svg or .png (matplotlib).")] = None,
    overlay: Annotated[Path | None, typer.Option(help="Node data for Model Explorer.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="The model with the errors in its nodes' metadata.")] = None,
    json: Annotated[Path | None, typer.Option(help="The comparison's JSON.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="The ONNX file that the engine was built from; --onnx and --overlay need it.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="An earlier run's: show in Markdown which sites got worse since; --markdown, --json: to files."
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="Add the run to this JSONL file, a line a test and commit, and show it; --html draws it."),
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="All sites in the table, not the worst.")] = False,
) -> None:
    """Show a comparison that was made before. Without an option, as a table."""
    from ditto_core.compare.table import ROWS, table
    from ditto_core.report.source import comparison_file, open_comparison, traces_of

    check_kept(
        {"--html": html, "--markdown": markdown, "--junit": junit, "--figure": figure, "--overlay": overlay}
        | {"--onnx": onnx, "--json": json, "--history": history},
        {"comparison": comparison_file(source), "model": model, **traces_of(source)}
        | {"earlier comparison": comparison_file(against) if against else None},
    )
    wanted = {"html": html, "markdown": markdown, "junit": junit, "figure": figure, "json": json}
    if against is not None:
        others = {**wanted, "markdown": None, "json": None}
        if any((*others.values(), overlay, onnx, history)):
            raise UsageError("--against goes with --markdown and --json alone")
        show_changes(source, against, markdown, json)
        return
    name = show_history(source, history) if history is not None else ""
    if history is not None and not any((*wanted.values(), overlay, onnx)):
        return
    found = open_comparison(source)
    for kind, path in wanted.items():
        if path is not None:
            write({name if kind == "html" else "": found}, kind, path, history)
    if overlay is not None or onnx is not None:
        write_graphs(found, overlay, onnx, model)
    if not any((*wanted.values(), overlay, onnx)):
        typer.echo(table(found, len(found.sites) if verbose else ROWS))


def show_changes(source: Path, against: Path, markdown: Path | None, json_file: Path | None) -> None:
    """Write what changed between two runs; Markdown on the screen when no file is named.

    Raises :class:`UsageError` when the runs have no test in common.
    """
    from ditto_core.report import against as changed
    from ditto_core.report.source import open_comparisons
    from ditto_core.system.atomic import write_atomic

    now, before = open_comparisons(source, named=True), open_comparisons(against, named=True)
    if len(now) == len(before) == 1 and "" in (*now, *before):
        before = dict(zip(now, before.values(), strict=True))  # one of them was never told its test's name
    runs = {name: changed.changes(before[name], found) for name, found in now.items() if name in before}
    if not runs:
        names = f"{', '.join(before) or 'one without a name'} against {', '.join(now) or 'one without a name'}"
        raise UsageError(f"{source} and {against} have no test in common: {names}")
    for name in sorted({*now} ^ {*before}):
        typer.echo(f"ditto: only {source if name in now else against} has {name}", err=True)
    text = changed.markdown(runs)
    if markdown is not None:
        write_atomic(markdown, text)
    if json_file is not None:
        write_atomic(json_file, json.dumps({name: found.to_json() for name, found in runs.items()}, indent=1) + "\n")
    if markdown is None and json_file is None:
        typer.echo(text)


def show_history(source: Path, history: Path) -> str:
    """Add the comparisons of a run to a history, and print what it holds of their tests; return the first's name."""
    from ditto_core.report.history import markdown, read
    from ditto_core.report.source import open_comparisons
    from ditto_core.report.write import write_report

    runs = open_comparisons(source, named=True)
    write_report("history", runs, history)
    names = [visible(name) for name in runs]
    typer.echo(markdown([entry for entry in read(history) if entry.test in names]))
    return next(iter(runs))


def write(runs: Mapping[str, Comparison], kind: str, path: Path, history: Path | None) -> None:
    """Write one form of a comparison. Raises :class:`UsageError` when the path cannot be written."""
    from ditto_core.report.write import write_report

    write_report(kind, runs, path, history)
    typer.echo(f"{kind}: {path}", err=True)


def write_graphs(found: Comparison, overlay: Path | None, onnx: Path | None, model: Path | None) -> None:
    """Write what belongs to the model's graph. Raises :class:`UsageError` without the graph."""
    from ditto_core.report.explorer import annotate_onnx, write_overlay

    if model is None:
        name = "--overlay" if overlay is not None else "--onnx"
        raise UsageError(f"{name} needs --model FILE: the ONNX file that the engine was built from")
    if overlay is not None:
        write_overlay(found, overlay, model)
        typer.echo(f"overlay: {overlay}", err=True)
    if onnx is not None:
        count = annotate_onnx(found, model, onnx)
        typer.echo(f"onnx: {onnx}, {count} nodes with metadata", err=True)
