"""Dumps that the real tools write, made once for the whole run."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

WEIGHT = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


@pytest.fixture(scope="session")
def weight():
    """The matrix of the model."""
    return WEIGHT


@pytest.fixture(scope="session")
def onnx_model(tmp_path_factory):
    """x -> MatMul -> Relu -> ArgMax, with every value an output."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["layers.0.up"]),
        helper.make_node("Relu", ["layers.0.up"], ["layers.0.act"]),
        helper.make_node("ArgMax", ["layers.0.act"], ["token"], axis=1),
    ]
    outputs = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in (
            ("layers.0.up", TensorProto.FLOAT),
            ("layers.0.act", TensorProto.FLOAT),
            ("token", TensorProto.INT64),
        )
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(WEIGHT, "w")])
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture(scope="session")
def polygraphy():
    """Runs the real polygraphy with the arguments given, and returns the finished process."""
    pytest.importorskip("polygraphy", reason="polygraphy is not installed")

    def run(*args):
        command = [
            sys.executable,
            "-c",
            "import sys; from polygraphy.tools import main; sys.exit(main())",
            *map(str, args),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def polygraphy_dumps(polygraphy, onnx_model, tmp_path_factory):
    """A folder with ``outputs.json``, ``inputs.json`` (two iterations) and the folders ``outputs`` and ``inputs``."""
    folder = tmp_path_factory.mktemp("polygraphy")
    base = ["run", "--onnxrt", onnx_model, "--iterations", "2"]
    for suffix in (".json", ""):
        saved = ["--save-outputs", folder / f"outputs{suffix}", "--save-inputs", folder / f"inputs{suffix}"]
        done = polygraphy(*base, *saved)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


EXECUTORCH = Path(__file__).with_name("make_etdump.py")


@pytest.fixture(scope="session")
def etdumps(tmp_path_factory):
    """A folder with ``one`` and ``two``: ETDump, ETRecord, debug buffer and eager's outputs of two inputs."""
    pytest.importorskip("executorch", reason="executorch is not installed")
    folder = tmp_path_factory.mktemp("executorch")
    command = [sys.executable, str(EXECUTORCH), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
