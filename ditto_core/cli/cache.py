"""`ditto cache`: what is in the engine cache, whether it is sound, and how to shrink it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ditto_core.cache import ENVIRONMENT, Cache, Entry, default_root
from ditto_core.system.sizes import format_age, format_size, parse_age, parse_size

app = typer.Typer(no_args_is_help=True, help="List, verify and prune the engine cache.")

Directory = Annotated[
    Path | None, typer.Option("--cache-dir", envvar=ENVIRONMENT, help="The cache [default: the user's cache directory]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]
MaxSize = Annotated[str | None, typer.Option(help="Keep at most this much, for instance 10GB")]
MaxAge = Annotated[str | None, typer.Option(help="Remove what was not used for this long, for instance 30d")]
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
