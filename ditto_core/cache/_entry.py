"""One entry on disk: its manifest, the check of every byte, and the bytes that entries share."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditto_core.system.files import parse_json, regular
from ditto_core.system.fingerprint import digests, fingerprint, hash_file
from ditto_core.version import __version__

MANIFEST = "entry.json"
Digest = Callable[[Path], str]
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)


@dataclass(frozen=True)
class Entry:
    """One finished entry. ``size`` in bytes (files shared with other entries count), times in seconds since 1970."""

    kind: str
    key: str
    path: Path
    size: int
    created: float
    used: float
    describe: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**self.__dict__, "path": str(self.path), "describe": dict(self.describe)}


@dataclass(frozen=True)
class Problem:
    """What is wrong with one entry."""

    kind: str
    key: str
    what: str


@dataclass(frozen=True)
class Held:
    """An entry that is there, by its manifest: in the cache, or in the ``remote`` store alone. ``files``: facts of each
    by name, ``size`` among them, in bytes.
    """

    files: Mapping[str, Mapping[str, Any]]
    remote: bool = False

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(int(facts["size"]) for facts in self.files.values())

    @property
    def digest(self) -> str:
        """What :func:`content_digest` gives of the entry."""
        return fingerprint(self.files)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where links are not possible. Neither may be written to."""
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        shutil.copyfile(source, target)


def damage(path: Path, digest: Digest) -> list[str]:
    """Return what is wrong with the entry in ``path``, by the digests of its files; an empty list when it is sound."""
    manifest = read_manifest(path)
    if manifest is None:
        return [f"{MANIFEST} is missing or damaged"]
    known, present = manifest["files"], {f.relative_to(path).as_posix(): f for f in _files(path)}
    problems = [f"{name} is missing" for name in sorted(known.keys() - present.keys())]
    problems += [f"{name} does not belong there" for name in sorted(present.keys() - known.keys())]
    common, sizes = sorted(known.keys() & present.keys()), {name: f.stat().st_size for name, f in present.items()}
    whole = [name for name in common if sizes[name] == known[name]["size"]]
    problems += [f"{n} has {sizes[n]} bytes, expected {known[n]['size']}" for n in common if n not in whole]
    found = zip(whole, digests([present[name] for name in whole], digest), strict=True)
    return problems + [f"the content of {n} changed" for n, sha256 in found if sha256 != known[n]["sha256"]]


def _files(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file() and f.relative_to(path).as_posix() != MANIFEST)


def write_manifest(path: Path, kind: str, key: str, describe: Mapping[str, Any], digest: Digest) -> None:
    """Record what the entry in ``path`` is and the digest of each of its files, and force all of it to the disk."""
    files = _facts(path, digest)
    for file in _files(path):
        sync(file)
    versions = {"ditto_core": __version__, "python": platform.python_version()}
    body = {"kind": kind, "key": key, "created": time.time(), "describe": dict(describe), "files": files}
    body = json.loads(json.dumps({**body, "versions": versions}, default=str))
    (path / MANIFEST).write_text(json.dumps({**body, "digest": fingerprint(body)}, indent=1) + "\n")
    for folder in (path / MANIFEST, *(p for p in path.rglob("*") if p.is_dir()), path):
        sync(folder)


def content_digest(path: Path) -> str:
    """Return one digest of the names and bytes of an entry's files, or of those of a folder that will be one."""
    manifest = read_manifest(path)
    return fingerprint(manifest["files"] if manifest else _facts(path))


def _facts(path: Path, digest: Digest = hash_file) -> dict[str, dict[str, Any]]:
    found = _files(path)
    pairs = zip(found, digests(found, digest), strict=True)
    return {f.relative_to(path).as_posix(): {"sha256": sha256, "size": f.stat().st_size} for f, sha256 in pairs}


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of the entry in ``path``, or None when it is missing, damaged or another entry's."""
    try:
        body = parse_manifest(regular(path / MANIFEST).read_bytes())
    except OSError:
        return None
    return body if body and (path.parent.name, path.name) == (body.get("kind"), body.get("key")) else None


def parse_manifest(text: bytes) -> dict[str, Any] | None:
    """Return the content of a manifest, or None when it does not fit its own digest."""
    try:
        body: dict[str, Any] = parse_json(text)
        digest = body.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return body if fingerprint(body) == digest else None


def read_entry(path: Path) -> Entry | None:
    """Return the entry in ``path`` by its manifest, or None when there is none to read."""
    body = read_manifest(path)
    if body is None:
        return None
    try:
        used = (path / MANIFEST).stat().st_mtime
    except FileNotFoundError:  # pruned by another process just now
        return None
    size = sum(file["size"] for file in body["files"].values())
    return Entry(body["kind"], body["key"], path, size, body["created"], used, body["describe"])


def discard(path: Path) -> None:
    """Remove an entry. It is renamed first, so nobody sees it half removed."""
    grave = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with suppress(FileNotFoundError):  # without locks: another process was faster
        path.rename(grave)
        shutil.rmtree(grave)


def sync(path: Path) -> None:
    """Force a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Usage:
    """Bytes on disk of a set of entries; a file that several entries share by hard links counts once."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._files = {entry.path: dict(_inodes(entry.path)) for entry in entries}
        self._links = Counter(inode for inodes in self._files.values() for inode in inodes)
        self.total = sum({k: v for inodes in self._files.values() for k, v in inodes.items()}.values())

    def drop(self, entry: Entry) -> None:
        """Take an entry out: bytes go only with the last entry that holds them."""
        for inode, size in self._files[entry.path].items():
            self._links[inode] -= 1
            if not self._links[inode]:
                self.total -= size


def _inodes(path: Path) -> Iterator[tuple[tuple[int, int], int]]:
    for file in _files(path):
        stat = file.stat()
        yield (stat.st_dev, stat.st_ino), stat.st_size
