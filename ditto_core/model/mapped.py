"""Weights mapped from a checkpoint's own file: an export links the file instead of copying them.

Where a tensor lies is read off the process's mappings, not off names: whatever a loader renamed, tied or split is
found, and what it converted or fused is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SMAPS = Path("/proc/self/smaps")
"""Linux's list of a process's mappings; elsewhere nothing is linked."""

MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) +(/.*)")
LINKED = 1 << 30
"""Bytes of weights from which they are linked. An engine has to transpose what is linked when it is loaded."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are: a file, and from where in it."""

    file: Path
    offset: int


@dataclass(frozen=True)
class Mapping:
    """A file, from ``offset`` on, at the addresses from ``start`` to ``end``."""

    start: int
    end: int
    offset: int
    file: Path


class Links:
    """Links the files of weights into a folder as they are asked for; each file once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mappings = list(unchanged())
        self._made: dict[Path, bool] = {}

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor's bytes are in a file of the folder; None where they are in none."""
        start = tensor.data_ptr()
        found = next((m for m in self._mappings if m.start <= start and start + tensor.nbytes <= m.end), None)
        if found is None or not tensor.is_contiguous() or not self._linked(found.file):
            return None
        return Place(self._folder / found.file.name, found.offset + start - found.start)

    def _linked(self, file: Path) -> bool:
        if file not in self._made:
            target = self._folder / file.name
            try:
                target.hardlink_to(file)
            except OSError:  # another file system, another user's file, or a name that is taken
                self._made[file] = target.exists() and target.samefile(file)
            else:
                self._made[file] = True
        return self._made[file]


def unchanged() -> Iterator[Mapping]:
    """Yield the mappings of files that nobody wrote into: not in memory, nor by another file in their place."""
    text = SMAPS.read_text() if SMAPS.exists() else ""
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        head = MAPPING.match(block)
        if head is None or not all(re.search(rf"\n{name}: +0 kB", block) for name in ("Anonymous", "Swap")):
            continue
        start, end, offset = (int(number, 16) for number in head.groups()[:3])
        file = Path(head[5])
        if file.is_file() and file.stat().st_ino == int(head[4]):
            yield Mapping(start, end, offset, file)
