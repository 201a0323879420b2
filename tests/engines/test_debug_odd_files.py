"""`ditto debug reduce` and `precision` on ONNX files with branches, loops, functions, sequences and unread outputs."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from ditto_core.cli import application
from ditto_core.errors import DittoError

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
X = np.random.default_rng(3).standard_normal((2, 4))


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def op(kind, reads, makes, **attributes):
    makes = makes if isinstance(makes, list) else [makes]
    return helper.make_node(kind, reads, makes, name=f"{kind}:{makes[0]}", **attributes)


def value(name, kind=FLOAT, shape=(2, 4)):
    return helper.make_tensor_value_info(name, kind, shape)


def scalar(name, number, dtype=np.float16):
    return numpy_helper.from_array(np.array(number, dtype), name)


def matrix(name, columns=4, factor=1.0, dtype=np.float32):
    made = np.random.default_rng(columns).standard_normal((4, columns)) * factor
    return numpy_helper.from_array(made.astype(dtype), name)


def model(nodes, weights, outputs=("y",), inputs=(), kind=FLOAT, functions=()):
    graph = helper.make_graph(nodes, "g", [value("x", kind), *inputs], [value(o, kind) for o in outputs], weights)
    opsets = [helper.make_opsetid("", 20), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def debug(command, *words):
    done = CliRunner().invoke(application(), ["debug", command, *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def reduce(bad, good, *arguments, **feed):
    onnx.save(bad, "bad.onnx")
    if good is not None:
        onnx.save(good, "good.onnx")
        arguments = ("--reference", "good.onnx", *arguments)
    np.savez("inputs.npz", **feed)
    debug("reduce", "bad.onnx", "-o", "out.onnx", "--inputs", "inputs.npz", *arguments)
    return [node.op_type for node in onnx.load("out.onnx").graph.node]


def precision(half, **feed):
    onnx.save(half, "half.onnx")
    np.savez("half.npz", **feed)
    debug("precision", "half.onnx", "-o", "mixed.onnx", "--inputs", "half.npz")
    onnx.checker.check_model(onnx.load("mixed.onnx"), full_check=True)
    return [kept["node"] for kept in json.loads(Path("mixed.json").read_text())["kept"]]


def tail(source):
    """x * 300, its square (beyond float16's 65504), and that times 1e-6."""
    return [op("Mul", [source, "big"], "h"), op("Mul", ["h", "h"], "square"), op("Mul", ["square", "small"], "y")]


NUMBERS = (scalar("big", 300), scalar("small", 1e-6))
OVERFLOW = ["Mul:square", "Mul:y"]


def branching(outputs=("y",)):
    inner = numpy_helper.from_array(np.array([1, 1, 1, 1.5], np.float16), "k")
    yes = helper.make_graph([op("Mul", ["x", "k"], "t")], "yes", [], [value("t", HALF)], [inner])
    no = helper.make_graph([op("Neg", ["x"], "e")], "no", [], [value("e", HALF)])
    nodes = [op("If", ["c"], "b", then_branch=yes, else_branch=no), *tail("b")]
    return model(nodes, NUMBERS, outputs, [value("c", TensorProto.BOOL, ())], HALF)


def looping(nodes, after):
    """A loop of one turn whose body computes ``so`` from ``si``."""
    flag = value("ci", TensorProto.BOOL, ())
    ends = [value("co", TensorProto.BOOL, ()), value("so", HALF)]
    starts = [value("i", TensorProto.INT64, ()), flag, value("si", HALF)]
    body = helper.make_graph([op("Identity", ["ci"], "co"), *nodes], "body", starts, ends)
    weights = [*NUMBERS, scalar("trip", 1, np.int64), scalar("cond", True, np.bool_)]
    return model([op("Loop", ["trip", "cond", "x"], "b", body=body), *after], weights, kind=HALF)


def test_precision_of_a_graph_with_branches_keeps_what_overflows():
    assert precision(branching(), x=X.astype(np.float16), c=np.array(True)) == OVERFLOW


def test_precision_of_a_graph_with_a_loop_keeps_what_overflows():
    assert precision(looping([op("Tanh", ["si"], "so")], tail("b")), x=X.astype(np.float16)) == OVERFLOW


def test_an_overflow_inside_a_loop_is_not_taken_for_accurate():
    """Nothing in the body can be kept in float32, but the body's values are float16 in an engine."""
    inside = [op("Mul", ["si", "big"], "h"), op("Mul", ["h", "h"], "s"), op("Mul", ["s", "small"], "so")]
    with pytest.raises(DittoError, match="even with all"):
        precision(looping(inside, [op("Relu", ["b"], "y")]), x=X.astype(np.float16))


def norm_function(factor=1e-6):
    constant = helper.make_node("Constant", [], ["k"], value=scalar("", factor))
    nodes = [op("Mul", ["a", "a"], "t"), constant, op("Mul", ["t", "k"], "r")]
    return helper.make_function("mine", "Norm", ["a"], ["r"], nodes, [helper.make_opsetid("", 20)])


def test_precision_looks_into_functions():
    call = helper.make_node("Norm", ["h"], ["r"], domain="mine")
    nodes = [op("Mul", ["x", "big"], "h"), call, op("Tanh", ["r"], "y")]
    half = model(nodes, NUMBERS[:1], kind=HALF, functions=[norm_function()])
    assert len(precision(half, x=X.astype(np.float16))) == 2
    kinds = {node.op_type for node in onnx.load("mixed.onnx").graph.node}
    assert "Norm" not in kinds


def test_reduce_of_a_float16_branch_against_itself_in_float64_ends_at_the_overflow():
    half = branching(("square",))
    arguments = ("--reference-precision", "float64")
    assert reduce(half, None, *arguments, x=X.astype(np.float16), c=np.array(True)) == ["Mul"]
    assert onnx.load("out.onnx").graph.node[0].name == "Mul:square"


def picking(index):
    nodes = [op("MatMul", ["x", "w"], "a"), op("SplitToSequence", ["a", "n"], "s", axis=1)]
    nodes += [op("SequenceAt", ["s", "i"], "b"), op("Relu", ["b"], "y")]
    return model(nodes, [matrix("w", 8), scalar("n", 4, np.int64), scalar("i", index, np.int64)])


def test_a_part_is_not_cut_at_a_sequence():
    assert reduce(picking(0), picking(1), x=X.astype(np.float32)) == ["SplitToSequence", "SequenceAt"]


def pooling(factor, kind=FLOAT, dtype=np.float32):
    """MaxPool's second output, the indices, is read by nobody."""
    shape, pooled = (1, 1, 4, 4), ["p", "indices"]
    nodes = [op("Mul", ["x", "f"], "m"), op("MaxPool", ["m"], pooled, kernel_shape=[2, 2]), op("Tanh", ["p"], "y")]
    ends = [value("x", kind, shape)], [value("y", kind, (1, 1, 3, 3))]
    graph = helper.make_graph(nodes, "g", *ends, [scalar("f", factor, dtype)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


RECORDING = """
import os, sys, json
from pathlib import Path
import numpy as np
import onnx, onnxruntime
from ditto_core.dumps import open_dump
part = onnx.load("polygraphy_debug.onnx")
def read(path):
    dump = open_dump(path) if os.path.exists(path) else None
    return {n.removeprefix("output:"): dump.load(0, n).numpy() for n in dump.names(0)} if dump else {}
given, expected = read("polygraphy_debug_inputs.json"), read("polygraphy_debug_expected.json")
outputs = [v.name for v in part.graph.output]
with open("checks.jsonl", "a") as log:
    log.write(json.dumps({"outputs": outputs, "expected": sorted(expected)}) + "\\n")
session = onnxruntime.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"])
actual = dict(zip(outputs, session.run(outputs, given)))
assert set(expected) <= set(actual)
sys.exit(any(np.abs(actual[n].astype(float) - expected[n]).max() > 1e-2 for n in expected))
"""


def checks():
    return [json.loads(line) for line in Path("checks.jsonl").read_text().splitlines()]


def test_the_whole_model_has_its_own_outputs_and_none_that_nobody_reads():
    Path("check.py").write_text(RECORDING)
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 4)).astype(np.float32)
    assert reduce(pooling(1.5), pooling(1.0), "--check", sys.executable, "check.py", x=x) == ["Mul"]
    assert checks()[0]["outputs"] == ["y"]


def test_a_good_model_of_another_dtype_is_checked_on_inputs_that_it_takes():
    Path("check.py").write_text(RECORDING)
    bad = pooling(1.5, HALF, np.float16)
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 4)).astype(np.float16)
    assert reduce(bad, pooling(1.0), "--check", sys.executable, "check.py", x=x) == ["Mul"]


def test_the_model_that_hands_its_input_through_does_not_get_the_expected_values_of_another():
    Path("check.py").write_text(RECORDING)
    half = model(tail("x")[:2], NUMBERS[:1], ("square",), kind=HALF)
    arguments = ("--reference-precision", "float64", "--check", sys.executable, "check.py")
    reduce(half, None, *arguments, x=X.astype(np.float16))
    assert [sorted(c["expected"]) for c in checks()][:2] == [["square"], []]
