"""Edit and read ONNX graphs without touching their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import helper, numpy_helper

from ditto_core.errors import SelectorError, nearest


def read_graph(path: Path) -> onnx.ModelProto:
    """Load the graph; the weights stay in their own file."""
    return onnx.load(str(path), load_external_data=False)


def read_model(path: Path) -> onnx.ModelProto:
    """Load a graph with its weights.

    onnx's own loader refuses a weights file that has several hard links, as those of cached engines have: they share
    one copy. Raises ``OSError`` when a weights file is missing, ``ValueError`` when it is too short.
    """
    model = read_graph(path)
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        with (path.parent / place["location"]).open("rb") as stream:
            stream.seek(int(place.get("offset", 0)))
            length = int(place["length"]) if "length" in place else -1
            data = stream.read(length)
        if length >= 0 and len(data) != length:
            raise ValueError(f"{place['location']} ends inside {tensor.name}: {len(data)} of {length} bytes")
        tensor.raw_data = data
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
    return model


def finish_export(
    path: Path, outputs: Sequence[str], dimensions: Mapping[str, Mapping[int, str]]
) -> dict[str, tuple[str, ...]]:
    """Take all graph outputs but ``outputs`` off (their types stay known) and give dynamic dimensions readable names.

    Returns the axis names of every value that was an output: the dimension's name, or "" for a constant one.
    """
    model = read_graph(path)
    graph = model.graph
    give_nodes_to_constants(graph)
    renames = symbol_names(graph.input, dimensions)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = renames.get(dim.dim_param, dim.dim_param)
    axes = {v.name: tuple(d.dim_param for d in v.type.tensor_type.shape.dim) for v in graph.output}
    graph.value_info.extend(v for v in graph.output if v.name not in outputs)
    kept = [v for name in outputs for v in graph.output if v.name == name]
    del graph.output[:]
    graph.output.extend(kept)
    onnx.save(model, str(path))
    return axes


def give_nodes_to_constants(graph: Any) -> None:
    """Make an ``Identity`` of each output that the exporter folded to a constant, so that it stays a value.

    The graph's own nodes read the constant as before.
    """
    folded = {value.name for value in graph.output} & {tensor.name for tensor in graph.initializer}
    constants = {name: f"{name}:constant" for name in folded}
    for tensor in graph.initializer:
        tensor.name = constants.get(tensor.name, tensor.name)
    for node in graph.node:
        node.input[:] = [constants.get(name, name) for name in node.input]
    for name, constant in sorted(constants.items()):
        graph.node.insert(0, helper.make_node("Identity", [constant], [name], name=f"{name}:identity"))


def symbol_names(inputs: Iterable[Any], dimensions: Mapping[str, Mapping[int, str]]) -> dict[str, str]:
    """Map the exporter's symbols (``s15``, ``s15 + s70``) to names, from the inputs whose dimensions are known."""
    names: dict[str, str] = {}
    for value in inputs:
        known = dimensions.get(value.name, {})
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param in names or not dim.dim_param or i not in known:
                continue
            # The tokens of a decoder have another length than those of its encoder; the first have the plain name.
            taken = known[i] == "length" and known[i] in names.values()
            names[dim.dim_param] = f"{value.name}_{known[i]}" if taken else known[i]
    lengths = [symbol for symbol, name in names.items() if name == "length"]
    pasts = [symbol for symbol, name in names.items() if name == "past"]
    sums = {" + ".join(pair) for p in pasts for n in lengths for pair in ((p, n), (n, p))}
    return names | dict.fromkeys(sums, "total")


def add_outputs(model: onnx.ModelProto, values: Sequence[str]) -> None:
    """Make values of the graph outputs, after those that are. Raises :class:`SelectorError` for an unknown value."""
    graph = model.graph
    known = {v.name: v for v in graph.value_info}
    present = {v.name for v in graph.output}
    produced = set(value_names(model))
    for name in values:
        if name in present:
            continue
        if name not in produced:
            raise SelectorError(f"{name!r} is no value of the ONNX graph{nearest(name, produced)}")
        graph.output.append(known.get(name) or onnx.ValueInfoProto(name=name))
        present.add(name)


def value_names(model: onnx.ModelProto) -> list[str]:
    """Return the names of all values that nodes produce, in topological order."""
    return [output for node in model.graph.node for output in node.output if output]


def input_shapes(path: Path) -> dict[str, tuple[int | str, ...]]:
    """Return the size of each dimension of a graph's inputs, or its name where it is dynamic."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in read_graph(path).graph.input}
    return {name: tuple(d.dim_param or d.dim_value for d in dims) for name, dims in shapes.items()}


def value_axes(model: onnx.ModelProto, name: str) -> tuple[str, ...]:
    """Return the axis names of a value, or an empty tuple when its shape is not known."""
    for value in (*model.graph.output, *model.graph.value_info):
        if value.name == name:
            return tuple(d.dim_param for d in value.type.tensor_type.shape.dim)
    return ()


def read_initializer(tensor: onnx.TensorProto, directory: Path) -> Any:
    """Return an initializer's values as a numpy array, from the file beside the graph where they lie outside.

    onnx's own reader refuses files that have several links, as all weights in the cache have.
    """
    import numpy as np

    if not tensor.external_data:
        return numpy_helper.to_array(tensor)
    where = {entry.key: entry.value for entry in tensor.external_data}
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    count = int(np.prod(tensor.dims, dtype=np.int64))
    offset = int(where.get("offset", 0))
    return np.fromfile(directory / where["location"], dtype, count, offset=offset).reshape(tuple(tensor.dims))


def is_floating(array: Any) -> bool:
    """Tell whether a numpy array holds floating-point numbers: bfloat16 and fp8, which numpy knows no kind for, too."""
    return "float" in array.dtype.name
