"""What a session does around an engine, shown on a stand-in for the engine (see tensorrt_stand_in)."""

import weakref
from dataclasses import replace

import pytest
import torch

from ditto_core.backends.onnxruntime import OnnxRuntimeSession
from ditto_core.backends.tensorrt.library import Messages, load_library
from ditto_core.backends.tensorrt.listener import UnfusedTensors
from ditto_core.backends.tensorrt.manifest import EngineManifest
from ditto_core.backends.tensorrt.session import TensorRTSession, make_binder
from ditto_core.errors import BackendError, RunError, UsageError
from ditto_core.spec import EngineSpec
from tests.engines.tensorrt_stand_in import CPU, StandInStreams, stand_in
from tests.models import DECODERS, bert

try:
    LIBRARY = load_library()
except BackendError as error:
    pytest.skip(f"no TensorRT here: {error}", allow_module_level=True)

PROFILE = {"batch": (1, 1, 4), "length": (1, 8, 16), "past": (0, 8, 32)}
OUTPUTS = ("model.layers.*", "model.layers.*.self_attn.*_proj", "model.norm")


def spec_of(source=DECODERS["llama"], **options) -> EngineSpec:
    return EngineSpec.of(source, backend="tensorrt", outputs=OUTPUTS, profile=PROFILE, options=options)


def open_stand_in(workspace, spec, dtypes=None) -> TensorRTSession:
    engine = workspace.build(spec)
    manifest, messages = EngineManifest.load(engine.directory), Messages(LIBRARY)
    values = [tap.value for tap in engine.taps]
    loaded = stand_in(workspace.export(spec).onnx_path, values, dtypes)
    binder = make_binder(LIBRARY, manifest, loaded, messages, device=CPU)
    return TensorRTSession(
        spec, manifest, engine.taps, loaded=loaded, binder=binder, messages=messages, streams=StandInStreams()
    )


@pytest.fixture(scope="module")
def session(workspace):
    return open_stand_in(workspace, spec_of())


def ids_for(step: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """A prompt of 5 tokens (the second row left-padded by 2), then one token a step."""
    length, past = (5, 0) if step == 0 else (1, 4 + step)
    mask = torch.ones(rows, past + length, dtype=torch.int64)
    mask[1:, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -length:]
    tokens = torch.arange(rows * length).reshape(rows, length) % 250 + 3 + step
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def collect(into: dict):
    return lambda site, tensor: into.__setitem__(site, tensor.clone())


def test_every_tap_of_a_prefill_and_ten_decoding_steps_equals_onnx_runtime(session, workspace):
    spec = EngineSpec.of(DECODERS["llama"], outputs=OUTPUTS, profile=PROFILE)
    engine = workspace.build(spec)
    other = OnnxRuntimeSession(spec, engine.directory, engine.taps)
    session.start(2)
    other.start(2)
    for step in range(11):
        ours, theirs = {}, {}
        mine = session.step(ids_for(step), collect(ours))
        yours = other.step(ids_for(step), collect(theirs))
        assert mine.keys() == yours.keys() == {"logits"}
        assert list(ours) == [tap.site for tap in session.taps] == list(theirs)
        torch.testing.assert_close(mine["logits"], yours["logits"], rtol=0, atol=0)
        for site, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[site], rtol=0, atol=0)


def test_present_becomes_past_without_a_copy_and_the_two_buffers_take_turns(session):
    session.start(2)
    context = session._loaded.context
    name, outputs, inputs = "0.key", [], []
    for step in range(6):
        session.step(ids_for(step), lambda site, tensor: None)
        outputs.append(context.addresses[f"present.{name}"])
        inputs.append(context.addresses[f"past_key_values.{name}"])
    assert all(a != b for a, b in zip(outputs, inputs, strict=True))
    assert inputs[1:] == outputs[:-1]


def test_the_past_that_a_step_read_can_be_seen_for_a_repro_of_it(session):
    session.start(2)
    session.step(ids_for(0), lambda site, tensor: None)
    key = session.past["past_key_values.0.key"].clone()
    assert key.shape == (2, 2, 5, 16)
    after = {}
    session.step(ids_for(1), collect(after))
    assert torch.equal(session.past["past_key_values.0.key"][:, :, :5], key)


def test_kv_buffers_grow_by_doubling_and_not_by_a_token(session):
    session.start(2)
    seen = set()
    for step in range(12):
        session.step(ids_for(step), lambda site, tensor: None)
        seen.add(session._loaded.context.addresses["present.0.key"])
    # Two buffers, each replaced when it doubles: 5 tokens -> 10 -> 20.
    assert len(seen) <= 6


def test_an_empty_past_is_bound_to_a_valid_address(session):
    session.start(2)
    session.step(ids_for(0), lambda site, tensor: None)
    context = session._loaded.context
    assert context.shapes["past_key_values.0.key"] == (2, 2, 0, 16)
    assert context.addresses["past_key_values.0.key"] != 0


def test_logits_that_a_caller_keeps_are_not_overwritten(session):
    session.start(2)
    kept = [session.step(ids_for(step), lambda site, tensor: None)["logits"] for step in range(3)]
    copies = [tensor.clone() for tensor in kept]
    session.step(ids_for(3), lambda site, tensor: None)
    for tensor, copy in zip(kept, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_a_state_of_fixed_size_begins_with_zeros(session, monkeypatch):
    window = replace(session.manifest.inputs[-1], name="past_key_values.0.conv", shape=("batch", 4096, 3))
    monkeypatch.setattr(session, "manifest", replace(session.manifest, inputs=(window,)))
    monkeypatch.setattr(session, "_past", {})
    session.start(2)
    assert torch.equal(session.past["past_key_values.0.conv"].float().cpu(), torch.zeros(2, 4096, 3))


def test_a_new_start_forgets_the_past(session):
    session.start(2)
    first = session.step(ids_for(0), lambda site, tensor: None)["logits"]
    session.step(ids_for(1), lambda site, tensor: None)
    session.start(2)
    assert torch.equal(session.step(ids_for(0), lambda site, tensor: None)["logits"], first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.ones(2, 5)}, "input 'input_ids' is float32, the engine takes int64"),
        ({"input_ids": torch.ones(2, 5, dtype=torch.int32)}, "input 'input_ids' is int32, the engine takes int64"),
        ({"input_ids": torch.ones(2, 5, 1, dtype=torch.int64)}, r"'input_ids' has shape \[2, 5, 1\], expected \[batch"),
        ({"input_ids": torch.ones(3, 5, dtype=torch.int64)}, "'attention_mask' has batch 2, but 'input_ids' has 3"),
        ({"position_ids": torch.ones(2, 4, dtype=torch.int64)}, "'position_ids' has length 4, but 'input_ids' has 5"),
        (
            {"attention_mask": torch.ones(2, 7, dtype=torch.int64)},
            r"'attention_mask' covers 7 tokens, expected past 0 \+ length 5 = 5",
        ),
        ({"input_ids": torch.ones(2, 5, dtype=torch.int64, device="meta")}, "'input_ids' is on meta, expected cpu"),
        ({"position_ids": None}, "the engine needs input 'position_ids', given: attention_mask, input_ids"),
    ],
)
def test_an_input_that_does_not_fit_is_an_error_that_names_it(session, change, message):
    session.start(2)
    inputs = {name: tensor for name, tensor in {**ids_for(0), **change}.items() if tensor is not None}
    with pytest.raises(UsageError, match=message):
        session.step(inputs, lambda site, tensor: None)


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [(5, 5, r"step needs batch 5, outside the engine's profile 1..4"), (1, 17, "step needs length 17")],
)
def test_a_step_beyond_the_profile_names_dimension_and_remedy(session, rows, length, message):
    session.start(rows)
    tokens = torch.ones(rows, length, dtype=torch.int64)
    with pytest.raises(UsageError, match=message):
        session.step(dict.fromkeys(("input_ids", "attention_mask", "position_ids"), tokens), lambda site, tensor: None)


def test_an_int32_engine_gets_the_values_and_not_the_bits_of_int64_ids(workspace, session):
    narrow = open_stand_in(workspace, spec_of(), {"input_ids": "int32"})
    session.start(2)
    narrow.start(2)
    expected = session.step(ids_for(0), lambda site, tensor: None)["logits"]
    assert torch.equal(narrow.step(ids_for(0), lambda site, tensor: None)["logits"], expected)
    huge = {**ids_for(0), "input_ids": torch.full((2, 5), 2**31)}
    narrow.start(2)
    with pytest.raises(UsageError, match="'input_ids' holds 2147483648, beyond the engine's int32"):
        narrow.step(huge, lambda site, tensor: None)


def test_strided_inputs_are_read_in_their_own_order(session):
    session.start(2)
    expected = session.step(ids_for(0), lambda site, tensor: None)["logits"]
    session.start(2)
    strided = {name: tensor.t().contiguous().t() for name, tensor in ids_for(0).items()}
    assert not strided["input_ids"].is_contiguous()
    assert torch.equal(session.step(strided, lambda site, tensor: None)["logits"], expected)


def test_the_narrowest_profile_that_fits_serves_a_step(workspace):
    split = open_stand_in(workspace, spec_of(profiles="split"))
    split.start(2)
    for step in range(3):
        split.step(ids_for(step), lambda site, tensor: None)
    split.start(2)
    split.step(ids_for(0), lambda site, tensor: None)
    # A context starts at profile 0, the one of single tokens.
    assert split._loaded.context.profiles == [1, 0, 1]


def test_an_execution_that_fails_says_step_and_advice(session):
    session.start(2)
    session._loaded.context.fails = True
    try:
        with pytest.raises(RunError, match=r"the engine failed in step 0: .*CUDA_LAUNCH_BLOCKING=1"):
            session.step(ids_for(0), lambda site, tensor: None)
    finally:
        session._loaded.context.fails = False


def test_shapes_that_tensorrt_cannot_infer_are_told(session, monkeypatch):
    def fail() -> None:
        raise RuntimeError("infer_shapes error code: -1")

    monkeypatch.setattr(session._loaded.context, "infer_shapes", fail)
    session.start(2)
    with pytest.raises(RunError, match=r"cannot infer shapes from input_ids \[2, 5\], "):
        session.step(ids_for(0), lambda site, tensor: None)


def test_an_engine_of_another_version_is_refused(session):
    from ditto_core.backends.tensorrt.session import require_version

    require_version(LIBRARY, session.manifest)
    with pytest.raises(RunError, match=r"built by .* 0\.9, but .* is installed; build it again"):
        require_version(LIBRARY, replace(session.manifest, version="0.9"))


def test_a_closed_session_holds_no_tensor_of_the_debug_listener(workspace):
    """TensorRT's listener and what collects for it hold each other, so that only the collector would free them."""
    session = open_stand_in(workspace, spec_of())
    unfused = session._unfused = object.__new__(UnfusedTensors)
    unfused._found = {"hidden": torch.ones(3)}
    tensor = weakref.ref(unfused._found["hidden"])
    session.close()
    assert tensor() is None


def test_a_model_without_a_cache_runs_in_one_step(workspace):
    spec = EngineSpec.of(bert, backend="tensorrt", outputs="encoder.layer.*", profile=PROFILE)
    session = open_stand_in(workspace, spec)
    module, inputs = workspace.model(spec.model).module, workspace.model(spec.model).examples
    taps: dict[str, torch.Tensor] = {}
    session.start(2)
    outputs = session.step(inputs, collect(taps))
    expected = module(**inputs)
    assert list(taps) == ["encoder.layer.0", "encoder.layer.1"]
    torch.testing.assert_close(outputs["last_hidden_state"], expected.last_hidden_state, rtol=1e-4, atol=1e-5)


def test_a_second_logger_is_nothing_to_speak_of_and_gets_its_own_errors(capfd):
    said = [Messages(LIBRARY) for _ in range(2)]
    builders = [LIBRARY.module.Builder(messages.logger) for messages in said]
    assert capfd.readouterr().err == ""
    builders[1].build_serialized_network(builders[1].create_network(0), builders[1].create_builder_config())
    assert "at least one output" in said[1].last()
    assert not said[0].errors
