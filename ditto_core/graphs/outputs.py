"""Which values of an ONNX graph are its outputs and inputs: taps are added, an export's own outputs are taken off, and
values that something else provides are read instead of computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ditto_core.errors import SelectorError, nearest
from ditto_core.graphs.files import read_graph

COMPUTED, GIVEN = "::computed", "::given"
"""Suffixes of what a node computes where an input has taken its place, and of that input."""


def add_outputs(model: onnx.ModelProto, values: Sequence[str]) -> None:
    """Make values of the graph outputs, after those that are. Raises :class:`SelectorError` for an unknown value."""
    graph = model.graph
    known = {v.name: v for v in graph.value_info}
    present = {v.name for v in graph.output}
    produced = {name for node in graph.node for name in node.output if name}
    for name in values:
        if name in present:
            continue
        if name not in produced:
            raise SelectorError(f"{name!r} is not a value of the ONNX graph{nearest(name, produced)}")
        graph.output.append(known.get(name) or onnx.ValueInfoProto(name=name))
        present.add(name)


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return the model with other outputs; the engine finds their types."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.output[:]
    result.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names))
    return result


def take_as_inputs(model: onnx.ModelProto, values: Iterable[str]) -> dict[str, str]:
    """Turn values that the graph computes into inputs of it: everything that reads one reads the input instead.

    Returns the input's name by value. The value keeps its name behind an ``Identity``, since TensorRT refuses an input
    that is an output too, and OpenVINO loses its name. Raises :class:`SelectorError` for a value that no node computes,
    or whose type the file does not say.
    """
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output if name}
    declared = {v.name: v for v in (*graph.value_info, *graph.output) if v.type.tensor_type.elem_type}
    names = {}
    for value in dict.fromkeys(values):
        if value not in producers or value not in declared:
            raise SelectorError(
                f"{value!r} cannot be given to the graph: no node computes it, or its type is not known"
            )
        outputs = producers[value].output
        outputs[list(outputs).index(value)] = f"{value}{COMPUTED}"
        names[value] = f"{value}{GIVEN}"
        graph.input.append(declared[value])
        graph.input[-1].name = names[value]
        graph.node.insert(0, onnx.helper.make_node("Identity", [names[value]], [value], name=names[value]))
    return names


def replace_outputs(model: onnx.ModelProto, given: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Turn values that nodes compute into inputs of the same names, of the dtype and rank of the arrays ``given``."""
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name in given:
                node.output[place] = f"{name}{COMPUTED}"
                kind = onnx.helper.np_dtype_to_tensor_dtype(given[name].dtype)
                model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, [None] * given[name].ndim))


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
                dim.dim_param = renamed(dim.dim_param, renames)
    axes = {v.name: axes_of(v) for v in graph.output}
    graph.value_info.extend(v for v in graph.output if v.name not in outputs)
    kept = [v for name in outputs for v in graph.output if v.name == name]
    del graph.output[:]
    graph.output.extend(kept)
    onnx.save(model, str(path))
    return axes


def settled_sizes(path: Path) -> dict[tuple[str, int], int]:
    """Return the sizes of inputs' dimensions, by input and index, whose symbol the exporter replaced by a number.

    An operator that keeps no size (LSTM) takes others all the same.
    """
    found = {}
    for value in read_graph(path).graph.input:
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param.isdecimal():
                found[value.name, i] = int(dim.dim_param)
    return found


def freeze_inputs(path: Path, sizes: Mapping[tuple[str, int], int]) -> None:
    """Give dimensions of inputs, by input and index, the only size that they can have."""
    model = read_graph(path)
    for value in model.graph.input:
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if (value.name, i) in sizes:
                dim.dim_value = sizes[value.name, i]
    onnx.save(model, str(path))


def give_nodes_to_constants(graph: onnx.GraphProto) -> None:
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
        graph.node.insert(0, onnx.helper.make_node("Identity", [constant], [name], name=f"{name}:identity"))


def input_shapes(path: Path) -> dict[str, tuple[int | str, ...]]:
    """Return the size of each dimension of a graph's inputs, or its name where it is dynamic."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in read_graph(path).graph.input}
    return {name: tuple(d.dim_param or d.dim_value for d in dims) for name, dims in shapes.items()}


def axes_by_value(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the axis names of a graph's outputs, by value."""
    return {value.name: axes_of(value) for value in read_graph(path).graph.output}


def axes_of(value: onnx.ValueInfoProto) -> tuple[str, ...]:
    """Return the names of a value's dimensions, "" for a constant one."""
    return tuple(d.dim_param for d in value.type.tensor_type.shape.dim)


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
    batches = [symbol for symbol, name in names.items() if name == "batch"]
    sums = {" + ".join(pair) for p in pasts for n in lengths for pair in ((p, n), (n, p))}
    products = {"*".join(pair) for b in batches for n in lengths for pair in ((b, n), (n, b))}
    return names | dict.fromkeys(sums, "total") | dict.fromkeys(products, "tokens")


def renamed(symbol: str, names: Mapping[str, str]) -> str:
    """Return a dimension's name; ``2*tokens`` where each token has two rows, as with two experts."""
    count, _, rest = symbol.partition("*")
    if count.isdecimal() and names.get(rest) == "tokens":
        return f"{count}*tokens"
    return names.get(symbol, symbol)
