"""A file that an option names for a result: what cannot be written is refused before the work, not after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def writable(path: Path | None) -> Path | None:
    """Return the path; the callback of an option. Raises :class:`TraceError` where it could not be written."""
    from ditto_core.system.files import check_writable

    if path is not None:
        check_writable(path)
    return path


Json = Annotated[Path | None, typer.Option("--json", help="Write the result here, as JSON.", callback=writable)]
