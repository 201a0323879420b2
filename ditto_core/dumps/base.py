"""What every reader of a dump gives: steps, names and tensors that are read when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from ditto_core.errors import TraceError, nearest
from ditto_core.session import KernelProperty
from ditto_core.sites import Tap

Held = TypeVar("Held")
Tensors = Mapping[str, torch.Tensor]
Opener = Callable[[], Tensors]
"""Opens one step."""


class Lazy(Mapping[str, torch.Tensor]):
    """A mapping from names to tensors that calls ``load`` for each tensor that is asked for."""

    def __init__(self, names: Sequence[str], load: Callable[[str], torch.Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._load = load

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def once(path: Path, items: Iterable[tuple[str, Held]], note: str = "", what: str = "tensors") -> dict[str, Held]:
    """Return named things as a mapping. Raises :class:`TraceError` when two have one name: either may be meant."""
    found: dict[str, Held] = {}
    for name, item in items:
        if name in found:
            raise TraceError(f"{path} holds two {what} that are named {name!r}{note}")
        found[name] = item
    return found


@dataclass
class Dump:
    """An opened dump.

    ``format`` is the name of its format, ``openers`` opens each step (one that is missing has no tensors), ``info``
    holds facts for reports (rank, runner, dtype), ``notes`` what the user has to know (other ranks, entries that are no
    tensors). ``taps`` and ``kernels`` are what a trace of this library knows of its session, ``complete``
    tells whether its run came to its end, ``first`` is the number that its tool gave step 0.
    """

    path: Path
    format: str
    openers: Sequence[Opener]
    info: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    taps: tuple[Tap, ...] = ()
    kernels: tuple[KernelProperty, ...] = ()
    complete: bool = True
    first: int = 0
    _open: tuple[int, Tensors] | None = None

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.openers)

    def names(self, step: int) -> list[str]:
        """Return the names of a step's tensors. Raises :class:`TraceError` when there is no such step."""
        return list(self._tensors(step))

    def load(self, step: int, name: str) -> torch.Tensor:
        """Read one tensor. Raises :class:`TraceError` when it is not there or damaged."""
        tensors = self._tensors(step)
        if name not in tensors:
            raise TraceError(f"{self.path} has no tensor {name!r} in step {step}{nearest(name, tensors)}")
        return tensors[name]

    def _tensors(self, step: int) -> Tensors:
        if self._open is None or self._open[0] != step:
            if not 0 <= step < self.steps:
                raise TraceError(f"{self.path} has no step {step}: it holds {self.steps} steps, numbered from 0")
            self._open = (step, self.openers[step]())
        return self._open[1]


@dataclass(frozen=True)
class Format:
    """One format: ``claims`` tells by a look at the path whether it is of this format, ``open`` opens it.

    ``options`` names the keywords that ``open`` takes beside the path.
    """

    name: str
    claims: Callable[[Path], bool]
    open: Callable[..., Dump]
    options: tuple[str, ...] = ()


def natural(text: str) -> list[tuple[int, int | str]]:
    """Sort key under which ``layers.2`` comes before ``layers.10``."""
    parts = filter(None, re.split(r"(\d+)", text))
    return [(0, int(part)) if re.fullmatch("[0-9]{1,18}", part) else (1, part) for part in parts]


def check_steps(folder: Path, numbers: Sequence[int]) -> None:
    """Raise :class:`TraceError` when a number of a folder's steps is missing or there twice."""
    if [*numbers] != [*range(len(numbers))]:
        raise TraceError(f"{folder} holds steps {[*numbers]}, expected 0 to {len(numbers) - 1}, each once")


def starts_with(path: Path, magic: bytes, offset: int = 0) -> bool:
    """Tell whether a file holds ``magic`` at ``offset``."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(len(magic)) == magic
