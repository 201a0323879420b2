"""Safetensors files and torch's own, also those that are larger than the memory that the system promises.

Their libraries map a file so that it may be written to, privately. Linux refuses that for a file beyond memory and
swap, though only a part is ever touched. Such a file is mapped for reading only: writing to its tensors ends the
process.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ditto_core.system.files import regular
from ditto_core.trace.streamfile import CODES

DTYPES = MappingProxyType({code: dtype for dtype, code in CODES.items()})
"""Dtypes by their names in a safetensors header."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file for its names, dtypes and shapes."""
    with safe_open(regular(path), framework="np") as file:
        yield file


def load(path: Path, name: str) -> torch.Tensor:
    """Map one tensor of a safetensors file. Raises what the library raises for a damaged file or an unknown name."""
    try:
        with safe_open(regular(path), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
    except RuntimeError as error:
        if not exceeds_memory(error):
            raise
    return read_only(path, name)


def exceeds_memory(error: RuntimeError) -> bool:
    """Tell whether a file was refused because it is larger than memory."""
    return "allocate memory" in str(error)


def read_only(path: Path, name: str) -> torch.Tensor:
    """Map one tensor for reading only; one that lies unaligned in the file is copied."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    (begin, end), dtype = entry["data_offsets"], DTYPES[entry["dtype"]]
    return bytes_of(path, 8 + length + begin, end - begin, dtype).reshape(entry["shape"])


def bytes_of(path: Path, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Map ``count`` bytes of a file from ``begin`` on as a flat tensor; a copy where they lie unaligned."""
    if not count:
        return torch.empty(0, dtype=dtype)
    found = from_read_only(np.memmap(path, np.uint8, "r", begin, (count,)))
    return (found.clone() if found.data_ptr() % dtype.itemsize else found).view(dtype)


def load_outline(path: Path) -> Any:
    """Load a file of ``torch.save`` without the tensors' data: fake tensors, for :func:`filled`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.load(path, map_location="cpu", weights_only=True)


def filled(path: Path, fake: torch.Tensor) -> torch.Tensor:
    """Map the data of a fake tensor of :func:`load_outline` for reading only. Other tensors come back as they are."""
    storage = fake.untyped_storage()
    begin = getattr(storage, "_checkpoint_offset", None)
    if begin is None:
        return fake
    flat = bytes_of(path, begin, storage.nbytes(), fake.dtype)
    return flat.as_strided(fake.shape, fake.stride(), fake.storage_offset())


def from_read_only(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View an array that cannot be written to as a tensor; nothing here writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
