"""Atomic file writes: readers never see a part, and a crash leaves the old content."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file (text in UTF-8) beside its place and move it there; see :func:`replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BufferedWriter]:
    """Open a file for writing that takes the place of ``path`` when the block ends.

    Raises ``OSError`` as ``open`` does. A link keeps pointing where it does, and a file keeps its mode. Anything that
    is not a regular file (a pipe, a device) is written to directly, and so is ``/dev/stdout``, also where it leads to
    a file.
    """
    target = Path(os.path.realpath(path))
    if (stream := own_stream(target)) is not None:
        sys.stdout.flush()
        with open(stream, "wb", closefd=False) as file:
            yield file
        return
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    temporary = temporary_name(target)
    try:
        with temporary.open("wb") as file:
            yield file
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)  # the name that the user knows
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


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
