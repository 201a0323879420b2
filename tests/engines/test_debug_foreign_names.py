"""`debug reduce` on files that ditto did not export: foreign names, other steps, and models that the engine refuses."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ditto_core.debug.iterations import IterationOptions
from ditto_core.debug.oracle import Reference
from ditto_core.debug.reduce import ReduceOptions, reduce_model
from ditto_core.errors import UsageError
from ditto_core.graphs.graph import Graph

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path, nodes, outputs=("y",), shape=None, **weights):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape or X.shape) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def layers(prefix, *, perm=(0, 2, 1), scale="w"):
    """Two products of x; one is transposed forth and back, by a ``perm`` that undoes itself."""
    a, b, t, u, s = (f"{prefix}{name}" for name in "abtus")
    return [
        helper.make_node("MatMul", ["x", "w"], [a]),
        helper.make_node("MatMul", ["x", scale], [b]),
        helper.make_node("Transpose", [a], [t], perm=perm),
        helper.make_node("Transpose", [t], [u], perm=perm),
        helper.make_node("Add", [u, b], [s]),
        helper.make_node("Tanh", [s], ["y"]),
    ]


def reduced(bad, good, feed=None):
    reference = Reference(Graph.load(good)) if good is not None else Reference(precision="float64")
    options = ReduceOptions(bad, feed or {"x": X}, reference)
    found = reduce_model(options, IterationOptions(), bad.with_name("out.onnx"), print)
    return [Graph.load(bad).nodes[i].output[0] for i in found.nodes]


def test_a_wrong_weight_is_found_where_only_inputs_and_outputs_share_names(tmp_path):
    good = write(tmp_path / "good.onnx", layers("g", scale="v"), w=W, v=W.T)
    bad = write(tmp_path / "bad.onnx", layers("/net/", scale="v"), w=W, v=W.T * 1.5)
    assert reduced(bad, good) == ["/net/b"]


def test_names_that_mean_something_else_in_the_other_file_do_not_mislead(tmp_path):
    good = write(tmp_path / "good.onnx", layers("g", scale="v"), w=W, v=W.T)
    nodes = layers("n", scale="v")
    for node in nodes:  # "ga" is the other product's name in the good file
        node.input[:] = ["ga" if name == "nb" else name for name in node.input]
        node.output[:] = ["ga" if name == "nb" else name for name in node.output]
    bad = write(tmp_path / "bad.onnx", nodes, w=W, v=W.T * 1.5)
    assert reduced(bad, good) == ["ga"]


def test_a_healthy_operator_that_works_in_other_steps_is_not_blamed(tmp_path):
    good = write(tmp_path / "good.onnx", layers("g", scale="v"), w=W, v=W.T)
    bad = write(tmp_path / "bad.onnx", layers("/net/", scale="v", perm=(1, 0, 2)), w=W, v=W.T * 1.5)
    assert reduced(bad, good) == ["/net/b"]


def test_an_operator_that_computes_something_else_is_found(tmp_path):
    good = write(tmp_path / "good.onnx", layers("g", scale="v"), w=W, v=W.T)
    nodes = layers("/net/", scale="v")
    nodes[4].op_type = "Sub"
    bad = write(tmp_path / "bad.onnx", nodes, w=W, v=W.T)
    assert reduced(bad, good) == ["/net/s"]


def test_a_reference_in_another_precision_gets_the_names_of_the_low_graph(tmp_path):
    from ditto_core.debug.align import named_alike
    from ditto_core.debug.evaluate import capture

    good = Graph.load(write(tmp_path / "good.onnx", layers("g", scale="v"), w=W, v=W.T))
    half = [helper.make_node("Cast", ["x"], ["low"], to=TensorProto.FLOAT16), *layers("/net/", scale="v")]
    for node in half[1:]:
        node.input[:] = ["low" if name == "x" else name for name in node.input]
    half[-1].output[0] = "tanh"
    half.append(helper.make_node("Cast", ["tanh"], ["y"], to=TensorProto.FLOAT))
    low = Graph.load(write(tmp_path / "low.onnx", half, w=W.astype(np.float16), v=W.T.astype(np.float16)))
    named = named_alike(low, {"x": X}, capture(low, {"x": X}), Reference(good)).model
    assert {"/net/a", "/net/b", "/net/t", "/net/u", "/net/s", "y"} <= set(named.producer)


def test_outputs_that_the_reference_does_not_know_cannot_be_compared(tmp_path):
    good = write(tmp_path / "good.onnx", layers("g"), w=W)
    nodes = layers("/net/")
    nodes[-1].output[0] = "other"
    bad = write(tmp_path / "bad.onnx", nodes, outputs=("other",), w=W)
    with pytest.raises(UsageError, match=r"cannot be compared.*other.*y"):
        reduced(bad, good)


def test_the_smallest_part_is_found_that_the_optimizer_breaks(tmp_path):
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Sigmoid", ["h"], ["s"]),
        node("Mul", ["s", "one"], ["mid"]),
        node("Cast", ["mid"], ["c"], to=TensorProto.FLOAT),
        node("Div", ["one", "s"], ["d"]),
        node("Mul", ["d", "c"], ["p"]),
        node("Add", ["p", "h"], ["a"]),
        node("Softmax", ["a"], ["y"]),
    ]
    bad = write(tmp_path / "bad.onnx", nodes, w=W, one=np.float32(1))
    assert reduced(bad, None) == ["c", "d", "p"]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match="Node input 'c' is not a graph input"):
        onnxruntime.InferenceSession(str(tmp_path / "out.onnx"), options)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnxruntime.InferenceSession(str(tmp_path / "out.onnx"), options)


@pytest.mark.parametrize("name", ["node", ""])
def test_nodes_that_share_a_name_or_have_none_are_told_by_what_they_make(tmp_path, name):
    """ONNX Runtime refuses a file whose nodes share a name; other engines take it."""
    good = write(tmp_path / "good.onnx", layers("g", scale="v"), w=W, v=W.T)
    nodes = layers("/net/", scale="v")
    for node in nodes:
        node.name = name
    bad = write(tmp_path / "bad.onnx", nodes, w=W, v=W.T * 1.5)
    assert reduced(bad, good) == ["/net/b"]
    assert [Graph.load(bad).label(i) for i in range(2)] == ["MatMul:/net/a", "MatMul:/net/b"]
