"""The directory of a cache: its by-products, and what is done where it cannot be written to."""

from __future__ import annotations

import atexit
import errno
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from ditto_core.cache._locks import LEASES, LOCKS, locked
from ditto_core.cache._root import ENVIRONMENT
from ditto_core.errors import CacheError
from ditto_core.system.fingerprint import DigestMemo

DIGESTS, STATE, SCRATCH = "digests", "state", "scratch"
OWN = (LOCKS, LEASES, DIGESTS, STATE)
"""Folders that hold no entries."""
LARGE = 64 << 20
"""Bytes of a file of an entry from which it is read again only after it changed."""
UNWRITABLE = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is over its quota",
    errno.EFBIG: "does not take a file that large",
    errno.EROFS: "is read-only",
    errno.EACCES: "cannot be written",
    errno.EPERM: "cannot be written",
    errno.ENOENT: "cannot be made",
    errno.ENOTDIR: "is not a directory",
    errno.EEXIST: "is not a directory",
}
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

OnEvent = Callable[[str], None]


class Place:
    """A directory, made on first use, that may turn out to be full or read-only."""

    root: Path

    @property
    def memo(self) -> DigestMemo:
        """Digests of the user's files, remembered in this cache."""
        return DigestMemo(self.root / DIGESTS)

    @property
    def _large(self) -> DigestMemo:
        """Digests of the entries' large files, beside the user's: by hard links they may be the same."""
        return DigestMemo(self.root / DIGESTS, LARGE)

    def state(self, name: str, file: str) -> Path:
        """Return the path of a by-product that may be lost and is not verified (timing caches, noise floors, journals).

        It can be written to: where the cache cannot, it is a copy of what the cache holds, gone when this process ends.
        """
        path = self.root / STATE / checked(name) / file
        with self._explained():
            if self._writable(path.parent):
                return path
        kept = self._apart / name / file
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                shutil.copyfile(path, kept)
        return kept

    @contextmanager
    def scratch(self, key: str, on_event: OnEvent | None = None) -> Iterator[Path]:
        """Give an empty folder on the cache's disk that goes at the end, or with the next start after a kill.

        One process at a time has the folder of a ``key``. Where the cache cannot be written, it is a temporary folder.
        """
        if not self._writable(self.root / SCRATCH):
            with tempfile.TemporaryDirectory(prefix="ditto-") as folder:
                yield Path(folder)
            return
        with self._explained(), locked(self.root, SCRATCH, checked(key), on_event or ignore):
            work = self._work(self.root / SCRATCH / key)
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)

    @cached_property
    def _apart(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="ditto-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _writable(self, folder: Path) -> bool:
        """Tell whether a folder, which is made, can be written to; other reasons than permissions are raised."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in READ_ONLY or not self.root.is_dir():
                raise
            return False
        return os.access(folder, os.W_OK)

    def _work(self, path: Path) -> Path:
        work = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        work.mkdir(parents=True)
        return work

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            missing = error.errno == errno.ENOENT and self.root.exists()  # not the cache itself, but something in it
            if missing or error.errno not in UNWRITABLE or not self._concerns(error):
                raise
            state = UNWRITABLE[error.errno]
            remedy = f"free space (`ditto cache prune`) or choose another with --ditto-cache-dir or {ENVIRONMENT}"
            raise CacheError(f"the cache directory {self.root} {state}: {remedy}") from error

    def _concerns(self, error: OSError) -> bool:
        """Tell whether an error is about the cache; a write that fails because the disk is full names no file."""
        if error.filename is None:
            return True
        name = Path(os.fsdecode(error.filename))
        return name == self.root or self.root in name.parents or name in self.root.parents


def checked(name: str) -> str:
    if not _NAME.fullmatch(name) or name in OWN:
        raise CacheError(f"{name!r} cannot name a cache entry, expected letters, digits, '.', '_' and '-'")
    return name


def ignore(message: str) -> None:
    """Swallow an event."""
