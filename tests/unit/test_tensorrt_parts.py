"""The parts of the TensorRT backend that need no TensorRT."""

import sys
import textwrap

import onnx
import pytest
import torch

from ditto_core.backends.tensorrt import probe
from ditto_core.backends.tensorrt.layers import (
    Layer,
    LayerTensor,
    layers_of_sites,
    load_layers,
    named_tensors,
    parse_inspector,
    parse_log,
    same_elements,
    save_layers,
)
from ditto_core.backends.tensorrt.library import clean, load_library
from ditto_core.backends.tensorrt.listener import in_shape
from ditto_core.backends.tensorrt.state import read_state, state_file, update_state
from ditto_core.backends.tensorrt.tensorrt_options import TensorrtOptions, dimension_sizes
from ditto_core.cache import Cache
from ditto_core.errors import BackendError, UsageError
from ditto_core.graphs.graph import Graph
from ditto_core.profile import ShapeProfile
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from tests.engines.onnx_files import two_layers


def options(**values) -> TensorrtOptions:
    return TensorrtOptions.of(EngineSpec.of("model", backend="tensorrt", options=values))


def test_options_read_what_a_command_line_gives_as_text():
    assert options(workspace="1000").workspace == 1000
    read = options(tf32="true", optimization_level="3", timeout="90.5", profiles='[{"batch": [1, 2, 4]}]')
    assert (read.tf32, read.optimization_level, read.timeout) == (True, 3, 90.5)
    assert read.shape_profiles(ShapeProfile())[0].batch.max == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tf23": True}, "tensorrt has no option 'tf23'; did you mean 'tf32'?"),
        ({"tf32": "yes"}, "TensorRT option tf32 is 'yes', expected true or false"),
        ({"taps": "all"}, "TensorRT option taps is 'all', expected outputs, unfused, none"),
        ({"profiles": "splot"}, "TensorRT option profiles is 'splot'.*did you mean 'split'?"),
        ({"profiles": 3}, "TensorRT option profiles is 3, expected one, split or a list"),
        ({"optimization_level": 6}, "optimization_level is 6, expected 0 to 5"),
        ({"optimization_level": 2.0}, "optimization_level is 2.0, expected 0 to 5"),
        ({"optimization_level": True}, "optimization_level is True, expected 0 to 5"),
        ({"profiles": []}, "profiles is an empty list, expected one profile at least"),
        ({"profiles": [{"rows": (1, 2, 3)}]}, "unknown profile dimension 'rows'"),
        ({"workspace": "99999999TB"}, "workspace is '99999999TB', more than any GPU has"),
        ({"workspace": "4 gigs"}, "cannot read the size '4 gigs'"),
        ({"timeout": "soon"}, "timeout is 'soon', expected seconds, more than 0"),
        ({"timeout": 0}, "timeout is 0, expected seconds, more than 0"),
    ],
)
def test_an_option_that_cannot_be_is_one_clear_line(values, message):
    with pytest.raises(UsageError, match=message):
        options(**values)


def test_total_is_past_plus_length():
    profile = ShapeProfile.parse({"batch": (1, 2, 4), "length": (1, 8, 32), "past": (0, 16, 64)})
    assert dimension_sizes(profile)["total"] == (1, 24, 96)


def test_without_tensorrt_the_remedy_is_named():
    with pytest.raises(BackendError, match=r"TensorRT is not installed: pip install .*\[tensorrt\]"):
        load_library(("no_such_tensorrt",))


def test_a_wheel_without_its_libraries_is_told_apart_and_passed_over(tmp_path, monkeypatch):
    (tmp_path / "broken_trt.py").write_text("raise OSError('libnvinfer.so.10: cannot open shared object file')")
    (tmp_path / "working_rtx.py").write_text("__version__ = '9.9'\nclass Builder: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendError, match=r"broken_trt is installed but does not load \(libnvinfer"):
        load_library(("broken_trt",))
    library = load_library(("broken_trt", "working_rtx"))
    assert (library.label, library.version, library.rtx) == ("TensorRT-RTX", "9.9", True)
    sys.modules.pop("working_rtx", None)


def test_messages_become_one_line_without_source_positions():
    text = (
        "Invalid Node - node_add\nITensor::getDimensions: Error Code 4: API Usage Error (node_add: must have same "
        "types. In validateTypes at /_src/optimizer/common/nodes/elementWiseNode.cpp:38)\n"
        "[checkMacros.cpp::catchCudaError::247] Error Code 1: Cuda Runtime (In catchCudaError at /_src/x.cpp:247 (35))"
    )
    said = clean(text)
    assert said.startswith(
        "Invalid Node - node_add ITensor::getDimensions: Error Code 4: API Usage Error (node_add: must"
    )
    assert "/_src/" not in said
    assert "\n" not in said
    assert "catchCudaError" not in said


def test_what_stands_in_parentheses_stays_there_without_its_position():
    text = "Error Code 4: API Usage Error (no solution. In operator() at /_src/optimizer/shapeContext.cpp:4634)"
    assert clean(text) == "Error Code 4: API Usage Error (no solution.)"


LOG = textwrap.dedent(
    """\
    Layers:
    Name: gemm_a, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [-1,8], Strides: [8,1], Datatype: Half, Format: F }], Constants: [ { Name: w1, Dimensions: [8,16], Datatype: Half, Format: F }], Outputs: [ { Name: __mye1_myl1, Dimensions: [-1,16], Strides: [16,1], Datatype: Half, Format: F }], TacticName: sm80_xmma, StreamId: 0, Metadata: [ONNX Layer: node_up]
    Name: __mye2, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, Metadata: 
    Name: fused, LayerType: kgen, Inputs: [ { Name: __mye1_myl1, Location: Device, Dimensions: [-1,16], Datatype: Half, Format: F }], Outputs: [ { Name: y, Dimensions: [-1,4], Datatype: Float, Format: F }, { Name: act.1_myl1, Dimensions: [], Datatype: Half, Format: F }], TacticName: kernel_x, StreamId: 0, Metadata: [ONNX Layer: node_act][ONNX Layer: node_down]
    """  # noqa: E501, W291 - as TensorRT logs it
)


def test_the_builders_table_of_layers_is_read():
    first, second, third = parse_log(LOG)
    assert first == Layer(
        "gemm_a",
        "gemm",
        "sm80_xmma",
        ("node_up",),
        (LayerTensor("x", "Half", (-1, 8)),),
        (LayerTensor("__mye1_myl1", "Half", (-1, 16)),),
    )
    assert (second.inputs, second.outputs, second.kernel) == ((), (), "")
    assert [t.name for t in third.outputs] == ["y", "act.1_myl1"]
    assert third.nodes == ("node_act", "node_down")


@pytest.mark.parametrize("key", ["Format/Datatype", "Format/DataType", "Datatype"])
def test_the_inspectors_json_of_10_and_11_is_read(key):
    text = (
        '{"Layers": [{"Name": "gemm_a", "LayerType": "gemm", "Inputs": [], "Outputs": [{"Name": "t", "Dimensions": '
        f'[-1, 16], "{key}": "Half"}}], "TacticName": "k", "Metadata": "[ONNX Layer: node_up]"}}, "bare"], '
        '"Bindings": ["x"]}'
    )
    detailed, bare = parse_inspector(text)
    assert detailed == Layer("gemm_a", "gemm", "k", ("node_up",), (), (LayerTensor("t", "Half", (-1, 16)),))
    assert bare.name == "bare"


@pytest.fixture
def graph(tmp_path):
    return Graph.read(two_layers(tmp_path / "m.onnx"))


def test_nodes_know_module_class_and_source(graph):
    node = graph.origin("hidden")
    assert (node.name, node.operator, node.module, node.module_class) == (
        "node_up",
        "MatMul",
        "mlp.up_proj",
        "models.llama.LlamaMLP",
    )
    assert node.source == "models/llama/modeling_llama.py:42 in forward: return matmul(x)"
    assert {name: graph.shapes[name] for name in graph.inputs} == {"x": ("batch", 8)}
    assert graph.shapes["hidden"] == ("batch", 16)


def test_an_engine_keeps_its_graph_without_weights(graph, tmp_path):
    save_layers(tmp_path, [], graph)
    layers, kept = load_layers(tmp_path)
    assert layers == []
    assert kept.described == graph.described
    assert (kept.inputs, kept.outputs, kept.shapes) == (graph.inputs, graph.outputs, graph.shapes)
    assert [(w.name, w.raw_data) for w in kept.weights.values()] == [(name, b"") for name in graph.weights]


@pytest.mark.parametrize(
    ("names", "values"),
    [(["node_up", "node_act"], ["act"]), (["node_up"], ["hidden"]), (["node_down", "node_out"], ["y"]), ([], [])],
)
def test_the_frontier_of_a_set_of_nodes_is_what_others_use(graph, names, values):
    assert graph.leaving([place for name in names for place in graph.positions[name]]) == values


def test_sites_find_the_layers_that_compute_them(graph):
    sites = layers_of_sites(parse_log(LOG), graph, [Tap("up", "hidden"), Tap("act", "act"), Tap("y", "y")])
    assert [entry["layer"] for entry in sites["up"]] == ["gemm_a"]
    assert sites["act"] == [
        {"layer": "fused", "kind": "kgen", "kernel": "kernel_x", "modules": ["mlp.act_fn", "mlp.down_proj"]}
    ]
    assert [entry["kernel"] for entry in sites["y"]] == ["kernel_x"]


def test_unfused_tensors_are_named_where_one_possibility_is_left(graph):
    assert named_tensors(parse_log(LOG), graph) == {"__mye1_myl1": "hidden", "y": "y", "act.1_myl1": "act"}


def test_a_name_that_two_nodes_share_names_neither_and_moves_no_other(graph):
    """The first node again, under its name and before the others: they stood one place too early."""
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    model.graph.node.insert(0, onnx.helper.make_node("MatMul", ["x", "w_up"], ["again"], name="node_up"))
    shared = Graph(model)
    places = {name: [i + 1 for i in found] for name, found in graph.positions.items()}
    assert shared.positions == {**places, "node_up": [0, *places["node_up"]]}
    assert shared.described.keys() == graph.described.keys() - {"node_up"}
    assert named_tensors(parse_log(LOG), shared) == {"y": "y", "act.1_myl1": "act"}
    assert layers_of_sites(parse_log(LOG), shared, [Tap("up", "hidden"), Tap("y", "y")])["up"] == []


def test_a_value_that_two_tensors_could_be_is_left_unnamed(graph):
    twin = Layer("move", "kgen", "k", ("node_up",), (), (LayerTensor("__mye9_myl1", "Half", (-1, 16)),))
    assert "__mye1_myl1" not in named_tensors([*parse_log(LOG), twin], graph)


@pytest.mark.parametrize(
    ("engine", "onnx", "same"),
    [
        ((-1, 64), ("batch", "length", 64), True),
        ((-1, -1, 64), ("batch", "length", 64), True),
        ((-1, 128), ("batch", "length", 64), False),
        ((-1, 4, -1, 16), ("batch", 4, "length", 16), True),
        ((64,), ("batch", 64), False),
        ((-1, -1), ("batch", "length"), False),
    ],
)
def test_shapes_that_can_be_one_tensor(engine, onnx, same):
    assert same_elements(engine, onnx) is same


def test_a_folded_tensor_gets_its_shape_back_and_one_of_another_size_is_refused():
    sizes = {"batch": 1, "length": 6}
    tensor = torch.arange(24.0).reshape(6, 4)
    assert torch.equal(in_shape(tensor, ("batch", "length", 4), sizes), tensor.reshape(1, 6, 4))
    assert in_shape(tensor, ("batch", "length", 5), sizes) is None
    assert in_shape(tensor, ("s7", 4), sizes) is tensor
    assert in_shape(tensor, ("s7", "length", 4), sizes) is None


def test_the_order_in_which_several_dimensions_were_folded_is_not_guessed():
    folded, sizes = torch.arange(24.0).reshape(6, 4), {"batch": 2, "length": 3}
    assert in_shape(folded, ("batch", "length", 4), sizes) is None
    assert in_shape(folded.reshape(2, 3, 4), ("batch", "length", 4), sizes) is not None


def test_kernels_are_named_by_their_error():
    exact, tf32 = probe.Error(1.5e-7, 1.5e-7), probe.Error(3.0e-4, 1.5e-7)
    assert probe.describe("float32", True, tf32, exact).facts["tf32"] == "in force"
    facts = probe.describe("float32", False, tf32, exact).facts
    assert facts["tf32"] == (
        "in force although the flag is cleared; set NVIDIA_TF32_OVERRIDE=0 before the process starts"
    )
    assert facts["matmul"] == "TF32 (rel_l2 3.0e-04, ideal 1.5e-07)"
    assert facts["matvec"] == "float32 (rel_l2 1.5e-07, ideal 1.5e-07)"
    assert probe.describe("float32", False, probe.Error(4e-6, 1.5e-7), exact).facts["tf32"] == "not in force"


def test_a_coarse_kernel_is_a_property_with_its_ratio_its_phase_and_the_evidence():
    good, coarse = probe.Error(2.0e-4, 2.0e-4), probe.Error(9.0e-4, 2.0e-4)
    (found,) = probe.describe("float16", False, coarse, good).properties
    assert (found.name, found.ratio, found.phase) == ("float16 accumulation", pytest.approx(4.5), "prefill")
    assert found.evidence == (
        "a product of 16 rows has rel_l2 9.0e-04, ideal 2.0e-04; of one row 2.0e-04, ideal 2.0e-04"
    )
    assert probe.describe("float16", False, coarse, coarse).properties[0].phase == "both"
    assert probe.describe("float16", False, good, good).properties == ()
    kernels = probe.describe("float16", False, coarse, good)
    assert [kernel.phase for kernel in kernels.for_rows(1)] == ["prefill"]
    assert [kernel.phase for kernel in kernels.for_rows(3)] == ["both"]
    (tf32,) = probe.describe("float32", False, probe.Error(3e-4, 1.5e-7), probe.Error(1.5e-7, 1.5e-7)).properties
    assert (tf32.name, tf32.ratio) == ("TF32", pytest.approx(2000))


def test_the_least_error_of_a_probe_is_that_of_rounding():
    exact = torch.tensor([1.0, 1 + 2.0**-12], dtype=torch.float64)
    assert probe.relative(exact.half().double(), exact) == pytest.approx(2.0**-12 / 2**0.5, rel=1e-3)


def test_by_products_live_in_the_cache_that_holds_the_engine(tmp_path):
    cache = Cache(tmp_path / "cache")
    path = cache.get_or_build("engine", "k", lambda folder: (folder / "f").touch(), describe={})
    file = state_file(path, "tensorrt-timing", "1.6.1", "NVIDIA H100 (9.0)", "")
    assert file == tmp_path / "cache" / "state" / "tensorrt-timing" / "1.6.1-NVIDIA_H100_9.0_.bin"
    assert read_state(file) == b""
    update_state(file, lambda content: content + b"a")
    update_state(file, lambda content: content + b"b")
    assert read_state(file) == b"ab"
    assert cache.verify() == []
    assert state_file(tmp_path / "elsewhere" / "engine", "tensorrt-timing", "x") is None
    assert read_state(None) == b""
