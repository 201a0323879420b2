"""Faults put into a built ONNX engine, to see that they are found where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

PASS_THROUGH = ("Transpose", "Identity", "Cast", "Reshape")


def edit_weight(path: Path, value: str, edit: Callable[[np.ndarray], np.ndarray]) -> str:
    """Replace the weight of the node that computes ``value`` by ``edit(weight)``; return the initializer's name.

    The file and its external weights are written anew: a cache may share the old ones between entries (and onnx refuses
    to read weights that have several links).
    """
    for shared in path.parent.glob("*.data"):
        content = shared.read_bytes()
        shared.unlink()
        shared.write_bytes(content)
    model = onnx.load(str(path))
    weight = weight_of(model.graph, value)
    changed = edit(numpy_helper.to_array(weight)).astype(numpy_helper.to_array(weight).dtype)
    weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
    for old in (path, *path.parent.glob("*.data")):
        old.unlink()
    onnx.save(model, str(path), save_as_external_data=True, location=f"{path.name}.data")
    return weight.name


def scale_weight(path: Path, value: str, factor: float) -> str:
    """Multiply the weight of the node that computes ``value``."""
    return edit_weight(path, value, lambda weight: weight * factor)


def weight_of(graph: onnx.GraphProto, value: str) -> onnx.TensorProto:
    """Find the one weight matrix of the node that computes ``value``, through a bias, transposes and casts."""
    producers = {output: node for node in graph.node for output in node.output}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    found = []
    node = producers[value]
    if node.op_type == "Add" and any(name in initializers for name in node.input):
        node = next(producers[name] for name in node.input if name in producers)
    for name in node.input:
        while name not in initializers and name in producers and producers[name].op_type in PASS_THROUGH:
            name = producers[name].input[0]  # noqa: PLW2901
        if name in initializers and len(initializers[name].dims) == 2:
            found.append(initializers[name])
    assert len(found) == 1, f"{value} is computed from {len(found)} weight matrices, expected one"
    return found[0]
