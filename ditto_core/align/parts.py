"""Run a graph part by part: a part's weights are in memory only while it runs, then only what other parts read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ditto_core.errors import RunError, first_line

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

LARGEST = 1 << 28
"""Bytes of weights in a part; a weight that is larger has a part of its own."""

Feeds = Sequence[Mapping[str, Any]]
"""What a file is fed: an array an input, one mapping a probe."""


class Runnable(Protocol):
    """A graph that can be changed and run."""

    @property
    def folder(self) -> Path:
        """Where the weights lie that are not in the graph."""
        ...

    def copy(self) -> onnx.ModelProto:
        """Return the graph to be changed."""
        ...

    def session(self, model: onnx.ModelProto) -> Any:
        """Open a changed graph, unoptimized."""
        ...


def run(session: Any, names: Sequence[str] | None, feed: Mapping[str, Any]) -> Any:
    """Run a session. Raises :class:`RunError` with the first line of ONNX Runtime's complaint."""
    try:
        return session.run(names, feed)
    except Exception as error:
        raise RunError(f"onnxruntime failed: {first_line(error)}") from error


def run_in_parts(
    file: Runnable, model: onnx.ModelProto, feeds: Feeds, wanted: Callable[[str], bool], largest: int = LARGEST
) -> Iterator[tuple[str, list[Any]]]:
    """Yield (name, one array a feed) of the ``wanted`` values of a graph in its order.

    Raises :class:`RunError` when it does not run, :class:`~ditto_core.errors.BuildError` when a part is refused.
    """
    for name, array in constant_outputs(file, model):
        if wanted(name):
            yield name, [array] * len(feeds)
    pieces = parts(model, largest)
    last = last_readers(model, pieces)
    live: list[dict[str, Any]] = [dict(feed) for feed in feeds]
    for number, piece in enumerate(pieces):
        made = [name for i in piece for name in model.graph.node[i].output if name]
        shown = [name for name in made if wanted(name) or last.get(name, -1) > number]
        if shown:
            part = part_of(model, piece, shown, live[0])
            names = {value.name for value in part.graph.input}
            session = file.session(part)
            runs = [run(session, shown, {name: each[name] for name in names}) for each in live]
            del session
            for i, name in enumerate(shown):
                arrays = [results[i] for results in runs]
                for each, array in zip(live, arrays, strict=True):
                    each[name] = array
                if wanted(name):
                    yield name, arrays
            del runs
        for each in live:
            for name in [name for name in each if last.get(name, -1) <= number]:
                del each[name]


def constant_outputs(file: Runnable, model: onnx.ModelProto) -> Iterator[tuple[str, Any]]:
    """Yield those outputs of a graph that are stored in it, such as a detector's anchors."""
    from onnx import numpy_helper

    returned = {value.name for value in model.graph.output}
    for tensor in model.graph.initializer:
        if tensor.name in returned:
            yield tensor.name, numpy_helper.to_array(tensor, base_dir=str(file.folder))


def outputs_of(file: Runnable, model: onnx.ModelProto, feed: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return some values of a graph on one feed; see :func:`run_in_parts`."""
    chosen = set(names)
    return {name: array for name, (array,) in run_in_parts(file, model, [feed], chosen.__contains__)}


def parts(model: onnx.ModelProto, largest: int) -> list[range]:
    """Cut a graph's nodes, which stand in order, where the weights that a part reads exceed ``largest`` bytes.

    A graph with subgraphs, which may read any value, is one part.
    """
    nodes = model.graph.node
    sizes = {tensor.name: size_of(tensor) for tensor in model.graph.initializer}
    if sum(sizes.values()) <= largest or any(a.HasField("g") for node in nodes for a in node.attribute):
        return [range(len(nodes))]
    found: list[range] = []
    seen: set[str] = set()
    start, held = 0, 0
    for i, node in enumerate(nodes):
        new = {name for name in node.input if name in sizes} - seen
        more = sum(sizes[name] for name in new)
        if held and held + more > largest:
            found.append(range(start, i))
            start, held, seen = i, 0, set()
            more = sum(sizes[name] for name in node.input if name in sizes)
        seen |= {name for name in node.input if name in sizes}
        held += more
    return [*found, range(start, len(nodes))]


def size_of(tensor: onnx.TensorProto) -> int:
    """Return about how many bytes an initializer has."""
    import onnx

    width = int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    return int(math.prod(tensor.dims)) * max(width, 1)


def last_readers(model: onnx.ModelProto, pieces: Sequence[range]) -> dict[str, int]:
    """Return the last part that reads each value."""
    return {name: number for number, piece in enumerate(pieces) for i in piece for name in model.graph.node[i].input}


def part_of(model: onnx.ModelProto, piece: range, shown: Sequence[str], known: Mapping[str, Any]) -> onnx.ModelProto:
    """Return nodes of a graph as a graph; what they read of others is an input, of the dtype that is ``known``."""
    import onnx

    nodes = [model.graph.node[i] for i in piece]
    reads = {name for node in nodes for name in node.input if name}
    for node in nodes:
        reads |= {name for a in node.attribute if a.HasField("g") for name in read_inside(a.g)}
    made = {name for node in nodes for name in node.output}
    part = onnx.ModelProto()
    part.ir_version = model.ir_version
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = model.graph.name or "part"
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in reads)
    part.graph.sparse_initializer.extend(model.graph.sparse_initializer)
    held = {tensor.name for tensor in model.graph.initializer}
    declared = {value.name: value for value in model.graph.input}
    for name in sorted(reads - made):
        if name in declared and (name in known or name not in held):
            part.graph.input.append(declared[name])
        elif name in known and name not in held:
            array = np.asarray(known[name])
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            part.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, [None] * array.ndim))
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown)
    return part


def read_inside(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield what the nodes of a subgraph read, at any depth."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from read_inside(attribute.g)
