"""TensorRT engines on a GPU, beside eager. Nothing here is measured by a clock."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ditto_core.backends.eager import EagerSession
from ditto_core.backends.tensorrt.layers import load_layers, named_tensors
from ditto_core.backends.tensorrt.library import load_library
from ditto_core.backends.tensorrt.manifest import ENGINE_FILE
from ditto_core.compare.metrics import measure
from ditto_core.engines.engine import Engine, build_into
from ditto_core.errors import RunError, UsageError
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.session import Session
from ditto_core.spec import EngineSpec
from ditto_core.stepping.prompts import Sequencer, encode, greedy
from tests.faults import scale_weight
from tests.models import DECODERS, bert, conv_net

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: engines are built in tests/engines"),
]

EVERYTHING = ("**", "**:**")
PROFILE = {"batch": (1, 2, 4), "length": (1, 8, 64), "past": (0, 16, 128)}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [4, 5, 6], [9, 8, 7, 6, 5]]
GPU = PairOptions(device="cuda")


def spec_of(source, dtype="float16", outputs=EVERYTHING, **options) -> EngineSpec:
    return EngineSpec.of(source, backend="tensorrt", dtype=dtype, outputs=outputs, profile=PROFILE, options=options)


def steps(session: Session, prompts, count: int, sink=lambda site, tensor: None) -> list[torch.Tensor]:
    """Step a session on its own tokens and return the logits of each step."""
    batch = encode(prompts)
    sequence, logits = Sequencer(batch), []
    session.start(batch.rows)
    for _ in range(count):
        logits.append(session.step(sequence.inputs(), sink)["logits"])
        sequence.advance(greedy(logits[-1]))
    return logits


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", DECODERS)
def test_every_tap_of_a_padded_batch_is_within_tolerance_or_explained(family, dtype, workspace):
    pair = Pair(workspace, spec_of(DECODERS[family], dtype), GPU)
    run = pair.generate(PROMPTS, max_new_tokens=8)
    assert run.steps == 8
    assert not run.missing
    assert len(run.sites) >= 40
    run.assert_close()
    run.assert_same_tokens()
    assert run.observer is not None
    pair.close()


@pytest.mark.parametrize("source", [bert, conv_net])
def test_a_model_that_is_no_decoder_passes_in_one_step(source, workspace):
    pair = Pair(workspace, spec_of(source, "bfloat16"), GPU)
    pair.run().assert_close()
    pair.close()


@pytest.mark.parametrize(
    ("rows", "length", "count"),
    [(1, 1, 2), (2, 8, 9), (4, 64, 65), (3, 7, 4), (1, 63, 3)],
    ids=["min", "opt", "max", "off the grid", "long"],
)
@pytest.mark.parametrize("profiles", ["one", "split"])
def test_shapes_from_the_least_to_the_greatest_agree_with_eager(rows, length, count, profiles, workspace):
    prompts = [[3 + (7 * row + i) % 250 for i in range(length)] for row in range(rows)]
    pair = Pair(workspace, spec_of(DECODERS["llama"], "bfloat16", "model.layers.*", profiles=profiles), GPU)
    run = pair.generate(prompts, max_new_tokens=count)
    run.assert_close()
    run.assert_same_tokens()
    pair.close()


@pytest.fixture
def session(workspace):
    engine = workspace.build(spec_of(DECODERS["llama"], outputs="model.layers.*"))
    session = engine.open()
    yield session
    session.close()


def test_kernels_are_measured_and_not_believed(session, workspace):
    facts = session.info.facts
    assert "rel_l2" in facts["matmul"]
    assert "rel_l2" in facts["matvec"]
    assert facts["gpu"] == torch.cuda.get_device_name()
    fp32 = workspace.build(spec_of(DECODERS["llama"], "float32", ())).open()
    assert fp32.info.facts["tf32"].startswith(("in force although", "not in force"))
    fp32.close()


def test_coarse_kernels_are_a_property_with_evidence(session):
    session.start(1)
    for kernel in session.info.kernels:
        assert kernel.name == "float16 accumulation"
        assert kernel.ratio > 2
        assert "rel_l2" in kernel.evidence
    assert bool(session.info.kernels) == session.info.facts["matmul"].startswith("float16 accumulation")
    session.start(3)
    assert all(kernel.phase == "both" for kernel in session.info.kernels)


def test_the_drivers_override_turns_tf32_off():
    script = "from ditto_core.backends.tensorrt.probe import measure_kernels as m\n"
    script += "print(m('float32', True, 0).facts['tf32'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NVIDIA_TF32_OVERRIDE": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["not in force"], done.stderr[-2000:]


def test_the_same_steps_on_the_default_stream_and_on_the_callers_are_bit_identical(session):
    first = [logits.clone() for logits in steps(session, PROMPTS, 5)]
    with torch.cuda.stream(torch.cuda.Stream()):
        second = steps(session, PROMPTS, 5)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_inputs_on_the_gpu_are_bound_where_they_lie(session):
    batch = encode(PROMPTS)
    inputs = {name: tensor.cuda() for name, tensor in Sequencer(batch).inputs().items()}
    session.start(batch.rows)
    session.step(inputs, lambda site, tensor: None)
    context = session._loaded.context
    for name, tensor in inputs.items():
        assert context.get_tensor_address(name) == tensor.data_ptr()


def test_present_becomes_past_without_a_copy(session):
    context, outputs, pasts = None, [], []
    sequence = Sequencer(encode(PROMPTS))
    session.start(3)
    for _ in range(5):
        logits = session.step(sequence.inputs(), lambda site, tensor: None)["logits"]
        sequence.advance(greedy(logits))
        context = session._loaded.context
        outputs.append(context.get_tensor_address("present.1.value"))
        pasts.append(context.get_tensor_address("past_key_values.1.value"))
    assert pasts[1:] == outputs[:-1]
    assert all(a != b for a, b in zip(pasts, outputs, strict=True))


def test_wrong_inputs_are_named_before_anything_runs(session):
    good = Sequencer(encode(PROMPTS)).inputs()
    session.start(3)
    with pytest.raises(UsageError, match="input 'input_ids' is int32, the engine takes int64"):
        session.step({**good, "input_ids": good["input_ids"].int()}, lambda site, tensor: None)
    with pytest.raises(UsageError, match="step needs batch 5, outside the engine's profile"):
        session.start(5)
        session.step(Sequencer(encode([[3]] * 5)).inputs(), lambda site, tensor: None)
    session.start(3)
    assert torch.isfinite(session.step(good, lambda site, tensor: None)["logits"]).all()


def test_unfused_taps_change_nothing_and_those_with_a_name_are_right(workspace):
    plain = workspace.build(spec_of(DECODERS["llama"], outputs=(), taps="none")).open()
    expected = [logits.clone() for logits in steps(plain, PROMPTS, 4)]
    plain.close()
    pair = Pair(workspace, spec_of(DECODERS["llama"], taps="unfused"), PairOptions(device="cuda", observer=False))
    actual = steps(pair.sessions.engine, PROMPTS, 4)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    run = pair.generate(PROMPTS, max_new_tokens=4)
    delivered, named = (int(word) for word in pair.sessions.engine.info.facts["unfused"].split() if word.isdigit())
    assert delivered >= named > 5
    assert not [result for result in run.results if not result.ok]
    pair.close()


def test_the_inspector_names_what_the_builders_log_named(workspace):
    engine = workspace.build(spec_of(DECODERS["llama"], taps="unfused"))
    layers, graph = load_layers(engine.directory)
    logged = set(named_tensors(layers, graph).values())
    session = engine.open()
    inspected = set(session._unfused._names.values())
    session.close()
    assert len(logged & inspected) >= 0.9 * max(len(logged), len(inspected)) > 0


def test_a_fault_in_the_onnx_is_found_at_its_site(workspace, tmp_path):
    spec = spec_of(DECODERS["llama"], "bfloat16", ("**",))
    faulty = replace(workspace.export(spec), directory=tmp_path / "export")
    copy_export(workspace.export(spec).directory, faulty.directory)
    scale_weight(faulty.onnx_path, "model.layers.1.mlp.down_proj", 1.25)
    (tmp_path / "engine").mkdir()
    engine = replace(build_into(spec, faulty, tmp_path / "engine"), spec=spec)
    pair = Pair(workspace, spec, PairOptions(device="cuda", observer=False), engine)
    run = pair.generate(PROMPTS, max_new_tokens=3)
    assert not run
    assert run.first_bad is not None
    assert run.first_bad.site == "model.layers.1.mlp.down_proj"
    pair.close()


def test_local_errors_are_measured_on_the_engines_own_tensors(workspace, tmp_path):
    """The model is replayed on the CPU, on taps that lie on the GPU; no sum of this engine is rounded narrowly."""
    spec = spec_of(DECODERS["llama"], "bfloat16")
    pair = Pair(workspace, spec, GPU)
    healthy = pair.generate(PROMPTS, max_new_tokens=3, localize=True).localization
    pair.close()
    assert len(healthy.by_site) >= 40
    assert not [cause for cause in healthy.causes if cause.fault]
    faulty = replace(workspace.export(spec), directory=tmp_path / "export")
    copy_export(workspace.export(spec).directory, faulty.directory)
    scale_weight(faulty.onnx_path, "model.layers.1.mlp.down_proj", 1.25)
    (tmp_path / "engine").mkdir()
    engine = replace(build_into(spec, faulty, tmp_path / "engine"), spec=spec)
    pair = Pair(workspace, spec, PairOptions(device="cuda", observer=False), engine)
    found = pair.generate(PROMPTS, max_new_tokens=3, localize=True).localization
    assert found.first.site == "model.layers.1.mlp.down_proj"
    assert (found.cause.kind, found.cause.site) == ("weight scaled", "model.layers.1.mlp.down_proj")
    pair.close()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_relations_hold_wherever_the_reference_is(workspace, device):
    spec = spec_of(DECODERS["llama"], "bfloat16", "model.layers.*")
    pair = Pair(workspace, spec, PairOptions(device=device, observer=False))
    relations = pair.relations()
    relations.assert_hold(PROMPTS[0], "prefill_equals_steps", "left_padding", "row_in_batch", "warm_cache")
    relations.assert_shapes(PROMPTS[0])
    pair.close()


def test_a_reference_in_float32_convolves_in_float32(workspace):
    """CuDNN would take TF32, whose error is 3e-4."""
    model = workspace.model(EngineSpec.of(conv_net).model)
    there, here = EagerSession(model, (), device="cuda"), EagerSession(model, (), dtype="float64")
    found, exact = (session.step(model.examples, lambda site, tensor: None) for session in (there, here))
    assert found.keys() == exact.keys()
    for name, tensor in found.items():
        assert measure(tensor, exact[name]).rel_l2 < 1e-5


def copy_export(source, target) -> None:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


def test_an_engine_that_does_not_load_says_gpu_and_reason(workspace, tmp_path):
    engine = workspace.build(spec_of(DECODERS["llama"], outputs="model.layers.*")).copy_to(tmp_path / "copy")
    content = (engine.directory / ENGINE_FILE).read_bytes()
    (engine.directory / ENGINE_FILE).write_bytes(content[: len(content) // 2])
    (engine.directory / "digests.json").unlink()  # else it is refused before TensorRT sees it
    with pytest.raises(RunError, match=r"does not load the engine on .*\(\d+\.\d+\): ") as caught:
        Engine.load(engine.directory).open()
    assert "\n" not in str(caught.value)


def test_compiled_kernels_are_kept_for_the_next_session(workspace):
    engine = workspace.build(spec_of(DECODERS["qwen3"], outputs="model.layers.*"))
    first = engine.open()
    if first._loaded.kernels is None:
        pytest.skip("this TensorRT compiles when it builds")
    expected = steps(first, PROMPTS, 2)[-1].clone()
    file = first._loaded.kernels_file
    first.close()
    assert file.stat().st_size > 0
    second = engine.open()
    assert torch.equal(steps(second, PROMPTS, 2)[-1], expected)
    second.close()


def test_cuda_graphs_change_no_bit(workspace):
    if not load_library().rtx:
        pytest.skip("TensorRT-RTX alone captures graphs itself")
    outputs = ("model.layers.*",)
    plain = workspace.build(spec_of(DECODERS["llama"], outputs=outputs)).open()
    expected = [logits.clone() for logits in steps(plain, PROMPTS, 4)]
    plain.close()
    captured = workspace.build(spec_of(DECODERS["llama"], outputs=outputs, cuda_graphs=True)).open()
    for a, b in zip(steps(captured, PROMPTS, 4), expected, strict=True):
        assert torch.equal(a, b)
    captured.close()
