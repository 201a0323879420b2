"""Polygraphy's JSON of outputs and inputs, read and written without Polygraphy.

``--save-outputs`` writes one file, or a folder with a file an iteration (``0000000000.json``); ``--save-inputs`` the
same for inputs. An array is the base64 of a ``.npy`` file, or of what ``torch.save`` wrote. For exchange only: the
whole file has to be parsed, and is a third larger than its tensors.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ditto_core.dumps.base import Dump, Format, Lazy, Tensors, check_steps, once
from ditto_core.dumps.files import from_numpy, left_out, load_pt, with_numbers
from ditto_core.errors import TraceError, UsageError
from ditto_core.system.files import parse_json, read_text, reading, replacing

_ITERATION = re.compile(r"\d+\.json")
_CLASS = "polygraphy_class"
_BLOCK = 3 << 18  # a multiple of three, so that blocks of base64 join without padding


def iteration_files(path: Path) -> list[Path]:
    """Return the files of a folder with a file an iteration, in order."""
    found = (p for p in path.iterdir() if _ITERATION.fullmatch(p.name)) if path.is_dir() else ()
    return sorted(found, key=lambda p: int(p.stem))


def claims(path: Path) -> bool:
    """Tell whether a path is a JSON file or a folder of numbered ones."""
    return (path.is_file() and path.suffix == ".json") or bool(iteration_files(path))


def open_polygraphy(path: Path, runner: str | None = None) -> Dump:
    """Open saved outputs or inputs. ``runner`` names one of several runners, by its name or the beginning of it.

    Raises :class:`UsageError` when there are several and none is named, :class:`TraceError` when it is neither
    outputs nor inputs, when a name is in it twice, and when an iteration of a folder is missing or there twice.
    """
    files = iteration_files(path)
    if files:
        check_steps(path, [int(file.stem) for file in files])
        first, name = only_iteration(files[0], runner)
        rest = [partial(open_iteration, file, runner) for file in files[1:]]
        openers = [partial(open_arrays, files[0], first), *rest]
    else:
        iterations, name = parse(path, runner)
        openers = [partial(open_arrays, path, iteration) for iteration in iterations]
    notes = left_out(path, {*files}, ("json",)) if files else ()
    return Dump(path, "polygraphy", openers, {"runner": name} if name else {"content": "inputs"}, notes)


def open_iteration(path: Path, runner: str | None) -> Tensors:
    """Open one file of a folder."""
    arrays, _name = only_iteration(path, runner)
    return open_arrays(path, arrays)


def only_iteration(path: Path, runner: str | None) -> tuple[Mapping[str, Any], str]:
    """Parse one file of a folder: its arrays and the runner. Raises :class:`TraceError` unless it is one iteration."""
    iterations, name = parse(path, runner)
    if len(iterations) != 1:
        raise TraceError(f"{path} holds {len(iterations)} iterations, expected one in each file of a folder")
    return iterations[0], name


def parse(path: Path, runner: str | None) -> tuple[list[Mapping[str, Any]], str]:
    """Return the arrays of each iteration, still encoded, and the name of the runner (empty for inputs)."""
    with reading(path):
        data = parse_json(read_text(path))
        if isinstance(data, list) and data and all(is_feed(item) for item in data):
            return data, ""
        if is_feed(data):
            return [data], ""
        if not isinstance(data, dict) or data.get(_CLASS) != "RunResults":
            raise TraceError(
                f"{path} is JSON but neither outputs nor inputs saved by Polygraphy, nor outputs of trtexec"
            )
        runs = once(path, ((str(name), iterations) for name, iterations in data["lst"]), what="runners")
        name = choose(path, list(runs), runner)
        return [{n: lazy["values"] for n, lazy in it["outputs"].items()} for it in runs[name]], name


def is_feed(data: Any) -> bool:
    """Tell whether this is one iteration of inputs: names and arrays."""
    arrays = isinstance(data, dict) and data and _CLASS not in data
    return bool(arrays) and all(isinstance(v, dict) and {"array", "tensor"} & set(v) for v in data.values())


def choose(path: Path, names: list[str], runner: str | None) -> str:
    """Return the runner that is meant."""
    if not names:
        raise TraceError(f"{path} holds the results of no runner")
    found = [n for n in names if n == runner] or [n for n in names if n.startswith(runner or "")]
    if len(found) == 1:
        return found[0]
    wanted = f"of them {len(found)} begin with {runner!r}" if runner else "choose one with runner="
    raise UsageError(f"{path} holds {len(names)} runners, {wanted}: {', '.join(names)}")


def open_arrays(path: Path, arrays: Mapping[str, Any]) -> Tensors:
    """Open one iteration; each array is decoded when it is asked for."""
    return Lazy(list(arrays), lambda name: decode(path, name, arrays[name]))


def decode(path: Path, name: str, array: Mapping[str, str]) -> torch.Tensor:
    """Decode one array."""
    with reading(path, name):
        if "tensor" in array:
            tensor = load_pt(io.BytesIO(base64.b64decode(array["tensor"], validate=True)), f"{path}: {name}")
            if not isinstance(tensor, torch.Tensor):
                raise TraceError(f"{path}: {name} is of type {type(tensor).__name__}, expected a tensor")
            return with_numbers(tensor.detach(), name)
        data = io.BytesIO(base64.b64decode(array["array"], validate=True))
        return from_numpy(np.lib.format.read_array(data, allow_pickle=False))


def encode(tensor: torch.Tensor) -> tuple[str, str, bytes]:
    """Return key, class and bytes of a tensor: as ``.npy`` where numpy has the dtype, else as ``torch.save`` writes."""
    data = io.BytesIO()
    host = tensor.detach().cpu()
    try:
        array = host.numpy()
    except TypeError:
        torch.save(host.clone(), data)
        return "tensor", "Tensor", data.getvalue()
    np.save(data, array, allow_pickle=False)
    return "array", "ndarray", data.getvalue()


def write_array(file: IO[str], tensor: torch.Tensor) -> None:
    """Write one array as JSON, in blocks."""
    key, name, data = encode(tensor)
    file.write(f'{{"{key}": "')
    for start in range(0, len(data), _BLOCK):
        file.write(base64.b64encode(data[start : start + _BLOCK]).decode())
    file.write(f'", "{_CLASS}": "{name}"}}')


def separated(file: IO[str], items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, writing a comma before each but the first."""
    for i, item in enumerate(items):
        file.write(", " if i else "")
        yield item


def write_iteration(file: IO[str], tensors: Tensors, runner: str) -> None:
    """Write one ``IterationResult``."""
    file.write('{"outputs": {')
    for name in separated(file, tensors):
        file.write(f'{json.dumps(name)}: {{"values": ')
        write_array(file, tensors[name])
        file.write(f', "{_CLASS}": "LazyArray"}}')
    file.write(f'}}, "runtime": null, "runner_name": {json.dumps(runner)}, "{_CLASS}": "IterationResult"}}')


def save_outputs(path: Path | str, steps: Iterable[Tensors], runner: str = "ditto") -> None:
    """Write outputs that ``polygraphy run --load-outputs`` and ``RunResults.load`` take; one iteration a step.

    Steps and tensors are taken one at a time. Raises :class:`TraceError` when the file cannot be written; an older
    file then stays as it was.
    """
    with replacing(Path(path)) as file:
        file.write(f'{{"lst": [[{json.dumps(runner)}, [')
        for tensors in separated(file, steps):
            write_iteration(file, tensors, runner)
        file.write(f']]], "{_CLASS}": "RunResults"}}\n')


def save_inputs(path: Path | str, steps: Iterable[Tensors]) -> None:
    """Write inputs that ``polygraphy run --load-inputs`` takes; one iteration a step.

    Raises as :func:`save_outputs` does.
    """
    with replacing(Path(path)) as file:
        file.write("[")
        for tensors in separated(file, steps):
            file.write("{")
            for name in separated(file, tensors):
                file.write(f"{json.dumps(name)}: ")
                write_array(file, tensors[name])
            file.write("}")
        file.write("]\n")


FORMATS = (Format("polygraphy", claims, open_polygraphy, options=("runner",)),)
