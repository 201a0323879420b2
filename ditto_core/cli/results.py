"""A file that an option names for a result: what cannot be written is refused before the work, not after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ditto_core.errors import UsageError


def writable(path: Path | None) -> Path | None:
    """Return the path; the callback of an option. Raises :class:`TraceError` where it could not be written."""
    from ditto_core.system.files import check_writable

    if path is not None:
        check_writable(path)
    return path


def check_kept(results: Mapping[str, Path | None], sources: Mapping[str, Path | None]) -> None:
    """Raise :class:`UsageError` where a result would be written over a file that it is made of, or into a folder."""
    for option, output in results.items():
        for name, path in sources.items():
            if output and path and output.exists() and path.exists() and output.samefile(path):
                raise UsageError(f"{option} {output} would overwrite the {name}: name another file")
            if output and path and path.is_dir() and output.resolve().is_relative_to(path.resolve()):
                raise UsageError(f"{option} {output} lies in the {name}: name a file outside of it")


Json = Annotated[Path | None, typer.Option("--json", help="Write the result here, as JSON.", callback=writable)]
