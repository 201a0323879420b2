"""The digests that an engine carries out of the cache: a copy that was damaged on its way is not opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import BuildError
from ditto_core.system.files import parse_json, read_text
from ditto_core.system.fingerprint import fingerprint, hash_file

if TYPE_CHECKING:
    from collections.abc import Iterator

DIGESTS_FILE = "digests.json"


def write_digests(directory: Path) -> None:
    """Record size and SHA-256 of every file in a copied engine's folder, in ``digests.json`` beside them."""
    files = {
        file.relative_to(directory).as_posix(): {"sha256": hash_file(file), "size": file.stat().st_size}
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name != DIGESTS_FILE
    }
    text = json.dumps({"files": files, "digest": fingerprint(files)}, indent=1)
    (directory / DIGESTS_FILE).write_text(text + "\n")


def check_digests(directory: Path) -> None:
    """Raise :class:`BuildError` for a folder whose files are not those that were copied; one without digests is taken.

    Files that came later are nobody's business.
    """
    path = directory / DIGESTS_FILE
    if not path.exists():
        return
    problem = next(problems(directory, path), "")
    if problem:
        raise BuildError(
            f"the engine in {directory} is damaged ({problem}): copy or build it again, or remove {DIGESTS_FILE} if "
            "you changed it yourself"
        )


def problems(directory: Path, path: Path) -> Iterator[str]:
    """Yield what is wrong with the files that the digests name."""
    try:
        data: dict[str, Any] = parse_json(read_text(path))
        files = data["files"]
        sound = data["digest"] == fingerprint(files)
    except (OSError, ValueError, LookupError, TypeError):
        sound = False
    if not sound:
        yield f"{DIGESTS_FILE} cannot be read"
        return
    for name, facts in files.items():
        file = directory / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != facts["size"]:
            yield f"{name} has {file.stat().st_size} bytes, expected {facts['size']}"
        elif hash_file(file) != facts["sha256"]:
            yield f"the content of {name} changed"
