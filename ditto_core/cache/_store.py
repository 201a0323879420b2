"""The cache directory: who may build, where, and what goes when it grows.

``root/kind/key/`` holds an entry's files and ``entry.json`` (what it is, and the size and SHA-256 of each file).
``root/locks/`` holds one lock file a key; a build happens in a temporary folder beside the entry and is renamed.
``root/leases/`` tells which entries a living process uses: pruning leaves them.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import Timeout

from ditto_core.cache._entry import (
    MANIFEST,
    Entry,
    Held,
    Problem,
    Usage,
    damage,
    discard,
    read_entry,
    read_manifest,
    sync,
    write_manifest,
)
from ditto_core.cache._locks import LOCKS, Lease, leased, locked
from ditto_core.cache._place import OWN, READ_ONLY, STATE, OnEvent, Place, checked, ignore
from ditto_core.cache._remote import DamagedRemote, Remote
from ditto_core.cache._root import ENVIRONMENT, default_root, is_url
from ditto_core.errors import CacheError, first_line

FORGOTTEN = 86400.0
"""Seconds after which an unfinished build is a dead one's where no lock can tell."""
Build = Callable[[Path], None]


@dataclass(frozen=True)
class Cache(Place):
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

    def get_or_build(
        self, kind: str, key: str, build: Build, *, describe: Mapping[str, Any], on_event: OnEvent | None = None
    ) -> Path:
        """Return the verified directory of an entry, and build it first where it is absent or damaged.

        ``build`` fills the empty directory that it is given; nothing of it is visible before it returns. Other
        processes that want the same key wait for it. ``describe`` is JSON for people; ``on_event`` is told in one
        line about waiting and about damage. What ``build`` raises passes through, save for a full or unwritable
        cache, which becomes a :class:`CacheError`. A cache that cannot be written to gives the entries that it holds.
        """
        say = on_event or ignore
        path, lease = self.root / checked(kind) / checked(key), self._lease
        with self._explained(), self._locked_or_sound(kind, key, say) as writable:
            if writable and not self._sound(path, say):
                self._shared(path, build, describe, say) if self.remote else self._build(path, build, describe)
            lease.hold(kind, key)
        return path

    @cached_property
    def _lease(self) -> Lease:
        """What this process uses; made at its first use of the cache, when what dead builds left behind goes."""
        with suppress(OSError):  # a cache that cannot be written
            self._sweep_builds()
            leased(self.root)
        return Lease(self.root)

    def _sound(self, path: Path, say: OnEvent) -> bool:
        """Tell whether an entry is there and sound, and mark it as used; one that is damaged is removed."""
        if not path.exists():
            return False
        found = damage(path, self._large.digest)
        if not found:
            with suppress(PermissionError):  # another user's entry in a shared cache
                os.utime(path / MANIFEST)
            return True
        say(f"cache entry {path.parent.name}/{path.name[:12]} is damaged ({found[0]}); it is rebuilt")
        discard(path)
        return False

    def replace(
        self, kind: str, key: str, build: Build, *, describe: Mapping[str, Any], on_event: OnEvent | None = None
    ) -> Path:
        """Build an entry in the place of one whose bytes are sound but which is not what its key stands for."""
        say = on_event or ignore
        path = self.root / checked(kind) / checked(key)
        with self._explained(), locked(self.root, kind, key, say):
            if path.exists():
                discard(path)
            self._build(path, build, describe)
            if self.remote:
                self._push(path, say, replace=True)
        return path

    def find(self, kind: str, key: str) -> Held | None:
        """Return what the manifest of an entry says: the cache's, else the store's. Nothing is verified or fetched.

        Raises :class:`CacheError` when the store cannot be read.
        """
        body = read_manifest(self.root / checked(kind) / checked(key))
        if body is not None or not self.remote:
            return None if body is None else Held(body["files"])
        try:
            body = Remote(self.remote).manifest(kind, key)
        except DamagedRemote:
            return None  # the next use builds it, and replaces it there
        except CacheError:
            raise
        except Exception as error:
            raise CacheError(f"{self.remote} cannot be read ({error_line(error)})") from error
        return None if body is None else Held(body["files"], remote=True)

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
            with self._explained(), locked(self.root, kind, key, ignore):
                found = damage(path, self._large.read) if path.exists() else []
            problems += [Problem(kind, key, what) for what in found]
        return problems

    def prune(self, max_size: int | None = None, max_age: float | None = None, dry_run: bool = False) -> list[Entry]:
        """Remove entries unused for ``max_age`` seconds, then the least recently used beyond ``max_size`` bytes.

        Files shared by several entries count once. Returns what was removed (or would be). Entries that are being
        built, or that another living process uses, stay.
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
            write_manifest(work, path.parent.name, path.name, describe, self._large.digest)
            return self._finish(work, path)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise

    def _finish(self, work: Path, path: Path) -> Path:
        try:
            work.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(work)  # without locks: another process was faster
        sync(path.parent)
        return path

    def _check_root(self) -> None:
        with self._explained():
            if self.root.exists() and not self.root.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.root))

    def _folders(self) -> Iterator[Path]:
        for path in self.root.glob("*/*"):
            if path.is_dir() and not path.name.startswith(".") and path.parent.name not in OWN:
                yield path

    def _sweep(self) -> None:
        for path in self._folders():
            if read_manifest(path) is None:
                with suppress(Timeout), locked(self.root, path.parent.name, path.name, None):
                    discard(path)
        self._sweep_builds()

    def _sweep_builds(self) -> None:
        """Remove the folders of builds whose process is dead: nobody holds their locks."""
        for path in self.root.glob("*/.*.tmp"):
            key = path.name[1:].rsplit(".", 2)[0]
            with suppress(Timeout, FileNotFoundError), locked(self.root, path.parent.name, key, None) as sure:
                if sure or time.time() - path.stat().st_mtime > FORGOTTEN:
                    shutil.rmtree(path)

    def _forget(self, since: float) -> None:
        for path in self.root.glob(f"{STATE}/*/*"):
            if path.is_file() and path.stat().st_mtime < since:
                path.unlink(missing_ok=True)

    def _remove(self, entry: Entry, dry_run: bool) -> bool:
        try:
            with locked(self.root, entry.kind, entry.key, None):
                if f"{entry.kind}/{entry.key}" in leased(self.root):
                    return False
                if not dry_run:
                    discard(entry.path)
        except Timeout:
            return False
        return True

    @contextmanager
    def _locked_or_sound(self, kind: str, key: str, say: OnEvent) -> Iterator[bool]:
        """Hold an entry's lock and give True. Where nothing can be written, give False if the entry is sound."""
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.root, kind, key, say))
            except OSError as error:
                if error.errno not in READ_ONLY or damage(self.root / kind / key, self._large.digest):
                    raise
                yield False
                return
            yield True


def error_line(error: Exception) -> str:
    """Return an exception's class and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"
