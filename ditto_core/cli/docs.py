"""`ditto docs`: the documentation of the installed version, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ditto_core.errors import UsageError, nearest


def command(
    page: Annotated[str, typer.Argument(metavar="[PAGE]", help="Print this page; else list all.")] = "",
) -> None:
    """Print a page of the documentation. Without a name, list the pages."""
    pages = {path.stem: path for path in sorted(folder().glob("*.md"))}
    if not page:
        for name, path in pages.items():
            typer.echo(f"{name:16} {title(path)}")
        return
    if page not in pages:
        raise UsageError(f"no page {page!r}{nearest(page, pages)}; `ditto docs` lists them")
    typer.echo(pages[page].read_text("utf-8"), nl=False)


def folder() -> Path:
    """Return where the pages are: inside the package as installed, else beside it in a clone."""
    package = Path(__file__).parents[1]
    installed = package / "docs"
    return installed if installed.is_dir() else package.parent / "docs"


def title(page: Path) -> str:
    """Return the first line of a page, without its mark."""
    with page.open(encoding="utf-8") as lines:
        return next(lines, "").lstrip("#").strip()
