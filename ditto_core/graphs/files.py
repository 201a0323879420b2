"""Read and write ONNX files. A graph is read without its weights, which stay in their own file until they are used."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, numpy_helper

from ditto_core.cache import link_or_copy
from ditto_core.errors import UsageError, first_line
from ditto_core.system.files import regular
from ditto_core.system.fingerprint import hash_file

LARGEST = 1_500_000_000
"""Bytes of weights from which a file keeps them beside the graph: protobuf ends at 2 GB."""


def read_graph(path: Path) -> onnx.ModelProto:
    """Load the graph; the weights stay in their own file.

    Raises ``FileNotFoundError`` where there is no file, :class:`UsageError` for what is no ONNX model and for one that
    keeps weights outside of its folder.
    """
    try:
        model = onnx.load(str(regular(path)), load_external_data=False)
    except DecodeError as error:
        raise UsageError(f"{path} is not an ONNX model: {first_line(error)}") from error
    for name in sorted(weights_files(model)):
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UsageError(f"{path} keeps its weights in {name!r}, expected a file in its folder")
    return model


def weights_files(model: onnx.ModelProto) -> set[str]:
    """Return the files beside a graph that hold its weights, relative to its folder."""
    return {e.value for t in stored_tensors(model.graph) for e in t.external_data if e.key == "location"}


def file_digests(path: Path, model: onnx.ModelProto | None = None) -> dict[str, str]:
    """Return the SHA-256 (hex) of an ONNX file, and of the files that hold its weights, by name.

    Raises as :func:`read_graph` does, and ``OSError`` when a weights file is missing.
    """
    names = sorted(weights_files(read_graph(path) if model is None else model))
    return {name: hash_file(path.parent / name) for name in (path.name, *names)}


def read_model(path: Path) -> onnx.ModelProto:
    """Load a graph with its weights. Raises as :func:`load_weights` does."""
    model = read_graph(path)
    load_weights(model, path.parent)
    return model


def load_weights(model: onnx.ModelProto, folder: Path) -> None:
    """Load the weights of a model, those of its subgraphs too, from the files in ``folder``.

    Raises ``OSError`` when a weights file is missing, ``ValueError`` when it is too short.
    """
    for tensor in stored_tensors(model.graph):
        load_data(tensor, folder)


def load_data(tensor: TensorProto, folder: Path) -> None:
    """Load one weight from the one place in the file where it lies; a weight that has its data stays as it is.

    onnx's own loader refuses a weights file that has several hard links, as those of cached engines have: they share
    one copy.
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        return
    place = {entry.key: entry.value for entry in tensor.external_data}
    length = int(place.get("length", -1))
    with regular(folder / place["location"]).open("rb") as stream:
        stream.seek(int(place.get("offset", 0)))
        data = stream.read(length)
    if length >= 0 and len(data) != length:
        raise ValueError(f"{place['location']} ends inside {tensor.name}: {len(data)} of {length} bytes")
    tensor.raw_data = data
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def with_data(tensor: TensorProto, folder: Path) -> TensorProto:
    """Return a copy of a weight that holds its data."""
    copy = TensorProto()
    copy.CopyFrom(tensor)
    load_data(copy, folder)
    return copy


def read_initializer(tensor: TensorProto, folder: Path) -> Any:
    """Return a weight as a numpy array, read from ``folder`` where it lies beside the graph."""
    return numpy_helper.to_array(tensor if not tensor.external_data else with_data(tensor, folder))


def place_weights(model: onnx.ModelProto, source: Path, target: Path, *, copy: bool = False) -> None:
    """Put the weights files that a model names into the folder ``target``, beside the file that will hold its graph.

    They are hard links to those in the folder ``source`` where that is possible, so neither may be written to;
    ``copy`` makes files of their own, for libraries that refuse links. Raises :class:`UsageError` where another file of
    that name is there: it may be another graph's.
    """
    for name in sorted(weights_files(model)):
        ours, theirs = source / name, target / name
        if not theirs.exists():
            theirs.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copyfile if copy else link_or_copy)(ours, theirs)
        elif not (ours.samefile(theirs) or filecmp.cmp(ours, theirs, shallow=False)):
            raise UsageError(f"{theirs} holds other weights than {ours}: remove it, or write into another folder")


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; weights beyond what protobuf takes go to ``NAME.data`` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    large = model.ByteSize() > LARGEST
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)  # onnx appends to a file that is there
    onnx.save_model(model, str(path), save_as_external_data=large, location=data.name if large else None)


def stored_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Yield the initializers of a graph and of the graphs inside its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for inner in subgraphs(node):
            yield from stored_tensors(inner)


def subgraphs(node: onnx.NodeProto) -> Iterable[onnx.GraphProto]:
    """Yield the graphs inside a node: branches of an ``If``, the body of a ``Loop`` or ``Scan``."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
