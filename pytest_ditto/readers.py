"""The text of a setting becomes a value: each reader takes the text and the folder that relative paths start from.

A reader raises ``ValueError`` with what it expected.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path

from ditto_core.errors import nearest
from ditto_core.report.write import MANY

FAILED, ALL = "failed", "all"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def read_folder(text: str, base: Path) -> Path:
    """Return an absolute folder; one that is a file, or lies below a file, cannot be written to."""
    path = base / Path(text).expanduser()
    above = next(p for p in (path, *path.parents) if p.exists())
    if not above.is_dir():
        raise ValueError(f"a folder that can be written to: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"a folder that can be written to: {above} does not let you")
    return path


def read_cache(text: str, base: Path) -> Path | str:
    """Return an absolute folder, one that is there also if it can only be read, or a URL as it is; fsspec must be
    installed for one.
    """
    from ditto_core.cache import is_url

    if not is_url(text):
        path = base / Path(text).expanduser()
        return path if path.is_dir() and os.access(path, os.R_OK | os.X_OK) else read_folder(text, base)
    if find_spec("fsspec") is None:
        raise ValueError("fsspec to be installed for a URL: pip install 'pytest-ditto-engine[remote]'")
    return text


def read_file(text: str, base: Path) -> Path:
    """Return an absolute file in a folder that can be written to."""
    path = base / Path(text).expanduser()
    if path.is_dir():
        raise ValueError(f"a file: {path} is a folder")
    read_folder(str(path.parent), base)
    return path


def read_dump(text: str, _: Path) -> str:
    """Return which tests' dumps are kept."""
    if text not in (FAILED, ALL):
        raise ValueError(f"{FAILED} or {ALL}{nearest(text, (FAILED, ALL))}")
    return text


def read_threads(text: str, _: Path) -> int:
    """Return a number of threads."""
    if not text.isdecimal():
        raise ValueError("a whole number of torch threads, 0 to leave torch's own")
    return int(text)


def read_factor(text: str, _: Path) -> float:
    """Return a multiple of the noise floor."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("a multiple of the noise floor above 0, for instance 4")
    return value


def read_seconds(text: str, _: Path) -> float:
    """Return a time in seconds, 0 for never."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError("seconds, 0 for never")
    return value


def read_backend(text: str, _: Path) -> str:
    """Return the name of a registered backend."""
    from ditto_core.backends.registry import backend_names
    from ditto_core.spec import parse_backend

    names = backend_names()
    if parse_backend(text) not in names:
        raise ValueError(f"one of {', '.join(names)}{nearest(text, names)}")
    return parse_backend(text)


def read_reports(text: str, base: Path) -> tuple[tuple[str, Path], ...]:
    """Return kind and file of each report, from lines ``kind:path``."""
    return tuple(read_report(line.strip(), base) for line in text.splitlines() if line.strip())


def read_report(text: str, base: Path) -> tuple[str, Path]:
    """Return kind and file of one report; what it needs must be installed."""
    kind, colon, path = text.partition(":")
    if kind not in MANY or not path:
        hint = nearest(kind, MANY) if colon else ""
        raise ValueError(f"KIND:PATH, the kind one of {', '.join(MANY)}{hint}")
    if kind == "html" and find_spec("jinja2") is None:
        raise ValueError("jinja2 to be installed: pip install 'pytest-ditto-engine[report]'")
    file = base / Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"a file: {file} is a folder")
    read_folder(".", file.parent)
    return kind, file


def read_switch(text: str, _: Path) -> bool:
    """Return the truth of a word."""
    if text.lower() not in TRUE + FALSE:
        raise ValueError("true or false")
    return text.lower() in TRUE
