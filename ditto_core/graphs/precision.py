"""The same computation in another floating-point dtype, and by ONNX's own reference implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ditto_core.graphs.files import subgraphs

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def widened(model: onnx.ModelProto, elem_type: int) -> onnx.ModelProto:
    """Return a copy that computes in one floating-point type throughout: weights, constants, casts, subgraphs."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    widen_graph(result.graph, elem_type)
    return result


def widen_graph(graph: onnx.GraphProto, elem_type: int) -> None:
    """Give everything that a graph computes with, its subgraphs included, one floating-point type."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = elem_type
    for tensor in graph.initializer:
        tensor.CopyFrom(widened_tensor(tensor, elem_type))
    for node in graph.node:
        set_float_type(node, elem_type)


def widened_tensor(tensor: onnx.TensorProto, elem_type: int) -> onnx.TensorProto:
    """Return a floating-point tensor in another type, any other as it is."""
    if tensor.data_type not in FLOATS:
        return tensor
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name)


def set_float_type(node: onnx.NodeProto, elem_type: int) -> None:
    """Make a node that names a floating-point type (``Cast``, ``ConstantOfShape`` …) name another one."""
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype") and attribute.i in FLOATS:
            attribute.i = elem_type
        elif attribute.name == "value" and attribute.t.data_type in FLOATS:
            attribute.t.CopyFrom(widened_tensor(attribute.t, elem_type))
    for inner in subgraphs(node):
        widen_graph(inner, elem_type)


def fitted(feed: Mapping[str, Any], types: Mapping[str, onnx.ValueInfoProto]) -> dict[str, Any]:
    """Return the arrays with floating-point ones in the dtype that ``types`` gives them, where it knows them."""
    return {name: cast(np.asarray(array), types[name]) if name in types else array for name, array in feed.items()}


def cast(array: Any, value: onnx.ValueInfoProto) -> Any:
    """Return a floating-point array in the dtype of a value; integers stay what they are."""
    wanted = value.type.tensor_type.elem_type
    if not is_floating(array) or wanted not in FLOATS:
        return array
    with np.errstate(over="ignore"):
        return array.astype(helper.tensor_dtype_to_np_dtype(wanted), copy=False)


def is_floating(array: Any) -> bool:
    """Tell whether a numpy array holds floating-point numbers: bfloat16 and fp8, which numpy knows no kind for, too."""
    return "float" in array.dtype.name


def in_numpy(model: onnx.ModelProto | onnx.NodeProto, feed: Mapping[str, Any]) -> list[Any]:
    """Return all outputs by ONNX's reference implementation, plain numpy; raises anything for what that lacks."""
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model).run(None, dict(feed)))
