"""Small ONNX files for tests of backends that take any ONNX."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

METADATA = "pkg.torch.onnx."


def save(path: Path, nodes, inputs, outputs, constants=None, value_info=()) -> Path:
    """Write a model; inputs, outputs and value_info are (name, ONNX type, shape)."""
    values = [[helper.make_tensor_value_info(*each) for each in group] for group in (inputs, outputs, value_info)]
    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "test", values[0], values[1], initializers, value_info=values[2])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(path))
    return path


def node(operator: str, inputs, outputs, name: str, module: str = "", source: str = "", **attributes):
    """Make a node with the metadata that torch's exporter writes."""
    made = helper.make_node(operator, inputs, outputs, name=name, **attributes)
    if module:
        scopes = ["", "module", f"module.{module}", name]
        classes = ["ditto_core.model.export.DecoderWrapper", "m.Model", "models.llama.LlamaMLP", "aten.x.default"]
        trace = f'File "/site-packages/transformers/{source}", line 42, in forward\n    return {operator.lower()}(x)'
        for key, value in (("name_scopes", scopes), ("class_hierarchy", classes), ("stack_trace", trace)):
            made.metadata_props.add(key=METADATA + key, value=value if key == "stack_trace" else repr(value))
    return made


def two_layers(path: Path, *, batch: int | str = "batch") -> Path:
    """x [batch, 8] -> linear ``hidden`` -> relu ``act`` -> linear ``y`` [batch, 4], and ``size``, a shape tensor."""
    generator = np.random.default_rng(0)
    constants = {
        "w1": generator.normal(size=(8, 16)).astype(np.float32),
        "w2": generator.normal(size=(16, 4)).astype(np.float32),
    }
    nodes = [
        node("Shape", ["x"], ["size"], "node_shape"),
        node("MatMul", ["x", "w1"], ["hidden"], "node_up", "mlp.up_proj", "models/llama/modeling_llama.py"),
        node("Relu", ["hidden"], ["act"], "node_act", "mlp.act_fn", "models/llama/modeling_llama.py"),
        node("MatMul", ["act", "w2"], ["product"], "node_down", "mlp.down_proj", "models/llama/modeling_llama.py"),
        node("Reshape", ["product", "shape"], ["y"], "node_out"),
        node("Gather", ["size", "zero"], ["rows"], "node_rows"),
        node("Concat", ["rows", "minus"], ["shape"], "node_cat", axis=0),
    ]
    order = [0, 5, 6, 1, 2, 3, 4]
    constants |= {"zero": np.array([0], np.int64), "minus": np.array([-1], np.int64)}
    kind = TensorProto.FLOAT
    known = [("hidden", kind, [batch, 16]), ("act", kind, [batch, 16]), ("product", kind, [batch, 4])]
    return save(path, [nodes[i] for i in order], [("x", kind, [batch, 8])], [("y", kind, [batch, 4])], constants, known)
