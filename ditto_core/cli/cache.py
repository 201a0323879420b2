"""`ditto cache`: what is in the engine cache, what a test suite needs of it, whether it is sound, how to shrink it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ditto_core.cache import ENVIRONMENT, Cache, Entry, default_root
from ditto_core.errors import UsageError
from ditto_core.system.files import parse_json
from ditto_core.system.sizes import format_age, format_size, parse_age, parse_size
from ditto_core.visible import visible

if TYPE_CHECKING:
    from ditto_core.pair.needs import Need

app = typer.Typer(no_args_is_help=True, help="List, fetch, verify and prune what the engine cache holds.")

Directory = Annotated[
    Path | None, typer.Option("--cache-dir", envvar=ENVIRONMENT, help="The cache [default: the user's cache directory]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]
MaxSize = Annotated[str | None, typer.Option(help="Keep at most this much, for instance 10GB")]
MaxAge = Annotated[str | None, typer.Option(help="Remove what was not used for this long, for instance 30d")]
Tests = Annotated[
    list[str] | None, typer.Argument(help="Test files, folders and options as pytest takes them", show_default=False)
]
AS_PYTEST = {"ignore_unknown_options": True}
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed")]


@app.command("ls")
def ls(cache_dir: Directory = None, as_json: AsJson = False) -> None:
    """List the entries, most recently used first."""
    cache = Cache(cache_dir or default_root())
    entries = cache.entries()
    if as_json:
        typer.echo(json.dumps([entry.to_json() for entry in entries], indent=1))
        return
    if entries:
        Console().print(_table(entries))
    typer.echo(f"{_summary(entries)} in {cache.root}")


@app.command("needs", context_settings=AS_PYTEST)
def needs(tests: Tests = None, as_json: AsJson = False) -> None:
    """Show which exports and engines the tests need, and where each is.

    Exit code 1 when some are to be built, or a test names what is not there.

    The tests are collected, not run. The cache is pytest's: --ditto-cache-dir, its ini key or the environment.
    """
    facts, found = _needs_of(tests or [])
    _show(found, facts, as_json)


@app.command("fetch", context_settings=AS_PYTEST)
def fetch(tests: Tests = None, as_json: AsJson = False) -> None:
    """Bring what the tests need from the store. Every byte is verified. Exit code 1 when some is missing.

    What neither has is built when the tests run.
    """
    from ditto_core.pair.needs import CACHED, STORE

    facts, found = _needs_of(tests or [])
    cache = Cache(Path(facts["cache"]), facts["remote"])
    for need in found:
        if need.where == STORE:
            cache.get_or_build(need.kind, need.key, _refuse, describe={})
    fetched = [replace(need, where=CACHED) if need.where == STORE else need for need in found]
    _show(fetched, facts, as_json)


def _refuse(directory: Path) -> None:
    raise UsageError("what the store holds is damaged; the tests build it and replace it there")


def _needs_of(tests: list[str]) -> tuple[dict[str, Any], list[Need]]:
    """Ask the plugin, in a process of pytest's own: it imports the tests. Raises :class:`UsageError` where it fails."""
    from ditto_core.pair.needs import Need

    with tempfile.TemporaryDirectory(prefix="ditto-") as folder:
        file = Path(folder) / "needs.json"
        alone = ["-n0"] if find_spec("xdist") else []  # one process collects, whatever the project's options are
        command = [sys.executable, "-m", "pytest", "-q", *tests, f"--ditto-needs={file}", *alone]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            lines = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()
            said = next((line for line in lines if line.startswith("ERROR")), lines[-1])
            raise UsageError(f"pytest could not collect the tests: {visible(said)}")
        facts: dict[str, Any] = parse_json(file.read_text())
    return facts, [Need.from_json(each) for each in facts["needs"]]


def _show(found: list[Need], facts: dict[str, Any], as_json: bool) -> None:
    """Print needs, and end with exit code 1 when some are to be built or cannot be."""
    from ditto_core.pair.needs import MISSING, UNUSABLE

    if as_json:
        typer.echo(json.dumps({**facts, "needs": [need.to_json() for need in found]}, indent=1))
    else:
        table = Table("kind", "key", "what", "size", "where", box=None, pad_edge=False)
        for need in found:
            size = format_size(need.size) if need.size else ""
            table.add_row(need.kind, need.key[:12], visible(need.what), size, need.where)
        if found:
            Console().print(table)
        places = Counter(need.where for need in found)
        told = ", ".join(f"{number} {where}" for where, number in places.items()) or "nothing needed"
        typer.echo(f"{told}: {' and '.join(filter(None, (facts['cache'], facts['remote'])))}")
    raise typer.Exit(any(need.where in (MISSING, UNUSABLE) for need in found))


@app.command("verify")
def verify(cache_dir: Directory = None, as_json: AsJson = False) -> None:
    """Read every file of every entry. Exit code 1 when something is damaged (the next use rebuilds it)."""
    cache = Cache(cache_dir or default_root())
    problems = cache.verify()
    if as_json:
        typer.echo(json.dumps([problem.__dict__ for problem in problems], indent=1))
    else:
        for problem in problems:
            typer.echo(f"{problem.kind}/{problem.key}: {problem.what}")
        typer.echo(f"{_count(len(problems), 'problem')} in {cache.root}")
    raise typer.Exit(1 if problems else 0)


@app.command("prune")
def prune(
    cache_dir: Directory = None,
    max_size: MaxSize = None,
    max_age: MaxAge = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used entries. Entries that a build holds stay."""
    if max_size is None and max_age is None:
        raise typer.BadParameter("say what to remove: --max-size 10GB, --max-age 30d, or both")
    size = None if max_size is None else parse_size(max_size)
    age = None if max_age is None else parse_age(max_age)
    removed = Cache(cache_dir or default_root()).prune(size, age, dry_run)
    if as_json:
        typer.echo(json.dumps([entry.to_json() for entry in removed], indent=1))
        return
    if removed:
        Console().print(_table(removed))
    typer.echo(f"{'would remove' if dry_run else 'removed'} {_summary(removed)}")


def _table(entries: Iterable[Entry]) -> Table:
    table = Table("kind", "key", "what", "size", "built", "used", box=None, pad_edge=False)
    now = time.time()
    for entry in entries:
        what = " ".join(str(value) for value in entry.describe.values() if isinstance(value, (str, int, float)))
        ages = (f"{format_age(now - moment)} ago" for moment in (entry.created, entry.used))
        table.add_row(entry.kind, entry.key[:12], what, format_size(entry.size), *ages)
    return table


def _summary(entries: list[Entry]) -> str:
    return f"{_count(len(entries), 'entry', 'entries')}, {format_size(sum(entry.size for entry in entries))}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
