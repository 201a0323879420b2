"""A wrong weight in the engine is found at the projection that it belongs to."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.faults import scale_weight

FAULTY_BUILD = """
import pytest
from ditto_core.backends.onnxruntime import ENGINE_FILE, OnnxRuntimeBackend
from tests.faults import scale_weight

@pytest.fixture(autouse=True)
def faulty_engine(monkeypatch):
    build = OnnxRuntimeBackend.build

    def build_faulty(self, request):
        report = build(self, request)
        scale_weight(request.directory / ENGINE_FILE, "model.layers.1.mlp.down_proj", 1.01)
        return report

    monkeypatch.setattr(OnnxRuntimeBackend, "build", build_faulty)
"""


def test_scaled_down_proj_is_the_first_bad_site_and_its_cause_is_named(own_project):
    own_project.makeconftest(FAULTY_BUILD)
    own_project.makepyfile(
        """
        import pytest
        from tiny import tiny_llama

        @pytest.mark.ditto_engine(model=tiny_llama, observer=False)
        def test_faulty(ditto):
            ditto.generate([3, 1, 4, 1, 5], max_new_tokens=3).assert_close()
        """
    )
    result = own_project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * engine diverges at model.layers.1.mlp.down_proj, step 0: rel_l2 1.0e-02 > * (4 x noise floor *)",
            "E *first bad site: Linear, *modeling_llama.py:* down_proj*",
            "E *there: max abs * scale 1.01000",
            "*cause (9*%): weight scaled at model.layers.1.mlp.down_proj: *.weight is multiplied by 1.01*",
        ]
    )
    slow = own_project.runpytest_inprocess("--ditto-localize-failed=0")
    slow.assert_outcomes(failed=1)
    slow.stdout.no_fnmatch_line("*weight scaled*")


@pytest.mark.parametrize("external", [False, True])
def test_scale_weight_scales_one_product_and_nothing_else(tmp_path, external):
    first, second = np.eye(3, dtype=np.float32), np.full((3, 3), 2, np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"]),
        helper.make_node("Transpose", ["second"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["a", "turned"], ["b"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in "xab"]
    weights = [numpy_helper.from_array(array, name) for name, array in (("first", first), ("second", second))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    path = tmp_path / "m.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(path), save_as_external_data=external, location="m.onnx.data", size_threshold=0)
    linked = tmp_path / "linked"
    linked.hardlink_to(tmp_path / ("m.onnx.data" if external else "m.onnx"))
    before = linked.read_bytes()

    assert scale_weight(path, "b", 1.5) == "second"

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    a, b = session.run(None, {"x": np.array([[1, 2, 3]], np.float32)})
    np.testing.assert_array_equal(a, [[1, 2, 3]])
    np.testing.assert_array_equal(b, [[18, 18, 18]])
    assert linked.read_bytes() == before
