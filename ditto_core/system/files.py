"""Reading files from outside, atomic text writes, and errors about files in one line."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ditto_core.errors import DittoError, TraceError, UsageError, check_type, first_line, shown
from ditto_core.system import atomic

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BLOCK = 1 << 20


def digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file, read in blocks."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest()


def path_of(value: Any, what: str) -> Path:
    """Return a path. Raises :class:`UsageError` for what can be none: another type, an empty text, a null character."""
    check_type(value, (str, os.PathLike), what, "a path")
    if not os.fspath(value) or "\0" in str(value):
        raise UsageError(f"{what} is {shown(value)}, expected a path")
    return Path(value)


def regular(path: Path) -> Path:
    """Return the path of a file. Raises ``OSError`` for a folder, and for a pipe or a device: they may never end."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", str(path))
    return path


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, without a byte order mark.

    Raises ``OSError`` (see :func:`regular`) and ``UnicodeDecodeError``.
    """
    return regular(path).read_text("utf-8-sig")


def text_lines(path: Path) -> list[str]:
    """Read the lines of a text file as :func:`read_text` does. Only a line feed ends one: JSON's texts hold U+2028."""
    return read_text(path).split("\n")


def parse_json(text: str | bytes, *, last: bool = False) -> Any:
    """Parse JSON from outside. Raises ``ValueError``, also for what is nested too deeply, and for an object that has a
    key twice: either value may be meant. ``last``: the last is, as in the tool whose file it is.
    """
    try:
        return json.loads(text, object_pairs_hook=None if last else distinct)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys. Raises ``ValueError`` when one is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise json.JSONDecodeError(f"the key {shown(twice)} is there twice", "", 0)
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML from outside. Raises ``ValueError``, also for what is nested too deeply."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return table


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal into one line that names the path."""
    try:
        yield
    except OSError as error:
        why = error.args[0][0][-1] if isinstance(error, shutil.Error) else error.strerror or error  # of a folder's copy
        raise TraceError(f"cannot write {path}: {why}") from error


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new, never a part. Folders above it are made.

    Raises :class:`TraceError` when the system refuses.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_atomic(path, text)


def check_writable(path: Path) -> None:
    """Raise :class:`TraceError` before the work whose result could not be written to ``path`` after it."""
    with writing(path):
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():  # a device is written to as it is
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = atomic.temporary_name(target)
        temporary.touch()
        temporary.unlink()


def check_kept(results: Mapping[str, Path | None], sources: Mapping[str, Path | None]) -> None:
    """Raise :class:`UsageError` where a result would be written over a file that it is made of, or into a folder."""
    for option, output in results.items():
        for name, path in sources.items():
            if output and path and output.is_file() and path.exists() and output.samefile(path):
                raise UsageError(f"{option} {output} would overwrite the {name}: name another file")
            if output and path and path.is_dir() and output.resolve().is_relative_to(path.resolve()):
                raise UsageError(f"{option} {output} lies in the {name}: name one outside of it")


@contextlib.contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Turn whatever a damaged, foreign or missing file raises into one line that names it (and ``what`` inside it).

    Parsers of untrusted bytes raise nearly anything, so every exception but our own counts as the file's fault.
    """
    place = f"{path}: {what}" if what else str(path)
    try:
        yield
    except DittoError:
        raise
    except FileNotFoundError:
        raise TraceError(f"{place} is missing") from None
    except Exception as error:
        raise TraceError(f"{place} cannot be read: {first_line(error)}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Open a text file for writing that takes the place of ``path`` when the block ends without an error."""
    with writing(path), atomic.replacing(path) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8")
        yield file
        file.detach()  # flushed, and left open for the mover
