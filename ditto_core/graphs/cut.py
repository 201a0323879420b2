"""Cut one value's operators out of an ONNX file, as a model of their own: the nodes between it and known values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from ditto_core.graphs.files import with_data
from ditto_core.graphs.graph import Graph

Arrays = Mapping[str, npt.NDArray[Any]]


def extract(path: Path, value: str, known: Arrays, result: npt.NDArray[Any]) -> onnx.ModelProto:
    """Return a model of its own that computes ``value`` from ``known`` arrays; ``result`` shows the output's type.

    Weights are included; of a file with gigabytes of them only those that are read. Dimensions are free. Raises
    :class:`~ditto_core.errors.SelectorError` when no node computes ``value``.
    """
    graph = Graph.read(path)
    nodes = graph.upstream([value], known)
    taken, _ = graph.boundary(nodes)
    weights = [with_data(tensor, path.parent) for tensor in graph.weights_of(nodes)]
    inputs = [value_info(name, known[name]) for name in taken]
    return graph.with_graph([strip(graph.nodes[i]) for i in nodes], inputs, [value_info(value, result)], weights)


def strip(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a node without its metadata, which names source files."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.metadata_props[:]
    return copy


def value_info(name: str, array: npt.NDArray[Any]) -> onnx.ValueInfoProto:
    """Describe a value by an example of it; all dimensions stay free."""
    kind = helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
    return helper.make_tensor_value_info(name, kind, [None] * array.ndim)
