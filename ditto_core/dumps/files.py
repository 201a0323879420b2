"""Plain files of tensors: ``.safetensors``, ``.npz``, ``.npy``, ``.pt``; folders of steps and folders of arrays.

numpy reads with ``allow_pickle=False``, torch with ``weights_only=True``: no code in a file is run.
"""

from __future__ import annotations

import errno
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ditto_core.dumps.base import Dump, Format, Lazy, Tensors, check_steps, natural, once, starts_with
from ditto_core.errors import TraceError
from ditto_core.system.files import reading, regular
from ditto_core.trace import mapped

_STEP = re.compile(r"step_?(\d+)\.(safetensors|npz|pt|pth)")
_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL (\S+)")


def open_safetensors(path: Path) -> Tensors:
    """Open a safetensors file; each tensor is mapped into memory when it is asked for."""

    def load(name: str) -> torch.Tensor:
        with reading(path, name):
            return mapped.load(path, name)

    with reading(path), mapped.opened(path) as file:
        return Lazy(list(file.keys()), load)


def from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor that shares the array's memory where the byte order allows. Raises ``TypeError``."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "V":
        raise TypeError(f"dtype {array.dtype} (numpy has no bfloat16 or fp8: the file lost the real dtype)")
    return torch.from_numpy(array) if array.flags.writeable else mapped.from_read_only(array)


def load_npy(path: Path) -> torch.Tensor:
    """Map one ``.npy`` file into memory: copy on write, or for reading only where it exceeds the memory there is."""
    with reading(path):
        if not starts_with(path, _NPY):
            raise TraceError(f"{path} cannot be read: it is not a .npy file (pickled objects are not read)")
        try:
            return from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
        return from_numpy(np.load(path, mmap_mode="r", allow_pickle=False))


def open_npy(path: Path) -> Tensors:
    """Open one ``.npy`` file as a step with one tensor, named like the file."""
    return Lazy([path.stem], lambda _name: load_npy(path))


def open_npz(path: Path) -> Tensors:
    """Open a ``.npz`` archive; each array is read when it is asked for."""

    def load(name: str) -> torch.Tensor:
        with reading(path, name), np.load(path, allow_pickle=False) as archive:
            return from_numpy(archive[name])

    with reading(path), zipfile.ZipFile(regular(path)) as archive:
        return Lazy(list(once(path, ((n.removesuffix(".npy"), n) for n in archive.namelist()))), load)


def open_pt(path: Path) -> Tensors:
    """Open what ``torch.save`` wrote: a tensor, or dictionaries and lists of them (names are joined with dots)."""
    with reading(path):
        return once(path, tensors_of(path), " when nested names are joined")


def tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of a file of ``torch.save``."""
    try:
        value = load_pt(regular(path), str(path))
    except RuntimeError as error:
        if not mapped.exceeds_memory(error):
            raise
        value = mapped.load_outline(path)
    for name, tensor in flatten(value, ""):
        yield name, mapped.filled(path, tensor)


def load_pt(source: Path | IO[bytes], name: str) -> Any:
    """Load with ``weights_only=True``; a file of the zip format is mapped into memory."""
    zipped = isinstance(source, Path) and starts_with(source, _ZIP)
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        reason = f"it holds the pickled object {found[1]}" if found else "it is not a file of tensors"
        raise TraceError(f"{name} cannot be read: {reason}; only tensors are loaded, nothing was run") from error


def flatten(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dictionaries and lists; a scalar becomes a tensor without dimensions.

    Raises ``TypeError`` for anything else.
    """
    if isinstance(value, torch.Tensor):
        yield name or "tensor", with_numbers(value.detach(), name)
    elif isinstance(value, bool | int | float):
        yield name or "tensor", torch.tensor(value)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from flatten(item, f"{name}.{key}" if name else str(key))
    elif value is not None:
        raise TypeError(f"entry {name!r} is of type {type(value).__name__}, expected tensors")


def with_numbers(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a sparse or quantized tensor with a number an element. Raises ``TypeError`` for one without numbers."""
    if tensor.is_meta or tensor.is_nested:
        kind = "on the meta device" if tensor.is_meta else "nested"
        raise TypeError(f"entry {name!r} is {kind}, expected a tensor with its numbers")
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.dequantize() if dense.is_quantized else dense


OPENERS: Mapping[str, Callable[[Path], Tensors]] = {
    "safetensors": open_safetensors,
    "npz": open_npz,
    "npy": open_npy,
    "pt": open_pt,
    "pth": open_pt,
}
"""File suffix -> reader."""


def kind(path: Path) -> str:
    """Return the suffix of :data:`OPENERS` that fits a file, by name or else by content, or an empty string."""
    suffix = path.suffix.removeprefix(".")
    if not path.is_file() or suffix in OPENERS:
        return suffix if path.is_file() else ""
    if starts_with(path, _NPY):
        return "npy"
    if starts_with(path, b"{", offset=8):
        return "safetensors"
    if starts_with(path, _ZIP):
        with reading(path), zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if all(n.endswith(".npy") for n in names):
            return "npz"
        return "pt" if any(n.endswith("/data.pkl") for n in names) else ""
    return ""


def open_file(path: Path) -> Dump:
    """Open a single file as a dump of one step."""
    suffix = kind(path)
    return Dump(path, suffix, [partial(OPENERS[suffix], path)])


def step_files(folder: Path) -> list[Path]:
    """Return the files ``step{i}.pt|safetensors|npz`` of a folder, in the order of their numbers."""
    if not folder.is_dir():
        return []
    found = ((m, p) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name)))
    return [p for _n, p in sorted((int(m[1]), p) for m, p in found)]


def open_steps(folder: Path) -> Dump:
    """Open a folder of ``step{i}`` files; other files of tensors in it are noted. Raises :class:`TraceError` when a
    number is missing or there twice.
    """
    files = step_files(folder)
    check_steps(folder, [int(_STEP.fullmatch(p.name)[1]) for p in files])  # type: ignore[index]
    return Dump(folder, "steps", [partial(OPENERS[p.suffix[1:]], p) for p in files], notes=left_out(folder, {*files}))


def left_out(folder: Path, read: set[Path], suffixes: Collection[str] = OPENERS.keys()) -> tuple[str, ...]:
    """Note the files of tensors in a folder that are not among those that are ``read``."""
    others = sorted(p.name for p in folder.iterdir() if p not in read and p.suffix.removeprefix(".") in suffixes)
    return (f"{folder} holds other files, which are not read: {', '.join(others)}",) if others else ()


def array_files(folder: Path) -> dict[str, Path]:
    """Return the ``.npy`` files below a folder by name: the path inside the folder without the suffix."""
    files = {p.relative_to(folder).as_posix().removesuffix(".npy"): p for p in folder.rglob("*.npy")}
    return {name: files[name] for name in sorted(files, key=natural)}


def open_arrays(folder: Path) -> Tensors:
    """Open a folder of ``.npy`` files as one step."""
    files = array_files(folder)
    return Lazy(list(files), lambda name: load_npy(files[name]))


def open_folder(folder: Path) -> Dump:
    """Open a folder of ``.npy`` files; other files of tensors in it are noted."""
    notes = left_out(folder, {*array_files(folder).values()})
    return Dump(folder, "arrays", [partial(open_arrays, folder)], notes=notes)


FORMATS = (
    Format("steps", lambda path: bool(step_files(path)), open_steps),
    Format("arrays", lambda path: path.is_dir() and bool(array_files(path)), open_folder),
    Format("file", lambda path: bool(kind(path)), open_file),
)
