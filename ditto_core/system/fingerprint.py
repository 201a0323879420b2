"""What a thing is, by its content: files, directories and modules become SHA-256 digests."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import ModelError
from ditto_core.system.atomic import write_atomic

if TYPE_CHECKING:
    import torch

BLOCK = 4 << 20
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
    """Remembers digests of unchanged files, so that large weights are read once.

    One small JSON file a path below ``directory``. A digest is used only while size, mtime, ctime, device and inode
    are what they were: a file that was written to, replaced or restored with its old mtime is read again.
    """

    directory: Path

    def digest(self, path: Path) -> str:
        """Return the SHA-256 (hex) of a file, from memory when it is unchanged."""
        path = path.resolve()
        before = _identity(path)
        note = self.directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
        known = _read_note(note)
        if known.get("identity") == before and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
        digest = hash_file(path)
        settled = time.time_ns() - max(before["ctime_ns"], before["mtime_ns"]) > RACY_NS
        if settled and _identity(path) == before:
            self._write(note, {"path": str(path), "identity": before, "sha256": digest})
        return digest

    def _write(self, note: Path, data: dict[str, Any]) -> None:
        with suppress(OSError):  # a memo that cannot be written costs time, not correctness
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomic(note, json.dumps(data))


def _identity(path: Path) -> dict[str, int]:
    stat = path.stat()
    names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev")
    return {name.removeprefix("st_"): int(getattr(stat, name)) for name in names}


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


def directory_digest(path: Path, patterns: Iterable[str] = ("**/*",), memo: DigestMemo | None = None) -> str:
    """Return one digest of all files below ``path`` that match any glob, by relative name and content.

    Links are followed, so a Hub snapshot counts by content. Raises :class:`ModelError` when nothing matches.
    """
    patterns = tuple(patterns)
    files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
    if not files:
        raise ModelError(f"no file below {path} matches {', '.join(patterns)}")
    return fingerprint([[file.relative_to(path).as_posix(), file_digest(file, memo)] for file in files])


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
