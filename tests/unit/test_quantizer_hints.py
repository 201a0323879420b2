"""What onnxruntime's quantizer says to everybody is kept off the screen."""

import logging

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ditto_core.backends.onnxruntime import ENGINE_FILE, quantize_weights


def test_an_int8_build_is_quiet_and_leaves_the_root_logger_as_it_was(tmp_path, caplog):
    pytest.importorskip("onnxruntime", reason="onnxruntime quantizes")
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / ENGINE_FILE)
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    quantize_weights(tmp_path)
    assert [record.getMessage() for record in caplog.records] == []
    assert (root.level, list(root.handlers)) == before
    assert "MatMulInteger" in {node.op_type for node in onnx.load(tmp_path / ENGINE_FILE).graph.node}
