"""The cache directory: who may build, where, and what goes when it grows.

``root/kind/key/`` holds an entry's files and ``entry.json`` (what it is, and the size and SHA-256 of each file).
``root/locks/`` holds one lock file a key; a build happens in a temporary folder beside the entry and is renamed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ditto_core.cache._entry import (
    MANIFEST,
    Entry,
    Problem,
    Usage,
    damage,
    discard,
    read_entry,
    read_manifest,
    sync,
    write_manifest,
)
from ditto_core.cache._remote import DamagedRemote, Remote
from ditto_core.cache._root import ENVIRONMENT, default_root, is_url
from ditto_core.errors import CacheError, first_line
from ditto_core.system.fingerprint import DigestMemo

LOCKS, DIGESTS, STATE = "locks", "digests", "state"
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

Build = Callable[[Path], None]
OnEvent = Callable[[str], None]


@dataclass(frozen=True)
class Cache:
    """A cache directory. It is made on first use, and every method may raise :class:`CacheError`.

    ``remote``: URL of a store behind it, as fsspec takes it; empty for none.
    """

    root: Path = field(default_factory=default_root)
    remote: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).absolute())

    @classmethod
    def at(cls, place: Path | str | None = None) -> Cache:
        """Return the cache at a directory, or in front of a remote store at a URL. With a URL, the directory is the
        default one; without either, the environment decides.
        """
        where = str(place or os.environ.get(ENVIRONMENT, ""))
        return cls(remote=where) if is_url(where) else cls(Path(place)) if place else cls()

    @classmethod
    def holding(cls, directory: Path) -> Cache | None:
        """Return the cache that an entry's directory (finished or being built) belongs to, or None."""
        root = directory.absolute().parent.parent
        return cls(root) if (root / LOCKS).is_dir() else None

    @property
    def memo(self) -> DigestMemo:
        """Digests of the user's large files, remembered in this cache."""
        return DigestMemo(self.root / DIGESTS)

    def get_or_build(
        self, kind: str, key: str, build: Build, *, describe: Mapping[str, Any], on_event: OnEvent | None = None
    ) -> Path:
        """Return the verified directory of an entry, and build it first where it is absent or damaged.

        ``build`` fills the empty directory that it is given; nothing of it is visible before it returns. Other
        processes that want the same key wait for it. ``describe`` is JSON for people; ``on_event`` is told in one
        line about waiting and about damage. What ``build`` raises passes through, save for a full or unwritable
        cache, which becomes a :class:`CacheError`. A cache that cannot be written to gives the entries that it holds.
        """
        say = on_event or _ignore
        path = self.root / _checked(kind) / _checked(key)
        with self._explained(), self._locked_or_sound(kind, key, say) as locked:
            if not locked:
                return path
            self._remove_leftovers(path)
            if path.exists():
                found = damage(path)
                if not found:
                    with suppress(PermissionError):  # another user's entry in a shared cache
                        os.utime(path / MANIFEST)
                    return path
                say(f"cache entry {kind}/{key[:12]} is damaged ({found[0]}); it is rebuilt")
                discard(path)
            return self._shared(path, build, describe, say) if self.remote else self._build(path, build, describe)

    def replace(
        self, kind: str, key: str, build: Build, *, describe: Mapping[str, Any], on_event: OnEvent | None = None
    ) -> Path:
        """Build an entry in the place of one whose bytes are sound but which is not what its key stands for."""
        say = on_event or _ignore
        path = self.root / _checked(kind) / _checked(key)
        with self._explained(), self._locked(kind, key, say):
            if path.exists():
                discard(path)
            self._build(path, build, describe)
            if self.remote:
                self._push(path, say, replace=True)
        return path

    def state(self, name: str) -> Path:
        """Return a folder for by-products that may be lost and are not verified (timing caches)."""
        path = self.root / STATE / _checked(name)
        with self._explained():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def entries(self) -> list[Entry]:
        """Return all finished entries, most recently used first."""
        self._check_root()
        found = [read_entry(path.parent) for path in self.root.glob(f"*/*/{MANIFEST}")]
        return sorted((e for e in found if e), key=lambda entry: entry.used, reverse=True)

    def verify(self) -> list[Problem]:
        """Read every file of every entry and return what is wrong. Waits for an entry that is being rebuilt."""
        self._check_root()
        problems = []
        for path in sorted(self._folders()):
            kind, key = path.parent.name, path.name
            with self._explained(), self._locked(kind, key, _ignore):
                found = damage(path) if path.exists() else []
            problems += [Problem(kind, key, what) for what in found]
        return problems

    def prune(self, max_size: int | None = None, max_age: float | None = None, dry_run: bool = False) -> list[Entry]:
        """Remove entries unused for ``max_age`` seconds, then the least recently used beyond ``max_size`` bytes.

        Files shared by several entries count once. Returns what was removed (or would be); locked entries stay.
        What dead builds left behind and entries that cannot be read go too, and by-products (:meth:`state`) that were
        last written ``max_age`` ago.
        """
        self._check_root()
        with self._explained():
            keep, removed, now = self.entries(), [], time.time()
            if not dry_run:
                self._sweep()
                self._forget(now - max_age if max_age is not None else 0)
            usage = Usage(keep)
            for entry in reversed(keep):
                too_old = max_age is not None and now - entry.used > max_age
                too_much = max_size is not None and usage.total > max_size
                if (too_old or too_much) and self._remove(entry, dry_run):
                    usage.drop(entry)
                    removed.append(entry)
        return removed

    def _shared(self, path: Path, build: Build, describe: Mapping[str, Any], say: OnEvent) -> Path:
        """Fetch an entry from the remote store, else build and push it. If the store fails, a note is printed."""
        remote, damaged = Remote(self.remote), False
        work = self._work(path)
        name = f"{path.parent.name}/{path.name[:12]}"
        try:
            if remote.fetch(path.parent.name, path.name, work):
                return self._finish(work, path)
        except DamagedRemote as error:
            damaged = True
            say(f"{name} in {self.remote} is damaged ({error}); it is built here and replaced there")
        except CacheError:
            raise
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            say(f"{self.remote} cannot be read ({error_line(error)}); {name} is built here")
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._build(path, build, describe)
        self._push(path, say, replace=damaged)
        return path

    def _push(self, path: Path, say: OnEvent, *, replace: bool) -> None:
        try:
            Remote(self.remote).push(path, replace=replace)
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            name = f"{path.parent.name}/{path.name[:12]}"
            say(f"{self.remote} cannot be written ({error_line(error)}); {name} is in the local cache only")

    def _build(self, path: Path, build: Build, describe: Mapping[str, Any]) -> Path:
        work = self._work(path)
        try:
            build(work)
            write_manifest(work, path.parent.name, path.name, describe)
            return self._finish(work, path)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise

    def _work(self, path: Path) -> Path:
        work = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        work.mkdir(parents=True)
        return work

    def _finish(self, work: Path, path: Path) -> Path:
        work.rename(path)
        sync(path.parent)
        return path

    def _check_root(self) -> None:
        with self._explained():
            if self.root.exists() and not self.root.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.root))

    def _folders(self) -> Iterator[Path]:
        for path in self.root.glob("*/*"):
            if path.is_dir() and not path.name.startswith(".") and path.parent.name not in (LOCKS, DIGESTS, STATE):
                yield path

    def _remove_leftovers(self, path: Path) -> None:
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # the lock is ours: whoever made it is dead
            shutil.rmtree(leftover)

    def _sweep(self) -> None:
        for path in self._folders():
            if read_manifest(path) is None:
                with suppress(Timeout), self._lock(path.parent.name, path.name).acquire(timeout=0):
                    discard(path)
        for path in self.root.glob("*/.*.tmp"):
            target = path.with_name(path.name[1:].rsplit(".", 2)[0])
            with suppress(Timeout), self._lock(target.parent.name, target.name).acquire(timeout=0):
                self._remove_leftovers(target)

    def _forget(self, since: float) -> None:
        for path in self.root.glob(f"{STATE}/*/*"):
            if path.is_file() and path.stat().st_mtime < since:
                path.unlink(missing_ok=True)

    def _remove(self, entry: Entry, dry_run: bool) -> bool:
        try:
            with self._lock(entry.kind, entry.key).acquire(timeout=0):
                if not dry_run:
                    discard(entry.path)
        except Timeout:
            return False
        return True

    def _lock(self, kind: str, key: str) -> FileLock:
        folder = self.root / LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{kind}-{key}.lock")

    @contextmanager
    def _locked(self, kind: str, key: str, say: OnEvent) -> Iterator[None]:
        lock = self._lock(kind, key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting for another process that holds {kind}/{key[:12]}")
            lock.acquire(poll_interval=0.1)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _locked_or_sound(self, kind: str, key: str, say: OnEvent) -> Iterator[bool]:
        """Hold an entry's lock and give True. Where no lock can be written, give False if the entry is sound."""
        with ExitStack() as held:
            try:
                held.enter_context(self._locked(kind, key, say))
            except OSError as error:
                if error.errno not in READ_ONLY or damage(self.root / kind / key):
                    raise
                yield False
                return
            yield True

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


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or name in (LOCKS, DIGESTS):
        raise CacheError(f"{name!r} cannot name a cache entry, expected letters, digits, '.', '_' and '-'")
    return name


def error_line(error: Exception) -> str:
    """Return an exception's class and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"


def _ignore(message: str) -> None:
    """Swallow an event."""
