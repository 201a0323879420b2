"""`ditto sites`: what can be observed in a model, before anything is built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.tree import Tree

from ditto_core.cli.engine_options import Attention, Trust

if TYPE_CHECKING:
    from ditto_core.model.listing import ListedSite


def command(
    model: Annotated[
        str, typer.Argument(help="Hub id, model directory, GGUF file, or FILE.py:NAME of a callable that makes one.")
    ],
    glob: Annotated[
        list[str] | None, typer.Argument(help="Selectors, such as 'model.layers.0.**' or '**:q_rope'.")
    ] = None,
    attention: Attention = "eager",
    trust_remote_code: Trust = False,
    tree: Annotated[bool, typer.Option("--tree", help="Show the modules as a tree.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List a model's sites: class, shape, line. Without GLOB the output of each module; '**:**': inputs and ports."""
    from ditto_core.cli.model_argument import read_model
    from ditto_core.model.listing import list_sites
    from ditto_core.model.loading import load_model
    from ditto_core.spec import EngineSpec

    spec = EngineSpec.of(read_model(model, trust_remote_code), attention=attention)
    found = list_sites(load_model(spec.model, implementation=spec.attention), glob or spec.outputs)
    if as_json:
        typer.echo(json.dumps([site.to_json() for site in found], indent=1))
    elif tree:
        Console(soft_wrap=True, highlight=False).print(as_tree(spec.model.label, found))
    else:
        print_rows([cells(site) for site in found])


def print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    """Print cells in columns; no line is broken, so that each can be searched for."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def cells(site: ListedSite) -> tuple[str, str, str, str]:
    """Return site, class, shape, and the source line with the other modules whose output is the same tensor."""
    shape = f"[{', '.join(map(str, site.shape))}]"
    others = f" (also {', '.join(modules)})" if (modules := other_modules(site)) else ""
    return site.site, site.module_class.rpartition(".")[2], shape, f"{site.source}{others}".lstrip()


def other_modules(site: ListedSite) -> list[str]:
    """Return the site's aliases without those that are an input of what follows."""
    return [alias for alias in site.aliases if ":" not in alias]


def as_tree(label: str, found: Sequence[ListedSite]) -> Tree:
    """Return the sites below the modules that contain them; a port is a leaf of its module."""
    root = Tree(label, guide_style="dim")
    nodes: dict[str, Tree] = {"": root}
    for site in sorted(found, key=lambda site: site.site.count(".")):
        _, kind, shape, _ = cells(site)
        node = branch(nodes, site.site)
        node.label = f"{node.label} {kind} {shape}".replace("[", "\\[")
        for alias in other_modules(site):
            other = branch(nodes, alias)
            other.label = f"{other.label} = {site.site}"
    return root


def branch(nodes: dict[str, Tree], site: str) -> Tree:
    """Return the node of a site; what is missing above it is added."""
    if site not in nodes:
        cut = max(site.rfind("."), site.rfind(":"))
        nodes[site] = branch(nodes, site[: max(cut, 0)]).add(site[max(cut, 0) :].lstrip("."))
    return nodes[site]
