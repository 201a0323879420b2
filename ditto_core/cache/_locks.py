"""Who may write an entry, and who reads it: a lock for each key, and a lease for each process."""

from __future__ import annotations

import errno
import os
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCKS, LEASES = "locks", "leases"
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system without locks answers: NFS without its lock service, some of FUSE."""


def lock_of(root: Path, kind: str, key: str) -> FileLock:
    """Return the lock of an entry, not yet held."""
    folder = root / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{kind}-{key}.lock")


@contextmanager
def locked(root: Path, kind: str, key: str, say: Callable[[str], None] | None) -> Iterator[bool]:
    """Hold the lock of an entry and give True; give False where the file system has no locks.

    ``say`` is told of waiting. Without it nobody waits: :class:`filelock.Timeout` is raised. Without locks two
    processes may build the same entry, and the first to finish wins: an entry appears by one rename.
    """
    lock = lock_of(root, kind, key)
    try:
        _acquire(lock, f"{kind}/{key[:12]}", say)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _acquire(lock: FileLock, name: str, say: Callable[[str], None] | None) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if say is None:
            raise
        say(f"waiting for another process that holds {name}")
        lock.acquire(poll_interval=0.1)


class Lease:
    """The entries that this process uses, in a file that counts as long as the process holds its lock.

    Where no lock can be had (a read-only cache, a file system without locks) there is none, and pruning may take
    what is in use.
    """

    def __init__(self, root: Path) -> None:
        self._file = root / LEASES / f"{_process()}-{uuid.uuid4().hex[:8]}.txt"
        self._held: set[str] = set()
        self._lock: FileLock | None = None

    def hold(self, kind: str, key: str) -> None:
        """Keep an entry from being pruned until this process ends."""
        line = f"{kind}/{key}"
        if line in self._held:
            return
        self._held.add(line)
        with suppress(OSError):
            if self._lock is None:
                self._lock = self._locked()
            with self._file.open("a") as file:
                file.write(line + "\n")

    def _locked(self) -> FileLock:
        self._file.parent.mkdir(exist_ok=True)
        lock = FileLock(self._file.with_suffix(".lock"))
        lock.acquire(timeout=0)
        weakref.finalize(self, _end, lock, self._file)
        return lock


def leased(root: Path) -> set[str]:
    """Return the entries (``kind/key``) that other processes use. Leases of dead processes are removed."""
    found: set[str] = set()
    for file in (root / LEASES).glob("*.txt"):
        if file.name.startswith(f"{_process()}-"):
            continue
        lock = FileLock(file.with_suffix(".lock"))
        with suppress(OSError):  # it ended just now
            try:
                lock.acquire(timeout=0)
            except Timeout:
                found.update(file.read_text().split())
            else:
                _end(lock, file)
    return found


def _end(lock: FileLock, file: Path) -> None:
    with suppress(OSError):
        file.unlink(missing_ok=True)
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def _process() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"
