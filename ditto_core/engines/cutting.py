"""An engine that takes some of its own tensors as inputs: what computes them is cut off."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from ditto_core.backends.base import CutsEngine, StoresGraph
from ditto_core.backends.registry import get_backend
from ditto_core.cache import content_digest, link_or_copy
from ditto_core.engines.engine import Engine
from ditto_core.errors import UsageError
from ditto_core.graphs.files import read_graph
from ditto_core.graphs.outputs import GIVEN, take_as_inputs
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from ditto_core.cache import Cache

__all__ = ["GIVEN", "cut"]


def cut(cache: Cache, engine: Engine, values: Sequence[str]) -> Engine:
    """Return the engine with the ONNX values as further inputs, called ``VALUE::given``; it is kept in the cache.

    Raises :class:`UsageError` for a backend whose engine takes no tensors, :class:`~ditto_core.errors.SelectorError`
    for a value that it does not compute.
    """
    backend = get_backend(engine.spec.backend)
    if isinstance(backend, StoresGraph):
        write = partial(write_cut, backend.graph_file, engine, values)
    elif isinstance(backend, CutsEngine):
        write = partial(write_copy, backend, engine, values)
    else:
        raise UsageError(
            f"a tensor can be put into an engine that is an ONNX file (onnxruntime, openvino) or a program (inductor), "
            f"not into one of {engine.spec.backend}"
        )
    key = fingerprint("cut", engine.fingerprint or content_digest(engine.directory), sorted(values))
    path = cache.get_or_build("engine", key, write, describe={"model": engine.spec.model.label, "cut": list(values)})
    return replace(engine, directory=path)


def write_cut(graph_file: Callable[[Path], Path], engine: Engine, values: Sequence[str], directory: Path) -> None:
    """Write the engine's files, linked where they stay as they are."""
    source, target = graph_file(engine.directory), graph_file(directory)
    model = read_graph(source)
    take_as_inputs(model, values)
    left_out = shutil.ignore_patterns("entry.json", source.name)
    shutil.copytree(engine.directory, directory, copy_function=link, ignore=left_out, dirs_exist_ok=True)
    onnx.save(model, str(target))


def write_copy(backend: CutsEngine, engine: Engine, values: Sequence[str], directory: Path) -> None:
    """Copy the engine's files, and let the backend cut it there."""
    shutil.copytree(engine.directory, directory, ignore=shutil.ignore_patterns("entry.json"), dirs_exist_ok=True)
    backend.cut(engine.spec, directory, values)


def link(source: str, target: str) -> None:
    """Link a file, as ``copytree`` calls it."""
    link_or_copy(Path(source), Path(target))
