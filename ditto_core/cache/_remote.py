"""A store behind the local cache, at any URL that fsspec opens: fetched on a miss, filled after a build.

``objects/SHA256`` holds each file once, whatever entries share it; ``kind/key.json`` is an entry's manifest and is
written last. So an entry is whole or absent, two pushes of one key cannot mix, and what is fetched can be verified.
The store's content is trusted as far as its owner is: digests find damage, not malice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ditto_core.cache._entry import MANIFEST, parse_manifest
from ditto_core.errors import CacheError
from ditto_core.system.fingerprint import hash_file

OBJECTS = "objects"
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss"}
"""They have no folders, and making one would make the bucket of a mistyped URL."""


LARGEST_MANIFEST = 64 << 20
"""Bytes; a million files need as much."""


class DamagedRemote(Exception):
    """What the store holds is not what its manifest says."""


@dataclass(frozen=True)
class Remote:
    """A store at a URL such as ``s3://bucket/ditto``. Its methods raise what the file system raises."""

    url: str

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the path in it. Raises :class:`CacheError` when fsspec cannot open such a URL."""
        try:
            import fsspec

            fs, path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CacheError(
                f"cannot open the cache {self.url}: {error}; pip install 'pytest-ditto-engine[remote]'"
            ) from error
        return fs, str(path).rstrip("/")

    def fetch(self, kind: str, key: str, directory: Path) -> bool:
        """Fill an empty directory with an entry and its manifest, every byte verified; False when it is not there.

        Raises :class:`DamagedRemote` when a file is missing or its content is not what the manifest says.
        """
        text = self._read(kind, key)
        if text is None:
            return False
        for name, facts in self._parsed(kind, key, text)["files"].items():
            self._fetch_file(directory, name, facts)
        (directory / MANIFEST).write_bytes(text)
        return True

    def manifest(self, kind: str, key: str) -> dict[str, Any] | None:
        """Return an entry's manifest, None when it is not there. Raises :class:`DamagedRemote` for what is none."""
        text = self._read(kind, key)
        return None if text is None else self._parsed(kind, key, text)

    def _read(self, kind: str, key: str) -> bytes | None:
        fs, _ = self._opened
        fs.invalidate_cache()
        try:
            text: bytes = fs.cat_file(self._manifest(kind, key), start=0, end=LARGEST_MANIFEST + 1)
        except FileNotFoundError:
            return None
        return text

    def _parsed(self, kind: str, key: str, text: bytes) -> dict[str, Any]:
        if len(text) > LARGEST_MANIFEST:
            raise DamagedRemote(f"its manifest is too large, expected at most {LARGEST_MANIFEST} bytes")
        body = parse_manifest(text)
        if body is None or (body["kind"], body["key"]) != (kind, key):
            raise DamagedRemote("its manifest is damaged")
        return body

    def push(self, directory: Path, *, replace: bool = False) -> None:
        """Store the finished entry in a directory. ``replace`` overwrites files that exist."""
        fs, _ = self._opened
        fs.invalidate_cache()
        text = (directory / MANIFEST).read_bytes()
        body = json.loads(text)
        for name, facts in body["files"].items():
            target = self._object(facts["sha256"])
            if replace or self._size(target) != facts["size"]:
                self._make_parent(target)
                fs.put_file(str(directory / name), target)
        manifest = self._manifest(body["kind"], body["key"])
        self._make_parent(manifest)
        fs.pipe_file(manifest, text)

    def _fetch_file(self, directory: Path, name: str, facts: Mapping[str, Any]) -> None:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or PurePosixPath(name).is_absolute():
            raise DamagedRemote(f"its manifest names the file {name!r}")
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = self._object(facts["sha256"])
        size = self._size(source)
        if size is None:
            raise DamagedRemote(f"{name} is missing")
        if size != facts["size"]:  # before it is fetched: what does not belong there may fill the disk
            raise DamagedRemote(f"{name} has {size} bytes, expected {facts['size']}")
        self._opened[0].get_file(source, str(target))
        if hash_file(target) != facts["sha256"]:
            raise DamagedRemote(f"the content of {name} changed")

    def _size(self, path: str) -> int | None:
        try:
            return int(self._opened[0].info(path)["size"])
        except FileNotFoundError:
            return None

    def _make_parent(self, path: str) -> None:
        fs = self._opened[0]
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        if not protocols & OBJECT_STORES:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _object(self, digest: str) -> str:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise DamagedRemote(f"its manifest names the object {digest!r}")
        return f"{self._opened[1]}/{OBJECTS}/{digest}"

    def _manifest(self, kind: str, key: str) -> str:
        return f"{self._opened[1]}/{kind}/{key}.json"
