"""Constants of an ONNX model: nodes become initializers, and large ones give way to their types."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

SMALL = 1024
"""Bytes up to which a constant may decide a shape."""


def constants_as_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its ``Constant`` nodes as initializers, where they hold a tensor or plain numbers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    kept, outputs = [], {v.name for v in graph.output}
    for node in graph.node:
        tensor = constant_tensor(node) if node.op_type == "Constant" and node.domain in ("", "ai.onnx") else None
        if tensor is None or node.output[0] in outputs:
            kept.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(kept)
    return result


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return what a ``Constant`` node holds, or None for strings and sparse tensors."""
    attribute = node.attribute[0]
    if attribute.name == "value":
        return attribute.t
    dtypes = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
    if attribute.name not in dtypes:
        return None
    return numpy_helper.from_array(np.asarray(helper.get_attribute_value(attribute), dtypes[attribute.name]))


def without_large_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which weights of more than 1 KiB have a type but no bytes: enough for shape inference."""
    source = model.graph
    result = helper.make_model(
        onnx.GraphProto(
            name=source.name, node=source.node, input=source.input, output=source.output, value_info=source.value_info
        ),
        opset_imports=model.opset_import,
        functions=model.functions,
        ir_version=model.ir_version,
    )
    present = {v.name for v in source.input}
    for tensor in source.initializer:
        if tensor.ByteSize() <= SMALL and tensor.data_location != onnx.TensorProto.EXTERNAL:
            result.graph.initializer.append(tensor)
        elif tensor.name not in present:
            result.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return result
