"""Files that are there as a whole or not at all: readers never see a part, and a crash leaves the old content."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file (text in UTF-8) beside its place and move it there. Raises ``OSError`` as ``open`` does.

    A link keeps pointing where it does, and a file keeps its mode. Anything that is not a regular file (a pipe) is
    written to directly, and so is ``/dev/stdout``, also where it leads to a file.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if (stream := own_stream(target)) is not None:
        sys.stdout.flush()
        with open(stream, "wb", closefd=False) as file:
            file.write(data)
        return
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    temporary = temporary_name(target)
    try:
        temporary.write_bytes(data)
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    finally:
        temporary.unlink(missing_ok=True)


def own_stream(target: Path) -> int | None:
    """Return this process's standard output or error where it leads to this file."""
    with contextlib.suppress(OSError):
        there = target.stat()
        for stream in (1, 2):
            if os.path.samestat(os.fstat(stream), there):
                return stream
    return None


def temporary_name(path: Path) -> Path:
    """Return the name beside ``path`` under which this thread writes it."""
    return path.with_name(f".{path.name}.{os.getpid()}{threading.get_ident()}.tmp")
