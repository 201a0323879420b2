"""What ``trtexec --exportOutput`` writes: a JSON list with the name, dimensions and values of each output.

Numbers have six digits and no dtype: they are read as float32, whole numbers beyond its digits as int64.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from ditto_core.dumps.base import Dump, Format, Lazy, Tensors, once
from ditto_core.errors import TraceError
from ditto_core.system.files import parse_json, reading

_START = re.compile(r'\s*\[\s*\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"dimensions"\s*:\s*"')
_NOT_JSON = re.compile(r"(?<=[\s\[,])(-?)(nan|inf)(?=[\s\],])")
_EXACT = 1 << 24
"""Whole numbers up to here are float32's."""


def claims(path: Path) -> bool:
    """Tell whether a path is a JSON file that begins with the name and the dimensions of an output."""
    if not path.is_file() or path.suffix != ".json":
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return bool(_START.match(file.read(4096)))


def open_trtexec(path: Path) -> Dump:
    """Open exported outputs as a dump of one step. Raises :class:`TraceError` where the file is damaged."""
    return Dump(path, "trtexec", [lambda: outputs(path)], {"content": "outputs"})


def outputs(path: Path) -> Tensors:
    """Read the outputs, each made a tensor when it is asked for."""
    with reading(path):
        # C++ prints nan, -nan and inf, which are not JSON.
        text = _NOT_JSON.sub(
            lambda found: "NaN" if found[2] == "nan" else f"{found[1]}Infinity", path.read_text("utf-8")
        )
        found = once(path, ((item["name"], item) for item in parse_json(text)))
    return Lazy(list(found), lambda name: tensor_of(path, name, found[name]))


def tensor_of(path: Path, name: str, item: Any) -> torch.Tensor:
    """Return one output in its dimensions, ``2x3x4``; a scalar has none."""
    with reading(path, name):
        values, shape = item["values"], [int(size) for size in item["dimensions"].split("x") if size]
        if math.prod(shape) != len(values):
            raise TraceError(f"{path}: {name} has {len(values)} values, expected {item['dimensions']}")
        whole = all(isinstance(value, int) for value in values)
        large = whole and any(abs(value) > _EXACT for value in values)
        return torch.tensor(values, dtype=torch.int64 if large else torch.float32).reshape(shape)


FORMATS = (Format("trtexec", claims, open_trtexec),)
