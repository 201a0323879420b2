"""Models with a known fault, for `debug_reduce.py` and the tests: chains, a branch, two nodes that fail together."""

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ditto_core.graphs.files import read_model

FACTOR = 1.01
WIDTH = 8


@dataclass
class Case:
    name: str
    bad: onnx.ModelProto
    good: onnx.ModelProto
    feed: dict
    faulty: tuple[str, ...]
    together: bool = False
    shapes: list[str] = field(default_factory=list)


def chain(count, position):
    index = {"first": 0, "middle": count // 2, "last": count - 1}[position]
    return case(f"chain of {count}, {position} bad", straight(0, count), (index,))


def branch(count=16):
    """Two branches of a sum: the bad node is in the first, in the middle."""
    half = count // 2
    edges = [*straight(0, half), *straight(half, count)]
    return case(f"two branches of {half}, bad in the first", edges, (half // 2,), join=(half - 1, count - 1))


def pair(count=16):
    """A chain that fails only while two of its nodes are both there."""
    made = case(f"chain of {count}, two nodes that fail together", straight(0, count), (3, 11))
    made.together = True
    return made


def straight(start, end):
    """Return the nodes of a chain as (input, output)."""
    return [("x" if i == start else f"v{i - 1}", f"v{i}") for i in range(start, end)]


def case(name, edges, bad, join=(), factor=FACTOR):
    models = [model(edges, broken, join, factor) for broken in (bad, ())]
    feed = {"x": np.random.default_rng(1).standard_normal((2, WIDTH)).astype(np.float32)}
    return Case(name, *models, feed, tuple(f"mm{i}" for i in bad))


def model(edges, bad, join, factor):
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for i, (source, output) in enumerate(edges):
        matrix = (np.eye(WIDTH) + 0.1 * rng.standard_normal((WIDTH, WIDTH))).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix * np.float32(factor) if i in bad else matrix, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [source, f"w{i}"], [output], name=f"mm{i}"))
    last = edges[-1][1]
    if join:
        nodes.append(helper.make_node("Add", [f"v{i}" for i in join], ["sum"], name="join"))
        last = "sum"
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, WIDTH]) for n in ("x", last)]
    graph = helper.make_graph(nodes, "case", value[:1], value[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def llama(export_path, value="model.layers.0.mlp.down_proj"):
    """An exported two-layer Llama of 64 hidden units; the weight of the MatMul that computes ``value`` is 1 % off."""
    good = read_model(export_path)
    bad = onnx.ModelProto()
    bad.CopyFrom(good)
    node = next(n for n in bad.graph.node if value in n.output)
    target = next(tensor for tensor in bad.graph.initializer if tensor.name in node.input)
    target.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(target) * np.float32(FACTOR), target.name))
    feed = decoder_feed(good)
    shapes = [f"{name}:{list(array.shape)}".replace(" ", "") for name, array in feed.items()]
    title = f"exported 2-layer Llama, {len(good.graph.node)} nodes, one MatMul"
    return Case(title, bad, good, feed, (node.name,), shapes=shapes)


def decoder_feed(model):
    """Return the inputs of a prefill of five tokens: the cache is empty."""
    feed = {
        "input_ids": np.array([[3, 4, 5, 6, 7]]),
        "attention_mask": np.ones((1, 5), np.int64),
        "position_ids": np.arange(5)[None],
    }
    for value in model.graph.input:
        if value.name.startswith("past_key_values."):
            _, heads, _, size = (d.dim_value for d in value.type.tensor_type.shape.dim)
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feed[value.name] = np.zeros((1, heads, 0, size), dtype)
    return feed
