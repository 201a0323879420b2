"""Files that are there as a whole or not at all: readers never see a part, and a crash leaves the old content."""

from __future__ import annotations

import os
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """Return the name beside ``path`` under which this process writes it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file (text in UTF-8) beside its place and move it there. Raises ``OSError`` as ``open`` does.

    What is no regular file (``/dev/stdout``, a pipe) is written to directly; a link keeps pointing where it does.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    temporary = temporary_name(target)
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
