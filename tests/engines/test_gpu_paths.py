"""Whole features on tensors that lie on a GPU, shown on a stand-in for one (see gpu_stand_in)."""

from contextlib import contextmanager

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from ditto_core.backends.eager import EagerSession
from ditto_core.backends.packing import new_tokens, to_rows
from ditto_core.backends.tensorrt.library import load_library
from ditto_core.debug.builds import make_builder
from ditto_core.debug.evaluate import PLAIN
from ditto_core.errors import BackendError
from ditto_core.fuzz import Corpus, Fuzzer, Limits
from ditto_core.gates import Baseline, Gate, Policy, run_gate
from ditto_core.gates.calibration import Calibration, calibrate_suite
from ditto_core.model.loading import load_model
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.stepping.prompts import Sequencer, encode
from tests.engines.gpu_stand_in import OnGpuStandIn, gpu_stand_in
from tests.faults import graph, weights
from tests.gate_suites import tiny_suite
from tests.models import DECODERS, bert, conv_net

try:
    load_library()
except BackendError as error:
    pytest.skip(f"no TensorRT here: {error}", allow_module_level=True)

DOWN = "model.layers.1.mlp.down_proj"
PROFILE = {"batch": (1, 1, 4), "length": (1, 8, 16), "past": (0, 8, 32)}
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("cpu", "cuda")
SIDES = [("float16", "cpu"), ("bfloat16", "cuda")]
"""Dtype of the engine, which is on the GPU, and where the reference is."""


def spec_of(source=DECODERS["llama"], dtype="float16", outputs=("**", "**:**"), **fields) -> EngineSpec:
    return EngineSpec.of(source, backend="tensorrt", dtype=dtype, outputs=outputs, profile=PROFILE, **fields)


@contextmanager
def pair_on_gpu(workspace, spec, fault=None, **options):
    workspace.correct(spec)  # exports, or exports again: torch.export has no use for a stand-in
    with gpu_stand_in(workspace, fault):
        pair = Pair(workspace, spec, PairOptions(**options))
        yield pair
        pair.close()


@pytest.mark.parametrize(("dtype", "device"), SIDES)
def test_a_padded_batch_is_generated_compared_and_localized(workspace, dtype, device):
    with pair_on_gpu(workspace, spec_of(dtype=dtype), device=device) as pair:
        run = pair.generate(PROMPTS, max_new_tokens=3, localize=True)
        run.assert_close()
        assert run.observer is not None
        assert not run.missing
        assert run.engine.device == "cuda:0"
        assert {result.site for result in run.localization.results} == {tap.site for tap in run.taps}


def test_the_stand_in_refuses_what_a_gpu_refuses():
    """Else nothing here would show anything."""
    here = torch.ones(2, 3)
    with gpu_stand_in(None):
        there = here.to("cuda")
        refused = (torch.add, torch.equal, lambda a, b: torch.cat([a, b]), lambda a, b: torch.where(b > 0, a, 0))
        for function in refused:
            with pytest.raises(RuntimeError, match="same device"):
                function(there, here)
        for function in (torch.Tensor.numpy, np.asarray):
            with pytest.raises(TypeError, match="can't convert cuda:0"):
                function(there)
        for made in (there + 1, there[0], torch.empty(2, device=there.device), there.new_zeros(2), there.bfloat16()):
            assert isinstance(made, OnGpuStandIn)
            assert made.device.type == "cuda"
        home = there.cpu()
        assert type(home) is torch.Tensor
        assert torch.equal(home, here)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cause_is_found_on_the_engines_own_tensors(workspace, dtype):
    with pair_on_gpu(workspace, spec_of(dtype=dtype), weights.scaled(DOWN, 1.25), device="cuda") as pair:
        found = pair.generate(PROMPTS, max_new_tokens=2, localize=True).localization
    assert found.first.site == DOWN
    assert (found.cause.kind, found.cause.site) == ("weight scaled", DOWN)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_operator_inside_the_blamed_site_is_named(workspace, dtype):
    fault = graph.constant_changed("model.layers.1.self_attn:probs", "Mul", lambda s: s * 2)
    with pair_on_gpu(workspace, spec_of(dtype=dtype), fault, device="cuda", observer=False) as pair:
        found = pair.localize(PROMPTS[0], max_new_tokens=1, operators=True).localization
    assert found.first.site == "model.layers.1.self_attn:probs"
    assert found.first.operator.startswith("Mul ")
    assert found.first.operator.endswith(": 1.0e+00")


@pytest.mark.parametrize(("dtype", "device"), SIDES)
def test_relations_hold(workspace, dtype, device):
    with pair_on_gpu(workspace, spec_of(dtype=dtype), device=device, observer=False) as pair:
        relations = pair.relations()
        relations.assert_hold(PROMPTS[0])
        relations.assert_shapes(PROMPTS[0])


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cpu"), ("float16", "cuda")])
def test_a_repro_is_saved(workspace, dtype, device, tmp_path):
    with pair_on_gpu(workspace, spec_of(dtype=dtype), weights.scaled(DOWN, 1.25), device=device) as pair:
        pair.generate(PROMPTS, max_new_tokens=3)
        for site in (DOWN, "model.layers.1.self_attn", "model.layers.1.self_attn:v_states"):
            repro = pair.save_repro(site, tmp_path / site, step=2)
            assert repro.fails == (site == DOWN)


@pytest.mark.parametrize(("dtype", "device"), SIDES)
def test_a_dump_is_written_and_is_a_reference_again(workspace, dtype, device, tmp_path):
    spec = spec_of(dtype=dtype, outputs="model.layers.*")
    with pair_on_gpu(workspace, spec, device=device, dump=tmp_path) as pair:
        pair.generate(PROMPTS, max_new_tokens=3)
    for side in ("engine", "reference"):
        with pair_on_gpu(workspace, spec, reference=str(tmp_path / side), device=device) as pair:
            run = pair.generate(PROMPTS, max_new_tokens=3, localize=True)
            assert run
            if side == "engine":
                assert max(result.metrics.max_abs for result in run) == 0
        with pair_on_gpu(workspace, spec, reference=str(tmp_path / side), device=device, name_map={}) as pair:
            assert pair.generate(PROMPTS, max_new_tokens=3)


@pytest.mark.parametrize("reference", ("onnxruntime", "tensorrt:float32", "eager:bfloat16"))
def test_another_engine_is_the_reference(workspace, reference):
    with pair_on_gpu(workspace, spec_of(), reference=reference) as pair:
        pair.generate(PROMPTS, max_new_tokens=3, localize=True).assert_close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("source", (bert, conv_net))
def test_inputs_may_lie_on_either_side(workspace, source, where, device, tmp_path):
    spec = spec_of(source)
    with pair_on_gpu(workspace, spec, device=device, dump=tmp_path / "dump") as pair:
        inputs = {n: t.to(where) for n, t in workspace.model(spec.model).examples.items()}
        pair.run(inputs, localize=True).assert_close()
        pair.save_repro(pair.sessions.engine.taps[-1].site, tmp_path / "repro")
    with pair_on_gpu(workspace, spec, reference=str(tmp_path / "dump" / "reference"), name_map={}) as pair:
        pair.run(inputs).assert_close()


@pytest.mark.parametrize(("dtype", "device"), SIDES)
def test_a_gate_and_a_calibration_run(workspace, dtype, device):
    suite = tiny_suite(6, 6, 1)
    workspace.export(spec_of(dtype=dtype))
    with gpu_stand_in(workspace) as backend:
        policy = Policy(resamples=100, limits={"top1_disagreement": 0.5})  # the few tokens decide no usual limit
        gate = Gate(spec_of(dtype=dtype), suite, max_new_tokens=3, device=device, policy=policy)
        result = run_gate(gate, workspace)
        known = run_gate(gate, workspace, baseline=Baseline.of(result))
        errors = calibrate_suite(Calibration.of(gate, ("model.layers.*",), workspace), suite, workspace)
    result.assert_passed()
    assert [record.engine for record in known.records] == [record.engine for record in result.records]
    assert all("model.layers.*" in sample.errors for sample in errors)
    assert len(errors) == len(suite.samples)
    assert [session.closed for session in backend.opened] == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_of_a_build_is_judged_the_cache_too(workspace, tmp_path, monkeypatch, dtype):
    monkeypatch.chdir(tmp_path)
    feed = save_cached_step(tmp_path / "step.onnx", dtype)
    builder = make_builder("tensorrt", tmp_path / "step.onnx", PLAIN, {})
    with gpu_stand_in(workspace):
        made = builder.build(tmp_path / "step.engine", feed, ("y", "present.0.key"))
    assert made["y"].tolist() == [[2.5, 2.0]]
    assert made["present.0.key"].tolist() == [[0.5, 0.25], [2.5, 2.0]]


def test_a_build_runs_with_the_options_that_it_was_made_with(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feed, opened = save_cached_step(tmp_path / "step.onnx", "float32"), []
    builder = make_builder("tensorrt", tmp_path / "step.onnx", PLAIN, {"cuda_graphs": "true"})
    with gpu_stand_in(workspace) as backend:
        plain = backend.open
        backend.open = lambda *given: opened.append(given[0]) or plain(*given)
        builder.build(tmp_path / "step.engine", feed, ("y",))
    assert [(spec.option("cuda_graphs"), spec.option("probe")) for spec in opened] == [(True, False)]


def save_cached_step(path, dtype):
    """``y = x W`` is appended to a cache of one row; return inputs."""
    kind = getattr(onnx.TensorProto, {"float32": "FLOAT"}.get(dtype, dtype.upper()))
    real = helper.tensor_dtype_to_np_dtype(kind)
    tensors = {name: helper.make_tensor_value_info(name, kind, [1, 2]) for name in ("x", "past_key_values.0.key", "y")}
    tensors["present.0.key"] = helper.make_tensor_value_info("present.0.key", kind, [2, 2])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="mm"),
        helper.make_node("Concat", ["past_key_values.0.key", "y"], ["present.0.key"], name="cat", axis=0),
    ]
    weight = numpy_helper.from_array(np.array([[2.0, 0.0], [0.5, 2.0]]).astype(real), "w")
    inputs, outputs = ([tensors[name] for name in names] for names in (list(tensors)[:2], list(tensors)[2:]))
    made = helper.make_graph(nodes, "step", inputs, outputs, [weight])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), str(path))
    return {"x": np.array([[1.0, 1.0]]).astype(real), "past_key_values.0.key": np.array([[0.5, 0.25]]).astype(real)}


def on_gpu():
    """A model that its factory leaves on the GPU."""
    model = DECODERS["llama"]().to("cuda")
    assert model.device.type == "cuda"
    return model


def conv_on_gpu():
    model, inputs = conv_net()
    return model.to("cuda"), {name: tensor.to("cuda") for name, tensor in inputs.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_its_factory_leaves_on_a_gpu_is_copied_from_there(workspace, device):
    with gpu_stand_in(workspace):
        for factory in (on_gpu, conv_on_gpu):
            model = load_model(ModelSource.of(factory))
            assert not any(t.is_cuda for t in (*model.module.parameters(), *model.module.buffers()))
            assert not any(tensor.is_cuda for tensor in model.examples.values())
            inputs = Sequencer(encode([[3, 4, 5]])).inputs() if model.decoder else model.examples
            session = EagerSession(model, (), device=device)
            session.start(1)
            outputs = session.step(inputs, lambda site, tensor: None)
            assert {tensor.device.type for tensor in outputs.values()} == {device}


def test_a_dump_padded_on_the_right_is_laid_out_for_a_step_whose_mask_is_on_a_gpu():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    padded = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]])
    with gpu_stand_in(None):
        rows = to_rows(padded, new_tokens(mask.to("cuda"), 3))
    assert rows.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_prompts_are_searched_for_one_that_diverges(workspace, tmp_path):
    with pair_on_gpu(workspace, spec_of(), weights.scaled(DOWN, 1.25), device="cuda", observer=False) as pair:
        outcome = Fuzzer(pair, Corpus(tmp_path, 0, "toy"), Limits(rows=2, length=4, steps=2)).search(100)
    assert outcome.failure.shrunk
