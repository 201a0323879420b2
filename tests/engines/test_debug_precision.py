"""`ditto debug precision` on exported float16 graphs: which operators stay in float32, and what is written."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from typer.testing import CliRunner

from ditto_core.cli import application
from ditto_core.errors import DittoError, UsageError
from ditto_core.spec import EngineSpec
from tests.engines.overflow import no_hot_norm, one_hot_norm

NORM = {"Mul", "ReduceMean", "Add", "Sqrt"}
"""What overflows in the norm: the square, its mean, the epsilon's sum, and the root's input."""


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def hot(workspace):
    return workspace.export(EngineSpec.of(one_hot_norm, dtype="float16")).onnx_path


@pytest.fixture(scope="module")
def cold(workspace):
    return workspace.export(EngineSpec.of(no_hot_norm, dtype="float16")).onnx_path


def precision(path, *arguments):
    np.savez("inputs.npz", x=one_hot_norm()[1]["x"].numpy())
    words = ["debug", "precision", path, "--inputs", "inputs.npz", "-o", "mixed.onnx", *arguments]
    done = CliRunner().invoke(application(), list(map(str, words)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(Path("mixed.json").read_text()), done.output


def test_only_the_overflowing_norm_stays_in_float32_and_nothing_smaller_will_do(hot):
    found, output = precision(hot)
    assert {kept["module"] for kept in found["kept"]} == {"blocks.2.norm"}
    assert {kept["operator"] for kept in found["kept"]} == NORM
    assert len(found["kept"]) == 4
    assert found["minimal"]
    assert found["judged"] == 7  # all float16, all float32, the four, and each of them left out
    assert all(kept["largest"] > 65504 for kept in found["kept"][:3])
    assert "4 of 40 operators stay in float32" in output


def test_the_mixed_graph_has_casts_around_the_norm_alone_and_computes_what_float32_does(hot):
    precision(hot)
    mixed, plain = onnx.load("mixed.onnx"), onnx.load(hot)
    onnx.checker.check_model(mixed, full_check=True)
    casts = [node for node in mixed.graph.node if node.op_type == "Cast"]
    assert len(mixed.graph.node) - len(plain.graph.node) == len(casts)
    assert [v.type.tensor_type.elem_type for v in (*mixed.graph.input, *mixed.graph.output)] == [
        TensorProto.FLOAT16
    ] * 2
    types = {v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(mixed).graph.value_info}
    wide = {n.op_type for n in mixed.graph.node if n.op_type != "Cast" and types.get(n.output[0]) == TensorProto.FLOAT}
    assert wide == NORM
    module, inputs = one_hot_norm()
    with torch.no_grad():
        expected = module.float()(inputs["x"].float()).numpy()
    actual = emulate(mixed, inputs["x"].numpy())
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 5e-3
    broken = emulate(plain, inputs["x"].numpy())
    assert not np.linalg.norm(broken - expected) / np.linalg.norm(expected) < 0.1


def emulate(model, x):
    """Evaluate by onnx's own numpy implementation, which rounds every float16 value."""
    from onnx.reference import ReferenceEvaluator

    with np.errstate(over="ignore", divide="ignore"):
        return ReferenceEvaluator(model).run(None, {"x": x})[0].astype(np.float64)


def test_a_graph_that_meets_the_tolerance_keeps_nothing_and_takes_one_build(cold):
    found, _ = precision(cold)
    assert (found["kept"], found["judged"]) == ([], 1)


def test_with_few_builds_the_result_is_enough_but_not_called_minimal(hot):
    found, output = precision(hot, "--builds", "3")
    assert len(found["kept"]) == 4
    assert not found["minimal"]
    assert "a smaller one may be" in output


def test_bfloat16_holds_the_range_as_well(hot):
    found, _ = precision(hot, "--keep", "bfloat16", "--tolerance", "0.05")
    assert {kept["module"] for kept in found["kept"]} == {"blocks.2.norm"}


def test_a_check_command_judges_the_written_model(hot):
    """The command wants the square in float32, so that is all that stays."""
    Path("check.py").write_text(
        "import onnx, sys\n"
        "m = onnx.load('polygraphy_debug.onnx')\n"
        "sys.exit(not any(n.output[0].endswith('__float') for n in m.graph.node if n.op_type == 'ReduceMean'))\n"
    )
    import sys

    found, _ = precision(hot, "--check", sys.executable, "check.py")
    assert [kept["operator"] for kept in found["kept"]] == ["ReduceMean"]
    assert not Path("polygraphy_debug.onnx").exists()


def test_onnxruntime_on_the_cpu_does_not_overflow_where_a_strongly_typed_engine_does(hot):
    found, _ = precision(hot, "--engine", "onnxruntime")
    assert found["kept"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tolerance", "1e-9"), "even with all 40 operators in float32 it fails"),
        (("--keep", "float16"), "cannot keep operators of a float16 graph in float16"),
        (("--engine", "onnxruntme"), "did you mean 'onnxruntime'"),
        (("--builds", "1"), "expected 2 or more"),
    ],
)
def test_what_precision_cannot_mend_is_an_error(hot, arguments, message):
    with pytest.raises(DittoError, match=message):
        precision(hot, *arguments)
    found, _ = precision(hot)  # verdicts that were left would be in the changed command's way
    assert found["minimal"]


def test_tensorrt_parses_the_mixed_graph_as_strongly_typed_and_builds_it(hot):
    """Built without a GPU; the norm's layers are float32 in the network and the other ones float16."""
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    precision(hot)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(Path("mixed.onnx").read_bytes()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    kinds = {trt.LayerType.REDUCE: trt.float32, trt.LayerType.MATRIX_MULTIPLY: trt.float16}
    found = [(layer.type, layer.get_output(0).dtype) for layer in layers if layer.type in kinds]
    reduces = [dtype for kind, dtype in found if kind == trt.LayerType.REDUCE]
    assert sorted(map(str, reduces)) == ["DataType.FLOAT", *["DataType.HALF"] * 3]
    assert {dtype for kind, dtype in found if kind == trt.LayerType.MATRIX_MULTIPLY} == {trt.float16}
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 32), (3, 32), (4, 32))
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None


def test_what_is_judged_ahead_comes_to_the_same_set(hot, workspace):
    from ditto_core.debug.trials import Elsewhere
    from ditto_core.engines.workers import in_process

    alone, _ = precision(hot)
    batches = []

    def run(work, tasks, workspace):
        batches.append(len(tasks))
        return in_process(work, tasks, workspace)

    found = search(hot, Elsewhere(run, workspace))
    assert found.to_json()["kept"] == alone["kept"]
    assert found.judged == alone["judged"]
    assert max(batches) > 4  # the guesses, and the four of the norm, each left out


def test_a_check_command_is_not_judged_ahead(hot):
    with pytest.raises(UsageError, match="leave out --jobs and --cluster"):
        precision(hot, "--jobs", "2", "--check", "true")


def search(path, elsewhere):
    from ditto_core.debug.iterations import IterationOptions
    from ditto_core.debug.precision import find_precision
    from ditto_core.debug.trials import PrecisionOptions

    options = PrecisionOptions(path, {"x": one_hot_norm()[1]["x"].numpy()})
    return find_precision(options, IterationOptions(), Path("ahead.onnx"), print, elsewhere)


def test_a_bfloat16_graph_is_judged_on_inputs_in_bfloat16(workspace):
    """What overflows in float16 does not here."""
    path = workspace.export(EngineSpec.of(one_hot_norm, dtype="bfloat16")).onnx_path
    assert onnx.load(path, load_external_data=False).graph.input[0].type.tensor_type.elem_type == TensorProto.BFLOAT16
    found, _ = precision(path, "--tolerance", "0.1")
    assert found["kept"] == []
    assert found["judged"] == 1
