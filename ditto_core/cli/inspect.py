"""`ditto inspect`: what is in a built engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ditto_core.visible import visible

if TYPE_CHECKING:
    from ditto_core.backends.base import EngineTensor, Inspection
    from ditto_core.engines.engine import Engine


def command(
    engine: Annotated[Path, typer.Argument(help="Engine directory, as `ditto build` prints it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    layers: Annotated[bool, typer.Option(help="Show layers and kernels.")] = True,
    against: Annotated[
        Path | None, typer.Option(help="Another engine directory: show what differs from it, module by module.")
    ] = None,
) -> None:
    """Show what is inside an engine. Inputs, outputs, profiles, layers, taps and where each tap comes from."""
    built, inside = opened(engine)
    if against is not None:
        show_changes(built, inside, against, as_json=as_json)
        return
    if as_json:
        typer.echo(json.dumps(to_json(built, inside), indent=1, default=str))
        return
    console = Console()
    title = f"{built.spec.model.label} {built.spec.label}: {len(built.taps)} taps"
    console.print(visible(title), highlight=False, markup=False)
    for table in tables(built, inside, layers):
        if table.row_count:
            console.print(table)


def opened(directory: Path) -> tuple[Engine, Inspection | None]:
    """Load an engine and look inside, where its backend can."""
    from ditto_core.backends.base import Inspectable
    from ditto_core.backends.registry import get_backend
    from ditto_core.engines.engine import Engine

    built = Engine.load(directory)
    backend = get_backend(built.spec.backend)
    return built, backend.inspect(built.directory) if isinstance(backend, Inspectable) else None


def show_changes(built: Engine, inside: Inspection | None, against: Path, *, as_json: bool) -> None:
    """Print what differs between two engines."""
    from ditto_core.engines.difference import differences
    from ditto_core.engines.difference import to_json as changes_to_json

    other, theirs = opened(against)
    changes = differences(built, inside, other, theirs)
    if as_json:
        typer.echo(json.dumps(changes_to_json(changes), indent=1))
        return
    if inside is None or theirs is None:
        blind = built if inside is None else other
        typer.echo(f"note: {blind.spec.backend} engines cannot be looked into: settings only", err=True)
    modules = sum(change.kind == "module" for change in changes)
    typer.echo(f"{len(changes)} differences, {modules} modules with other operators")
    if changes:
        rows = [(change.kind, change.place, change.before, change.now) for change in changes]
        Console().print(table("", ("what", "where", visible(against.name), visible(built.directory.name)), rows))


def to_json(engine: Engine, inside: Inspection | None) -> dict[str, Any]:
    """Return everything that is known of an engine as a JSON-ready dictionary."""
    return {
        "directory": str(engine.directory),
        "spec": engine.spec.to_json(),
        "versions": dict(engine.versions),
        "facts": dict(engine.facts),
        "taps": [tap.to_json() for tap in engine.taps],
        "refused": dict(engine.refused),
        "engine": asdict(inside) if inside else None,
    }


def tables(engine: Engine, inside: Inspection | None, layers: bool) -> Iterable[Table]:
    """Yield the tables to print, the shortest first."""
    facts = {**engine.versions, **engine.facts, **(inside.facts if inside else {})}
    yield table("facts", ("name", "value"), [(name, str(value)) for name, value in facts.items()])
    if inside:
        yield table("inputs", ("name", "dtype", "shape"), map(border, inside.inputs))
        yield table("outputs", ("name", "dtype", "shape"), map(border, inside.outputs))
        yield table("profiles", ("#", "dimension", "min", "opt", "max"), profile_rows(inside.profiles))
    yield table(
        "taps",
        ("site", "value", "class", "source"),
        [(t.site, t.value, short(t.module_class), t.source) for t in engine.taps],
    )
    yield table("not tapped", ("site", "reason"), list(engine.refused.items()))
    if inside and layers:
        rows = [(layer.name, layer.kind, layer.kernel, ", ".join(layer.modules)) for layer in inside.layers]
        yield table("layers", ("name", "kind", "kernel", "modules"), rows)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a plain table; a narrow terminal breaks words rather than cutting a source line off."""
    made = Table(
        *(Column(name, overflow="fold") for name in columns),
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for row in rows:
        made.add_row(*(escape(visible(cell)) for cell in row))
    return made


def border(tensor: EngineTensor) -> tuple[str, str, str]:
    """Return a row about an input or output."""
    return tensor.name, tensor.dtype, ", ".join(map(str, tensor.shape))


def profile_rows(profiles: Sequence[Mapping[str, tuple[int, int, int]]]) -> list[tuple[str, ...]]:
    """Return one row a profile and dimension."""
    return [(str(i), name, *map(str, sizes)) for i, profile in enumerate(profiles) for name, sizes in profile.items()]


def short(name: str) -> str:
    """Return a class name without its package."""
    return name.rpartition(".")[2]
