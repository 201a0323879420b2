"""Where the values of both sides wait to be compared: large ones on disk, so that a deep model needs no more memory.

The file has no name and is gone with its last value. ``TMPDIR`` says where it lies.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

SMALL = 1 << 16
"""Bytes up to which an array stays in memory."""
RECENT = 1 << 28
"""Bytes of arrays that were read last and stay in memory."""


class Store:
    """A temporary file of float32 arrays."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="ditto-align-")  # noqa: SIM115 - it is closed with its last array
        self._end = 0
        self._recent: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()
        self._held = 0

    def keep(self, array: npt.NDArray[Any]) -> Kept:
        """Take an array."""
        data = np.ascontiguousarray(array, np.float32)
        if data.nbytes <= SMALL:
            return Kept(self, -1, data.shape, data.copy())
        made = Kept(self, self._end, data.shape)
        self._file.seek(self._end)
        self._file.write(data.data)
        self._end += data.nbytes
        return made

    def load(self, place: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return an array [shape] that was kept; it must not be changed."""
        found = self._recent.get(place)
        if found is not None:
            self._recent.move_to_end(place)
            return found
        self._file.flush()
        found = np.empty(shape, np.float32)
        os.preadv(self._file.fileno(), [found.reshape(-1).data], place)
        self._recent[place] = found
        self._held += found.nbytes
        while self._held > RECENT and len(self._recent) > 1:
            self._held -= self._recent.popitem(last=False)[1].nbytes
        return found


@dataclass(frozen=True)
class Kept:
    """An array in a store, or beside it where it is small."""

    store: Store
    place: int
    shape: tuple[int, ...]
    array: npt.NDArray[Any] | None = None

    def load(self) -> npt.NDArray[Any]:
        """Return the array; it must not be changed."""
        return self.store.load(self.place, self.shape) if self.array is None else self.array


class Lazy(Sequence["npt.NDArray[Any]"]):
    """Arrays that are read when they are asked for; with ``columns``, these of their last dimension."""

    def __init__(self, kept: Iterable[Kept | npt.NDArray[Any]], columns: tuple[int, int] | None = None) -> None:
        self._kept = list(kept)
        self._columns = columns

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The arrays' shapes; nothing is read."""
        if self._columns is None:
            return [tuple(each.shape) for each in self._kept]
        width = self._columns[1] - self._columns[0]
        return [(*each.shape[:-1], width) for each in self._kept]

    def columns(self, start: int, stop: int) -> Lazy:
        """Return columns of the arrays, which are whole."""
        return Lazy(self._kept, (start, stop))

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[npt.NDArray[Any]]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        kept = self._kept[index]
        array = kept.load() if isinstance(kept, Kept) else kept
        return array if self._columns is None else array[..., slice(*self._columns)]
