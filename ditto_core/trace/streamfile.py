"""safetensors files written one tensor at a time: a step of any size costs the memory of its largest tensor."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import torch

from ditto_core.errors import TraceError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch dtype -> the name that the safetensors format gives it."""

_ENTRY = 256  # bytes that one header entry needs beside its name: dtype, up to nine dimensions, two offsets
_PREFIX = 8


class SafetensorsStream:
    """Writes ``path`` tensor by tensor, in the order of arrival.

    Room for the header is reserved for ``names``, plus some 200 more tensors with names of ordinary length.
    Raises ``OSError`` when the disk refuses, :class:`TraceError` for a dtype that the format does not know or a
    name given twice.
    """

    def __init__(self, path: Path, names: tuple[str, ...] = ()) -> None:
        room = (1 << 16) + sum(len(json.dumps(name)) + _ENTRY for name in names)
        self._room = room + -room % _PREFIX
        self._entries: dict[str, dict[str, Any]] = {}
        self._offset = 0
        self._path = path
        self._file = path.open("wb")
        self._file.seek(_PREFIX + self._room)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a CPU tensor of any strides."""
        if tensor.dtype not in CODES:
            raise TraceError(f"{name!r} has dtype {short(tensor.dtype)}, which the safetensors format cannot hold")
        if name in self._entries:
            raise TraceError(f"{name!r} was written twice in one step")
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._file.write(data.data)
        end = self._offset + data.nbytes
        self._entries[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, end],
        }
        self._offset = end

    def close(self) -> None:
        """Write the header: only now is the file valid."""
        header = json.dumps(self._entries).encode()
        if len(header) > self._room:
            raise TraceError(f"{self._path.name} needs a header of {len(header)} bytes, reserved are {self._room}")
        with self._file as file:
            file.truncate(_PREFIX + self._room + self._offset)
            file.seek(0)
            file.write(struct.pack("<Q", self._room) + header.ljust(self._room))

    def discard(self) -> None:
        """Remove the unfinished file."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def short(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix: ``float32``."""
    return str(dtype).removeprefix("torch.")
