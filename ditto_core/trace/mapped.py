"""Safetensors files, also those that are larger than the memory that the system promises.

The library maps a file so that it may be written to, privately. Linux refuses that for a file beyond memory and swap,
though only a part is ever touched. Such a file is mapped for reading only: writing to its tensors ends the process.
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

from ditto_core.trace.streamfile import CODES

DTYPES = MappingProxyType({code: dtype for dtype, code in CODES.items()})
"""Dtypes by their names in a safetensors header."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file for its names, dtypes and shapes."""
    with safe_open(path, framework="np") as file:
        yield file


def load(path: Path, name: str) -> torch.Tensor:
    """Map one tensor of a safetensors file. Raises what the library raises for a damaged file or an unknown name."""
    try:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
    return read_only(path, name)


def read_only(path: Path, name: str) -> torch.Tensor:
    """Map one tensor for reading only; one that lies unaligned in the file is copied."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    (begin, end), dtype = entry["data_offsets"], DTYPES[entry["dtype"]]
    if begin == end:
        return torch.empty(entry["shape"], dtype=dtype)
    found = from_read_only(np.memmap(path, np.uint8, "r", 8 + length + begin, (end - begin,)))
    if found.data_ptr() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype).reshape(entry["shape"])


def from_read_only(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View an array that cannot be written to as a tensor; nothing here writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
