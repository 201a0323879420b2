"""Verdicts of an earlier run are resumed only for the same model, wherever its weights lie."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ditto_core.debug.builds import make_builder
from ditto_core.debug.check import CommandCheck
from ditto_core.debug.evaluate import OnnxRuntime
from ditto_core.debug.iterations import IterationOptions
from ditto_core.debug.loops import BuildLoop
from ditto_core.debug.oracle import Reference
from ditto_core.debug.precision import PrecisionOptions, PrecisionSearch
from ditto_core.debug.reduce import ReduceOptions, Search
from ditto_core.graphs.graph import Graph

CHECKED = IterationOptions(check=CommandCheck(("true",)))
FEED = {"x": np.ones((1, 4), np.float16)}


def build(path):
    return BuildLoop(path, make_builder("onnxruntime", path, OnnxRuntime("all"), {}), {}, {}, 1e-3, CHECKED)


def reduction(path):
    return Search(Graph.load(path), ReduceOptions(path), CHECKED, lambda message: None)


def precision(path):
    options = PrecisionOptions(path, FEED, Reference(Graph.load(path.with_name("good.onnx"))))
    return PrecisionSearch(Graph.load(path), options, CHECKED)


def write(path, value):
    """Write x -> MatMul -> y in float16, the weight in a file beside it."""
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 4]) for name in ("x", "y")]
    weight = numpy_helper.from_array(np.full((4, 4), value, np.float16), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", shapes[:1], shapes[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    onnx.save_model(model, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    return path


@pytest.mark.parametrize("search", [build, reduction, precision])
def test_new_weights_beside_the_same_graph_are_another_search(tmp_path, search):
    write(tmp_path / "good.onnx", 1)
    path = write(tmp_path / "model.onnx", 1)
    graph, before = path.read_bytes(), search(path).identity()
    assert search(path).identity() == before
    write(path, 2)
    assert path.read_bytes() == graph
    assert search(path).identity() != before
