"""`ditto debug reduce` on real ONNX Runtime engines with a known fault, beside the real Polygraphy."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from typer.testing import CliRunner

from benchmarks import debug_cases as cases
from ditto_core.cli import application
from ditto_core.errors import DittoError
from ditto_core.spec import EngineSpec
from tests.models import llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(case):
    onnx.save(case.bad, "bad.onnx")
    onnx.save(case.good, "good.onnx")
    np.savez("inputs.npz", **case.feed)


def reduce(*arguments):
    """Run the command in this process and return its result as JSON, and the names of the nodes that remain."""
    words = ["debug", "reduce", "bad.onnx", "-o", "out.onnx", "--json", "result.json", *map(str, arguments)]
    done = CliRunner().invoke(application(), words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(Path("result.json").read_text()), [node.name for node in onnx.load("out.onnx").graph.node]


REAL = ("--inputs", "inputs.npz", "--reference", "good.onnx")


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("count", [8, 64])
def test_one_bad_node_of_a_chain_takes_two_comparisons(count, place):
    case = cases.chain(count, place)
    write(case)
    result, left = reduce(*REAL)
    assert left == list(case.faulty)
    assert result["judged"] == 2
    assert list(result["ranking"]) == left


def test_a_bad_node_in_a_branch_is_found():
    case = cases.branch()
    write(case)
    assert reduce(*REAL)[1] == list(case.faulty)


def test_a_fault_that_adds_a_node_is_found_with_the_node_that_reads_it():
    """The good model has no value between the two, so neither can be compared without the other."""
    case = cases.chain(16, "middle")
    case.bad.CopyFrom(case.good)
    reader = next(node for node in case.bad.graph.node if node.name == "mm8")
    place = list(case.bad.graph.node).index(reader)
    case.bad.graph.initializer.append(numpy_helper.from_array(np.array(1.01, np.float32), "factor"))
    added = helper.make_node("Mul", [reader.input[0], "factor"], ["added"], name="added")
    reader.input[0] = "added"
    case.bad.graph.node.insert(place, added)
    write(case)
    result, left = reduce(*REAL)
    assert left == ["added", "mm8"]
    assert result["judged"] == 4  # the whole, the worst alone, both, and the other alone


def test_an_operator_that_lost_an_operand_is_found():
    """The good model adds two branches; the bad one hands one of them on, so the part lacks what the good one reads."""
    case = cases.branch()
    case.bad.CopyFrom(case.good)
    join = next(node for node in case.bad.graph.node if node.name == "join")
    join.op_type = "Identity"
    join.input.pop(0)
    write(case)
    result, left = reduce(*REAL)
    assert left == ["join"]
    assert result["judged"] == 2


def test_faults_that_only_together_pass_the_tolerance_leave_the_path_between_them():
    """Each weight is 0.7 % off: 0.7 % alone, 1.4 % together, and the tolerance is 1 %."""
    write(cases.case("sum", cases.straight(0, 16), (3, 11), factor=1.007))
    result, left = reduce(*REAL, "--tolerance", "0.01")
    assert left == [f"mm{i}" for i in range(3, 12)]
    assert result["judged"] <= 25


def test_one_matmul_of_an_exported_llama_is_found_and_its_activations_are_real(workspace):
    case = cases.llama(workspace.export(EngineSpec.of(llama)).onnx_path)
    write(case)
    result, left = reduce(*REAL)
    assert left == list(case.faulty)
    assert result["total"] > 100
    assert result["judged"] == 2
    (value,) = onnx.load("out.onnx").graph.input
    assert value.name in {v for n in case.bad.graph.node for v in n.output}
    assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [1, 5, 128]


def test_a_model_that_overflows_in_float16_is_reduced_against_itself_in_float64():
    """x * 200 * 200 for x = 2 is 80000, beyond float16's 65504; the second factor makes it so."""
    scale = numpy_helper.from_array(np.array(200, np.float16), "s")
    nodes = [helper.make_node("Mul", [a, "s"], [b], name=b) for a, b in (("x", "once"), ("once", "twice"))]
    nodes.append(helper.make_node("Relu", ["twice"], ["y"], name="y"))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, [4]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [scale])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), "bad.onnx")
    np.savez("inputs.npz", x=np.full(4, 2, np.float16))
    _, left = reduce("--inputs", "inputs.npz", "--reference-precision", "float64")
    assert left == ["twice"]


def test_expected_values_that_were_recorded_are_enough():
    case = cases.chain(8, "middle")
    write(case)
    values = onnx_values(case.good, case.feed)
    save_file({name: np.ascontiguousarray(array) for name, array in values.items()}, "expected.safetensors")
    assert reduce("--inputs", "inputs.npz", "--expected", "expected.safetensors")[1] == list(case.faulty)


def onnx_values(model, feed):
    """Evaluate by onnx's own reference implementation."""
    from onnx.reference import ReferenceEvaluator

    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    present = {v.name for v in model.graph.output}
    tapped.graph.output.extend(
        helper.make_tensor_value_info(n.output[0], TensorProto.FLOAT, [2, 8])
        for n in model.graph.node
        if n.output[0] not in present
    )
    return dict(zip([v.name for v in tapped.graph.output], ReferenceEvaluator(tapped).run(None, feed), strict=True))


TOGETHER = """
import onnx, sys
names = {node.name for node in onnx.load("polygraphy_debug.onnx").graph.node}
with open("checks.log", "a") as log:
    log.write(" ".join(sorted(names)) + "\\n")
sys.exit(1 if set(sys.argv[1:]) <= names else 0)
"""


def test_a_check_command_that_needs_two_nodes_together_finds_both():
    write(cases.pair())
    Path("check.py").write_text(TOGETHER)
    result, left = reduce("--check", sys.executable, "check.py", "mm3", "mm11")
    assert left == ["mm3", "mm11"]
    assert len(Path("checks.log").read_text().splitlines()) == result["judged"] <= 14
    kept = {"bad.onnx", "good.onnx", "inputs.npz", "check.py", "checks.log", "out.onnx", "result.json"}
    assert {p.name for p in Path().iterdir()} == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--inputs", "inputs.npz", "--reference", "bad.onnx"), "the whole model passes"),
        (("--inputs", "inputs.npz"), "nothing to compare with"),
        (("--reference", "good.onnx"), "give --inputs FILE"),
        (("--inputs", "other.npz", "--reference", "good.onnx"), "lacks 1 of 1 inputs"),
        (("--inputs", "inputs.npz", "--reference", "nowhere.onnx"), "nowhere.onnx is not there"),
        (("--inputs", "inputs.npz", "--reference", "inputs.npz"), "is not an ONNX model"),
        (("--fail-code", "3", *REAL), "need a --check COMMAND"),
        (("--level", "extendet", *REAL), "did you mean 'extended'"),
        (("--check", "true"), "the whole model passes"),
        (("--check", "false"), "the check fails on a good model too"),
        ((*REAL, "--check", "false"), "the check fails on a good model too"),
    ],
)
def test_a_failure_that_does_not_fail_and_a_pass_that_does_not_pass_are_errors(arguments, message):
    write(cases.chain(8, "middle"))
    np.savez("other.npz", y=np.zeros(3))
    with pytest.raises(DittoError, match=message):
        reduce(*arguments)
    assert not Path("out.onnx").exists()
    assert not list(Path().glob("*.jsonl"))  # the mended command would be refused for another's verdicts


@pytest.mark.parametrize("command", ["reduce", "precision"])
@pytest.mark.parametrize("name", ["bad.onnx", "good.onnx", "inputs.npz"])
def test_what_is_read_is_not_written_over(command, name):
    write(cases.chain(8, "middle"))
    before = Path(name).read_bytes()
    done = CliRunner().invoke(application(), ["debug", command, "bad.onnx", "-o", f"./{name}", *REAL])
    assert isinstance(done.exception, DittoError)
    assert f"--output {name} would overwrite the" in str(done.exception)
    assert Path(name).read_bytes() == before


@pytest.mark.parametrize("command", ["reduce", "precision"])
def test_the_result_is_not_written_to_the_file_that_is_removed_in_the_end(command):
    write(cases.chain(8, "middle"))
    done = CliRunner().invoke(application(), ["debug", command, "bad.onnx", "-o", "./polygraphy_debug.onnx", *REAL])
    assert isinstance(done.exception, DittoError)
    assert "--output polygraphy_debug.onnx is the --iter-artifact" in str(done.exception)


KILLING = """
import os, signal, sys
from pathlib import Path
import onnx
names = {node.name for node in onnx.load("polygraphy_debug.onnx").graph.node}
with open("checks.log", "a") as log:
    log.write(" ".join(sorted(names)) + "\\n")
if len(Path("checks.log").read_text().splitlines()) == 4 and not Path("killed").exists():
    Path("killed").touch()
    os.kill(os.getppid(), int(sys.argv[1]))
    signal.pause()
sys.exit(1 if "mm5" in names else 0)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_after_a_kill_or_ctrl_c_the_same_command_goes_on_and_repeats_no_check(number):
    write(cases.chain(16, "middle"))
    Path("check.py").write_text(KILLING)
    words = [
        sys.executable,
        "-m",
        "ditto_core",
        "debug",
        "reduce",
        "bad.onnx",
        "-o",
        "out.onnx",
        "--json",
        "result.json",
    ]
    words += ["--check", sys.executable, "check.py", str(int(number))]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    first, second = (
        subprocess.run(words, env=variables, capture_output=True, text=True, check=False) for _ in range(2)
    )
    assert first.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert second.returncode == 0, second.stderr
    assert "going on from 3 verdicts" in second.stderr
    assert [node.name for node in onnx.load("out.onnx").graph.node] == ["mm5"]
    checks = Path("checks.log").read_text().splitlines()
    interrupted = checks[3]
    assert {line: n for line, n in Counter(checks).items() if n > 1} == {interrupted: 2}
    assert json.loads(Path("result.json").read_text())["judged"] == len(checks) - 4
    assert not Path("ditto_debug_replay.jsonl").exists()


def test_artifacts_are_sorted_and_the_part_is_what_polygraphy_runs_on_the_captured_data():
    pytest.importorskip("polygraphy")
    write(cases.chain(8, "middle"))
    Path("check.py").write_text(RUN_POLYGRAPHY)
    result, left = reduce(*REAL, "--artifacts", "mismatch.log", "--check", sys.executable, "check.py")
    assert left == ["mm4"]
    assert result["judged"] == 3
    found = sorted(str(p.relative_to("ditto_debug_artifacts")) for p in Path("ditto_debug_artifacts").rglob("*.log"))
    assert found == ["bad/mismatch_0000_rc1.log", "bad/mismatch_0002_rc1.log", "good/mismatch_0001_rc0.log"]


RUN_POLYGRAPHY = """
import os, subprocess, sys
command = [os.path.join(os.path.dirname(sys.executable), "polygraphy"), "run", "polygraphy_debug.onnx", "--onnxrt"]
command += ["--load-inputs", "polygraphy_debug_inputs.json"]
if os.path.exists("polygraphy_debug_expected.json"):
    command += ["--load-outputs", "polygraphy_debug_expected.json", "--rtol", "1e-3", "--atol", "1e-3"]
with open("mismatch.log", "w") as log:
    sys.exit(subprocess.run(command, stdout=log, stderr=log).returncode)
"""


@pytest.mark.parametrize("mode", ["bisect", "linear"])
def test_polygraphy_needs_more_checks_for_the_same_node(mode):
    pytest.importorskip("polygraphy")
    pytest.importorskip("onnx_graphsurgeon")
    case = cases.chain(8, "middle")
    write(case)
    np.savez("captured.npz", **case.feed, **onnx_values(case.bad, case.feed))
    Path("check.json").write_text(json.dumps({"together": [], "tolerance": 1e-3}))
    check = ["--check", sys.executable, ROOT / "benchmarks" / "debug_check.py"]
    tool = Path(sys.executable).parent / "polygraphy"
    words = [tool, "debug", "reduce", "bad.onnx", "-o", "theirs.onnx", "--mode", mode, *check]
    subprocess.run(words, check=True, capture_output=True)
    theirs = len(Path("checks.log").read_text().splitlines())
    Path("checks.log").unlink()
    assert reduce(*REAL, *check)[1] == list(case.faulty)
    assert len(Path("checks.log").read_text().splitlines()) == 3 < theirs
