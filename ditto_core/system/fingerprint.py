"""What a thing is, by its content: files, directories and modules become SHA-256 digests."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import ModelError
from ditto_core.system.atomic import write_atomic

if TYPE_CHECKING:
    import torch

BLOCK = 4 << 20
READERS = min(8, os.cpu_count() or 1)
"""Files that are hashed at a time; hashing holds no lock of Python's."""
RACY_NS = 2_000_000_000
"""A file that changed less than this before it was hashed may change again within the clock's tick: not remembered."""


def fingerprint(*parts: Any) -> str:
    """Return the SHA-256 (hex) of the canonical JSON of ``parts``."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes, always reading it."""
    digest, buffer = hashlib.sha256(), bytearray(BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


@dataclass(frozen=True)
class DigestMemo:
    """Remembers digests of unchanged files, so that large ones are read once.

    One small JSON file below ``directory`` for each file, whatever its names. A digest is used only while size, mtime,
    ctime, device and inode are what they were: a file that was written to, replaced or restored with its old mtime is
    read again. A name more or fewer changes the ctime and not the bytes, so that hard links are not read again. A file
    of less than ``least`` bytes always is, and any on a file system that numbers no inodes.
    """

    directory: Path
    least: int = 0

    def digest(self, path: Path) -> str:
        """Return the SHA-256 (hex) of a file, from memory when it is unchanged."""
        return self._known(path) or self.read(path)

    def read(self, path: Path) -> str:
        """Return the SHA-256 (hex) of a file's bytes, and remember it."""
        before = _identity(path)
        digest = hash_file(path)
        settled = time.time_ns() - max(before["ctime_ns"], before["mtime_ns"]) > RACY_NS
        if settled and before["ino"] and before["size"] >= self.least and _identity(path) == before:
            self._write(path, before, digest)
        return digest

    def unread(self, paths: Iterable[Path]) -> int:
        """Return the bytes that :meth:`digest` would read for all of these files."""
        return sum(path.stat().st_size for path in paths if not self._known(path))

    def _known(self, path: Path) -> str:
        now = _identity(path)
        note = _read_note(self._note(now)) if now["size"] >= self.least else {}
        before, digest = note.get("identity"), note.get("sha256")
        if not isinstance(before, dict) or not isinstance(digest, str):
            return ""
        if before != now:
            if before.get("nlink") == now["nlink"] or {**before, **_named(now)} != now:
                return ""
            self._write(path, now, digest)
        return digest

    def _note(self, identity: dict[str, int]) -> Path:
        return self.directory / f"{identity['dev']:x}-{identity['ino']:x}.json"

    def _write(self, path: Path, identity: dict[str, int], digest: str) -> None:
        data = {"path": str(path.resolve()), "identity": identity, "sha256": digest}
        with suppress(OSError):  # a memo that cannot be written costs time, not correctness
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomic(self._note(identity), json.dumps(data))


def _identity(path: Path) -> dict[str, int]:
    stat = path.stat()
    names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev", "st_nlink")
    return {name.removeprefix("st_"): int(getattr(stat, name)) for name in names}


def _named(identity: dict[str, int]) -> dict[str, int]:
    """What one name more or fewer changes of a file."""
    return {name: identity[name] for name in ("ctime_ns", "nlink")}


def _read_note(note: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        data = json.loads(note.read_text())
        if isinstance(data, dict):
            return data
    return {}


def file_digest(path: Path, memo: DigestMemo | None = None) -> str:
    """Return the SHA-256 (hex) of a file. Raises :class:`ModelError` when it cannot be read."""
    try:
        return memo.digest(path) if memo else hash_file(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def digests(files: Sequence[Path], digest: Callable[[Path], str] = hash_file) -> list[str]:
    """Return the digest of each file, several read at a time."""
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(digest, files))


def matching(path: Path, patterns: Iterable[str], without: str = "") -> list[Path]:
    """Return the files below ``path`` that match any glob, ``without`` those of a name."""
    found = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    return sorted(file for file in found if file.name != without)


def directory_digest(
    path: Path, patterns: Iterable[str] = ("**/*",), memo: DigestMemo | None = None, without: str = ""
) -> str:
    """Return one digest of the files that :func:`matching` finds, by relative name and content.

    Links are followed, so a Hub snapshot counts by content. Raises :class:`ModelError` when nothing matches.
    """
    patterns = tuple(patterns)
    files = matching(path, patterns, without)
    if not files:
        raise ModelError(f"no file below {path} matches {', '.join(patterns)}")
    names = [file.relative_to(path).as_posix() for file in files]
    return fingerprint(
        [list(pair) for pair in zip(names, digests(files, partial(file_digest, memo=memo)), strict=True)]
    )


def module_digest(module: torch.nn.Module) -> str:
    """Return a digest of what a module computes: parameters and buffers by name, and :func:`state_of` the module."""
    from ditto_core.system.state import state_of

    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return fingerprint(state_of(named, module))


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many elements a tensor has, and the sum of their bits as integers: the same in any order of them."""
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().flatten()
    return flat.numel(), int(flat.view(integers).sum(dtype=torch.int64))
