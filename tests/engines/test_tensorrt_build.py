"""TensorRT engines, built for real. TensorRT-RTX builds without a GPU; running is tested in tests/device."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto

from ditto_core.backends.base import BuildRequest
from ditto_core.backends.registry import get_backend
from ditto_core.backends.tensorrt import TensorRTBackend
from ditto_core.backends.tensorrt.build import Order, configure, give_timings, serialize
from ditto_core.backends.tensorrt.layers import load_layers
from ditto_core.backends.tensorrt.library import Messages, load_library
from ditto_core.backends.tensorrt.manifest import EngineManifest
from ditto_core.backends.tensorrt.network import Network
from ditto_core.backends.tensorrt.tensorrt_options import TensorrtOptions
from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import BackendError, BuildError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.profile import ShapeProfile
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from tests.engines.onnx_files import node, save, two_layers
from tests.models import DECODERS, bert, conv_net

EVERYTHING = ("**", "**:**")
FLOAT = TensorProto.FLOAT

try:
    load_library()
except BackendError as error:
    pytest.skip(f"TensorRT engines cannot be built here: {error}", allow_module_level=True)


def spec_of(model, dtype="float32", **fields) -> EngineSpec:
    return EngineSpec.of(model, backend="tensorrt", dtype=dtype, **{"outputs": EVERYTHING, **fields})


def build(onnx_path: Path, taps=(), *, artifacts=None, batch=(1, 2, 8), **options):
    """Build an ONNX file in this process; the folder of the engine is beside it."""
    spec = EngineSpec.of("model", backend="tensorrt", options={"isolate": False, **options}, profile={"batch": batch})
    directory = onnx_path.parent / "engine"
    directory.mkdir()
    chosen = tuple(Tap(f"onnx:{value}", value) for value in taps)
    request = BuildRequest(spec, onnx_path, chosen, ("y",), False, directory, artifacts)
    return TensorRTBackend().build(request), directory


@pytest.mark.parametrize("family", DECODERS)
def test_every_tap_of_every_family_is_an_output_of_the_engine(family, workspace):
    spec = spec_of(DECODERS[family])
    engine = workspace.build(spec)
    sites = [tap.site for tap in workspace.export(spec).provenance.taps]
    assert [tap.site for tap in engine.taps] == sites
    assert not engine.refused
    manifest = EngineManifest.load(engine.directory)
    assert (engine.directory / "engine.trt").stat().st_size == manifest.facts["engine_size"] > 10_000
    assert manifest.inputs[0].shape == ("batch", "length")
    assert {t.name: t.shape for t in manifest.inputs}["past_key_values.1.key"][2] == "past"
    assert [t.name for t in manifest.outputs][:3] == ["logits", "present.0.key", "present.0.value"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_precision_comes_from_the_graph(dtype, workspace):
    engine = workspace.build(spec_of(DECODERS["llama"], dtype, outputs="model.layers.*"))
    manifest = EngineManifest.load(engine.directory)
    assert {t.name: t.dtype for t in manifest.outputs}["logits"] == dtype
    assert {t.name: t.dtype for t in manifest.inputs} == {
        t.name: ("int64" if "past" not in t.name else dtype) for t in manifest.inputs
    }
    layers, _ = load_layers(engine.directory)
    kinds = {t.dtype for layer in layers if layer.kind == "gemm" for t in layer.outputs}
    assert kinds == {{"float16": "Half", "bfloat16": "BFloat16"}[dtype]}


@pytest.mark.parametrize("source", [bert, conv_net])
def test_a_model_that_is_no_decoder_builds(source, workspace):
    engine = workspace.build(spec_of(source))
    assert len(engine.taps) >= 4
    assert not engine.decoder


def test_a_second_build_comes_from_the_cache(workspace, monkeypatch):
    spec = spec_of(DECODERS["llama"])
    first = workspace.build(spec)
    monkeypatch.setattr(TensorRTBackend, "build", lambda self, request: pytest.fail("built again"))
    assert workspace.build(spec).directory == first.directory


def test_the_cache_key_tells_library_and_gpu(workspace):
    versions = get_backend("tensorrt").versions()
    assert load_library().version in versions.values()
    assert {"gpu", "driver"} <= versions.keys()


@pytest.mark.parametrize(
    ("given", "tf32", "level", "workspace"),
    [({}, False, None, None), ({"tf32": True, "optimization_level": 2, "workspace": "64MB"}, True, 2, 64_000_000)],
)
def test_flags_and_limits_reach_the_builders_configuration(tmp_path, given, tf32, level, workspace):
    library = load_library()
    trt, messages = library.module, Messages(library)
    path = two_layers(tmp_path / "m.onnx")
    network = Network.parse(library, messages, path)
    profile = ShapeProfile.parse({"batch": (1, 2, 8)})
    config = configure(network, Order(path, tmp_path, (), False, "float32", profile, TensorrtOptions(**given)))
    assert config.get_flag(trt.BuilderFlag.TF32) is tf32
    assert config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    assert level is None or config.builder_optimization_level == level
    assert workspace is None or config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == workspace
    assert config.num_optimization_profiles == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("known", [b"", b"damaged"])
@pytest.mark.parametrize("taken", [True, False])
def test_timings_are_kept_and_damaged_ones_are_done_without(tmp_path, monkeypatch, known, taken):
    """TensorRT-RTX has the calls of TensorRT's timing cache, though it times nothing; ``taken``: what set returns."""
    library = replace(load_library(), rtx=False)
    monkeypatch.setattr("ditto_core.backends.tensorrt.build.describe_gpu", lambda: {"gpu": "g", "driver": "1"})
    path = two_layers(tmp_path / "m.onnx")
    file = tmp_path / "timing.bin"
    monkeypatch.setattr("ditto_core.backends.tensorrt.build.state_file", lambda *parts: file)
    file.write_bytes(known)
    network = Network.parse(library, Messages(library), path)
    profile = ShapeProfile.parse({"batch": (1, 2, 8)})
    order = Order(path, tmp_path, (), False, "float32", profile, TensorrtOptions())
    given = give_timings
    offered = []

    def strict(config, content):
        offered.append(content)
        return given(config, content) and (taken or not content)

    monkeypatch.setattr("ditto_core.backends.tensorrt.build.give_timings", strict)
    assert serialize(network, configure(network, order), order)
    assert offered == ([known] if taken or not known else [known, b""])
    assert file.read_bytes() not in (b"", b"damaged")


def test_a_tensorrt_that_cannot_hand_over_unfused_tensors_says_what_to_take(tmp_path):
    network = Network.parse(load_library(), Messages(load_library()), two_layers(tmp_path / "m.onnx"))
    with pytest.raises(BuildError, match="cannot hand over unfused tensors: taps=outputs"):
        replace(network, definition=object()).mark_unfused()


def test_what_cannot_be_an_output_is_listed_with_the_reason(tmp_path):
    report, _ = build(two_layers(tmp_path / "m.onnx"), ["hidden", "size", "x", "act", "nothing", "w1"])
    assert [tap.value for tap in report.taps] == ["hidden", "act"]
    assert report.refused == {
        "onnx:size": "it is a shape tensor, which TensorRT computes on the host",
        "onnx:x": "it is an input of the network",
        "onnx:nothing": "the ONNX graph has no value 'nothing'",
        "onnx:w1": "the ONNX graph has no value 'w1'",
    }


def test_taps_as_outputs_break_fusions_and_unfused_taps_do_not(workspace):
    counts, taps = {}, {}
    for mode in ("outputs", "unfused", "none"):
        engine = workspace.build(spec_of(DECODERS["llama"], options={"taps": mode}))
        counts[mode], taps[mode] = engine.facts["layers"], engine.taps
        assert len(engine.taps) + len(engine.refused) == len(taps["outputs"])
    assert counts["unfused"] == counts["none"] < counts["outputs"]
    assert 0 < len(taps["unfused"]) < len(taps["outputs"])
    assert not taps["none"]
    # The residual stream crosses layers, so that it stays a tensor of its own.
    assert "model.layers.0.mlp.down_proj" in {tap.site for tap in taps["unfused"]} or "model.layers.0" in {
        tap.site for tap in taps["unfused"]
    }


def test_split_profiles_put_single_tokens_first(workspace):
    profile = {"batch": (1, 2, 4), "length": (1, 8, 32), "past": (0, 16, 64)}
    spec = spec_of(DECODERS["llama"], outputs=(), profile=profile, options={"profiles": "split"})
    manifest = EngineManifest.load(workspace.build(spec).directory)
    assert [dict(p) for p in manifest.profiles] == [
        {"batch": [1, 2, 4], "length": [1, 1, 1], "past": [0, 16, 64]},
        {"batch": [1, 2, 4], "length": [1, 8, 32], "past": [0, 16, 64]},
    ]


def test_profiles_may_be_listed_in_json(workspace):
    text = json.dumps([{"batch": [1, 1, 1], "length": [1, 1, 8], "past": [0, 0, 0]}, {"length": [1, 2, 4]}])
    manifest = EngineManifest.load(
        workspace.build(spec_of(DECODERS["llama"], outputs=(), options={"profiles": text})).directory
    )
    assert manifest.shape_profiles[0].length.max == 8
    assert manifest.shape_profiles[1].past.max == 1024


def test_a_dimension_that_no_profile_sizes_is_named(tmp_path):
    with pytest.raises(BuildError, match=r"input 'x' has a dimension 'rows' that no profile sizes \(known: batch"):
        build(two_layers(tmp_path / "m.onnx", batch="rows"))


@pytest.mark.parametrize("most", [2**31, 2**63])
def test_a_profile_that_tensorrt_cannot_hold_is_one_clear_error(tmp_path, most):
    with pytest.raises(BuildError, match=rf"refuses shapes .*\[{most}, 8\] \(min, opt, max\) of input 'x'"):
        build(two_layers(tmp_path / "m.onnx"), batch=(1, 2, most))


def test_a_dimension_without_a_name_is_not_taken_for_an_empty_one(tmp_path):
    borders = [("x", FLOAT, [None, 8])], [("y", FLOAT, [None, 8])]
    path = save(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"], "node_act")], *borders)
    with pytest.raises(BuildError, match=r"input 'x' has a dimension '\?' that no profile sizes"):
        build(path)


def test_an_input_that_is_returned_as_it_is_is_named(tmp_path):
    path = save(tmp_path / "m.onnx", [], [("x", FLOAT, [2, 3])], [("x", FLOAT, [2, 3])])
    with pytest.raises(BuildError, match="input 'x' is an output too"):
        build(path)


def test_products_over_dynamic_dimensions_have_no_fixed_inner_one(tmp_path):
    nodes = [node("Transpose", ["x"], ["t"], "node_t"), node("MatMul", ["t", "x"], ["y"], "node_mm")]
    path = save(tmp_path / "m.onnx", nodes, [("x", FLOAT, ["batch", 8])], [("y", FLOAT, [8, 8])])
    report, _ = build(path)
    assert report.facts["inner"] == 0


def test_what_tensorrt_logs_stays_off_stdout(tmp_path, capsys):
    bad = node("Det", ["x"], ["y"], "node_det")
    with pytest.raises(BuildError):
        build(save(tmp_path / "m.onnx", [bad], [("x", FLOAT, [2, 3, 3])], [("y", FLOAT, [2])]))
    out, err = capsys.readouterr()
    assert out == ""
    assert "ERROR: " in err


def test_a_node_without_an_origin_leaves_no_gap(tmp_path):
    with pytest.raises(BuildError, match=r"at ONNX node node_out \(Reshape\): "):
        build(two_layers(tmp_path / "m.onnx"), batch=(0, 0, 0))


def test_the_artifacts_are_readable_and_name_layers_and_kernels(workspace, tmp_path):
    folder = tmp_path / "artifacts"
    export = workspace.export(spec_of(DECODERS["llama"]))
    taps = export.provenance.taps
    (tmp_path / "engine").mkdir()
    spec = spec_of(DECODERS["llama"])
    request = BuildRequest(spec, export.onnx_path, taps, export.finals, True, tmp_path / "engine", folder)
    TensorRTBackend().build(request)

    network = (folder / "trt_network_def.py").read_text()
    names = {t.id for n in ast.walk(ast.parse(network)) if isinstance(n, ast.Assign) for t in n.targets}
    assert {"input_ids", "logits", "model_layers_1_mlp_down_proj"} <= names
    lines = network.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("model_layers_1_mlp_down_proj = "))
    assert lines[at - 1] == "# tensor: model.layers.1.mlp.down_proj"
    assert lines[at - 2].startswith("# layer: node_linear_13 | MatMul | model.layers.1.mlp.down_proj (Linear), ")
    assert "self.down_proj(" in lines[at - 2]
    assert lines[at].endswith("# float32 [-1, -1, 64], tap model.layers.1.mlp.down_proj, output")

    engine = json.loads((folder / "trt_engine.json").read_text())
    assert len(engine["Layers"]) > 20
    kernels = json.loads((folder / "trt_kernels_per_site.json").read_text())
    assert all(kernels[tap.site] for tap in taps)
    assert "model.layers.0.self_attn.k_proj" in kernels["model.layers.0.self_attn.q_proj"][0]["modules"]
    builder = json.loads((folder / "trt_builder_config.json").read_text())
    assert builder["options"]["tf32"] is False
    assert builder["profiles"] == [{"batch": [1, 1, 8], "length": [1, 16, 512], "past": [0, 64, 1024]}]


@pytest.mark.parametrize("mode", ["outputs", "unfused"])
def test_an_engine_from_the_cache_has_the_artifacts_of_a_new_one(mode, workspace, tmp_path, monkeypatch):
    spec = spec_of(DECODERS["llama"], outputs="model.layers.*", options={"taps": mode})
    new, kept = (Workspace(Cache(tmp_path / n), artifacts=tmp_path / n / "art") for n in ("new", "kept"))
    for each in (new, kept):
        monkeypatch.setattr(each, "export", workspace.export)
    new.build(spec)
    plain = Workspace(kept.cache)
    monkeypatch.setattr(plain, "export", workspace.export)
    plain.build(spec)
    monkeypatch.setattr(TensorRTBackend, "build", lambda self, request: pytest.fail("built again"))
    kept.build(spec)
    texts = [next((tmp_path / n / "art").glob("*/trt_network_def.py")).read_text() for n in ("new", "kept")]
    assert texts[0] == texts[1]
    kernels = [next((tmp_path / n / "art").glob("*/trt_kernels_per_site.json")).read_text() for n in ("new", "kept")]
    assert kernels[0] == kernels[1]
    assert all(next((tmp_path / "kept" / "art").glob(f"*/trt_{n}.json")) for n in ("engine", "builder_config"))


def test_a_node_that_cannot_be_parsed_is_told_with_module_and_source_line(tmp_path):
    bad = node("Det", ["x"], ["y"], "node_det", "layers.3.mlp", "models/llama/modeling_llama.py")
    path = save(tmp_path / "m.onnx", [bad], [("x", FLOAT, [2, 3, 3])], [("y", FLOAT, [2])])
    with pytest.raises(BuildError) as caught:
        build(path)
    library = load_library()
    assert str(caught.value) == (
        f"{library.label} {library.version} cannot parse ONNX node node_det (Det) at layers.3.mlp (LlamaMLP), "
        "models/llama/modeling_llama.py:42 in forward: return det(x): operator Det is not supported"
    )


def test_a_type_error_carries_what_tensorrt_said_of_it(tmp_path):
    bad = node("Add", ["x", "h"], ["y"], "node_add", "mlp", "models/llama/modeling_llama.py")
    kinds = [("x", FLOAT, [2, 3]), ("h", TensorProto.FLOAT16, [2, 3])]
    path = save(tmp_path / "m.onnx", [bad], kinds, [("y", FLOAT, [2, 3])])
    with pytest.raises(BuildError, match=r"node_add \(Add\) at mlp \(LlamaMLP\).*types Float and Half") as caught:
        build(path)
    assert "\n" not in str(caught.value)
    assert "/_src/" not in str(caught.value)
    assert "cudaError" not in str(caught.value)


def test_a_file_that_is_no_onnx_is_one_clear_line(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no onnx")
    with pytest.raises(UsageError, match=r"m\.onnx is not an ONNX model"):
        build(tmp_path / "m.onnx")


def test_a_builder_that_returns_nothing_names_the_node_and_the_last_error(tmp_path):
    nodes = [node("Reshape", ["x", "shape"], ["y"], "node_view", "mlp.view", "models/llama/modeling_llama.py")]
    constants = {"shape": np.array([3, 7], np.int64)}
    path = save(tmp_path / "m.onnx", nodes, [("x", FLOAT, ["batch", 8])], [("y", FLOAT, [3, 7])], constants)
    with pytest.raises(BuildError) as caught:
        build(path)
    text = str(caught.value)
    assert "could not build the engine at ONNX node node_view (Reshape), mlp.view (LlamaMLP), models/llama" in text
    assert "\n" not in text


def test_a_build_in_a_child_process_keeps_errors_and_log(tmp_path):
    bad = node("Det", ["x"], ["y"], "node_det")
    path = save(tmp_path / "m.onnx", [bad], [("x", FLOAT, [2, 3, 3])], [("y", FLOAT, [2])])
    with pytest.raises(BuildError, match="cannot parse ONNX node node_det"):
        build(path, isolate=True)
    assert "ERROR" in (tmp_path / "engine" / "build.log").read_text()


def test_a_build_that_hangs_ends_at_its_timeout(tmp_path):
    with pytest.raises(BuildError, match=r"still running after 0.05 s \(hang\?\), killed"):
        build(two_layers(tmp_path / "m.onnx"), isolate=True, timeout=0.05)


def test_a_quantized_graph_builds_in_its_own_precision(tmp_path):
    generator = np.random.default_rng(0)
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zero"], ["xq"], "node_q"),
        node("DequantizeLinear", ["xq", "sx", "zero"], ["xd"], "node_dq"),
        node("DequantizeLinear", ["w", "sw", "zero"], ["wd"], "node_dqw"),
        node("MatMul", ["xd", "wd"], ["y"], "node_mm"),
    ]
    constants = {
        "sx": np.float32(0.05),
        "sw": np.float32(0.01),
        "zero": np.int8(0),
        "w": generator.integers(-127, 127, (64, 32)).astype(np.int8),
    }
    constants = {name: np.asarray(value) for name, value in constants.items()}
    path = save(tmp_path / "m.onnx", nodes, [("x", FLOAT, ["batch", 64])], [("y", FLOAT, ["batch", 32])], constants)
    report, directory = build(path, ["xd"])
    assert [tap.value for tap in report.taps] == ["xd"]
    layers, _ = load_layers(directory)
    assert "Int8" in {t.dtype for layer in layers for t in (*layer.inputs, *layer.outputs)}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"dtype": "float64"}, BackendError, "tensorrt has no float64 kernels, expected float32, float16, bfloat16"),
        ({"options": {"tap": "none"}}, UsageError, "tensorrt has no option 'tap'; did you mean 'taps'?"),
        ({"options": {"taps": "unfuse"}}, UsageError, "TensorRT option taps is 'unfuse'.*did you mean 'unfused'?"),
    ],
)
def test_a_spec_that_cannot_be_built_is_refused_before_anything_is_exported(fields, error, message):
    with pytest.raises(error, match=message):
        TensorRTBackend().check(EngineSpec.of("model", backend="tensorrt", **fields))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_an_engine_is_built_and_running_it_is_refused_with_the_reason(workspace):
    engine = workspace.build(spec_of(DECODERS["llama"]))
    with pytest.raises(BackendError, match=r"run on an NVIDIA GPU only: .*; building works here"):
        engine.open()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_cannot_run_here_is_refused_before_it_is_built(tmp_path):
    workspace = Workspace(Cache(tmp_path))
    pair = Pair(workspace, spec_of(DECODERS["llama"]))
    with pytest.raises(BackendError, match="run on an NVIDIA GPU only"):
        pair.generate([5, 6, 7], max_new_tokens=1)
    assert workspace.cache.entries() == []
