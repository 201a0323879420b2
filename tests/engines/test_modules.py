"""Real engines of modules that are no decoders, of ONNX or traced: what a tap is, and which sizes an engine takes."""

import platform
from functools import partial

import pytest
import torch

from ditto_core.engines.engine import resolve_taps
from ditto_core.errors import BuildError, RunError, SelectorError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec
from tests.models import conv_net
from tests.module_models import (
    averaging,
    counting,
    counts_one_row,
    counts_rows,
    encoder_decoder,
    faulty_encoder_decoder,
    fused_encoder,
    gated,
    one_line,
    one_row,
    positions,
    regions,
    remembering,
    residual_net,
    sequences,
    shared,
    square_image,
    whole_numbers,
    writes,
)

EVERYTHING = ("**", "**:**")


def test_one_name_for_two_tensors_is_refused(workspace):
    def taps(outputs):
        spec = EngineSpec.of(conv_net, outputs=outputs)
        return [tap.site for tap in resolve_taps(spec, workspace.export(spec))]

    with pytest.raises(SelectorError, match="outputs give 2 tensors the name 'a', expected a name for each"):
        taps({"fx:conv2d": "a", "fx:linear": "a"})
    assert taps(["fx:linear", "fx:lin*"]) == ["fx:linear"]


@pytest.fixture
def pair_of(workspace):
    pairs = []

    def make(source, **fields):
        pairs.append(Pair(workspace, EngineSpec.of(source, **{"outputs": EVERYTHING, **fields})))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def captured(session, inputs):
    taps = {}
    session.start(2)
    session.step(inputs, lambda site, tensor: taps.update({site: tensor.clone()}))
    return taps


TRACED = {"backend": "inductor", "options": {"compiler": "aot_eager"}}
"""An engine of the exported program, as torch.compile, AOTInductor and ExecuTorch build it; the others are of ONNX."""


@pytest.mark.parametrize("fields", [{"dtype": "float32"}, {"dtype": "float16"}, TRACED])
def test_a_healthy_network_that_writes_in_place_passes_and_nothing_is_blamed(pair_of, fields):
    run = pair_of(residual_net, **fields).run(localize=True)
    run.assert_close()
    assert {"stem.1", "stem.2", "layer1.0.bn2", "layer1.0.relu", "layer1.0.relu@1"} <= set(run.sites)
    assert not run.localization.blamed
    assert not run.localization.causes


@pytest.mark.parametrize("fields", [{}, TRACED])
def test_a_tap_is_what_the_module_returned_not_what_was_written_into_it_later(pair_of, workspace, fields):
    pair = pair_of(residual_net, **fields)
    net = workspace.model(pair.spec.model).module
    image = workspace.model(pair.spec.model).examples["image"]
    with torch.no_grad():
        convolved = net.stem[0](image)
        normalized = net.stem[1](convolved).clone()
        rectified = normalized.clamp(min=0)
    assert bool((normalized < 0).any())
    for session in (pair.sessions.engine, pair.sessions.reference):
        taps = captured(session, {"image": image})
        torch.testing.assert_close(taps["stem.1"].float(), normalized)
        torch.testing.assert_close(taps["stem.2"].float(), rectified)


@pytest.mark.parametrize("fields", [{}, TRACED])
def test_writes_through_views_and_into_an_input_are_compared_at_their_time_and_spoil_no_input(pair_of, fields):
    x = torch.randn(3, 6)
    given = x.clone()
    run = pair_of(writes, **fields).run({"x": given, "n": torch.tensor([1, 2, 3])}, localize=True)
    run.assert_close()
    assert torch.equal(given, x)
    assert {"first", "second:in", "second", "z", "n:out"} <= set(run.sites)
    assert not run.localization.blamed


@pytest.mark.parametrize("outputs", [EVERYTHING, ("linear",)])
def test_a_site_that_the_exporter_folds_to_a_constant_is_compared_like_any_other(pair_of, outputs):
    run = pair_of(positions, outputs=outputs).run(localize=True)
    run.assert_close()
    assert ("positions" in run.sites) == (outputs == EVERYTHING)
    assert not run.missing
    assert not run.localization.blamed


def test_outputs_may_have_the_names_of_inputs_and_modules_and_be_nested_single_or_empty(pair_of, workspace):
    pair = pair_of(shared)
    run = pair.run()
    run.assert_close()
    names = ("sample:out", "features", "last", "all.0", "all.1.hidden", "pair.0", "pair.1", "mask:out", "mean", "empty")
    assert workspace.export(pair.spec).finals == names
    assert {"step", "step@1", "features", "output:features", "sample:out", "mean"} <= set(run.sites)
    net, examples = workspace.model(pair.spec.model).module, workspace.model(pair.spec.model).examples
    session = pair.sessions.engine
    session.start(3)
    outputs = session.step(examples, lambda site, tensor: None)
    with torch.no_grad():
        hidden = net.step(net.step(examples["sample"]))
        torch.testing.assert_close(outputs["sample:out"], hidden * 2)
        torch.testing.assert_close(outputs["features"], net.features(hidden) + 1)
        torch.testing.assert_close(outputs["mean"], hidden.mean())
    assert torch.equal(outputs["mask:out"], examples["mask"])


@pytest.mark.parametrize("compiler", ["", "aot_eager", "aot_inductor"])
def test_each_step_begins_with_the_buffers_that_the_engine_was_built_with(pair_of, workspace, compiler):
    fields = {"backend": "inductor", "options": {"compiler": compiler}} if compiler else {}
    pair = pair_of(counting, **fields, outputs="**")
    assert [bool(pair.run(localize=True)) for _ in range(2)] == [True, True]
    module = workspace.model(pair.spec.model).module
    assert (int(module.calls), module.mean.tolist()) == (0, [1.0] * 4)


@pytest.mark.parametrize("compiler", ["", "aot_eager", "aot_inductor"])
def test_a_buffer_that_is_returned_is_compared_as_it_was_then(pair_of, workspace, compiler):
    """It is given back when the step ends: results were what it held before, or those of the step before."""
    fields = {"backend": "inductor", "options": {"compiler": compiler}} if compiler else {}
    pair = pair_of(averaging, **fields, outputs="**")
    for _ in range(2):
        pair.run().assert_close()
    module, x = averaging()[0], workspace.model(pair.spec.model).examples["x"]
    expected = module(x)["last"].clone()
    for session in (pair.sessions.engine, pair.sessions.reference):
        session.start(3)
        last = session.step({"x": x}, lambda site, tensor: None)["last"]
        torch.testing.assert_close(last.float(), expected)


@pytest.mark.parametrize("kind", ["number", "object", "list", "dict", "attribute"])
def test_each_step_begins_with_what_the_module_remembered_at_first(pair_of, kind):
    pair = pair_of(partial(remembering, kind), outputs="**")
    for _ in range(2):
        found = pair.run(localize=True)
        found.assert_close()
        assert not found.localization.blamed


def test_of_a_model_without_modules_the_outputs_are_compared(pair_of):
    run = pair_of(whole_numbers, outputs="**").run()
    run.assert_close()
    assert {r.site: r.metrics.mismatched for r in run.results} == {"quotient": 0, "less": 0}


def test_only_modules_that_have_a_wanted_site_are_listened_to(pair_of, workspace):
    pair = pair_of(residual_net, outputs=("layer1.0.bn2", "fc"))
    heard = []
    net = workspace.model(pair.spec.model).module
    session = workspace.eager(pair.spec, pair.engine.taps, dtype="float32")
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: heard.append("_call_impl" in vars(module))
    )
    try:
        taps = captured(session, {"image": torch.rand(2, 3, 24, 24)})
    finally:
        handle.remove()
    assert set(taps) == {"layer1.0.bn2", "fc"}
    assert sum(heard) == 2
    assert len(heard) > len(list(net.children()))


@pytest.mark.parametrize("fields", [{}, {"dtype": "float16", "options": {"level": "extended"}}])
def test_the_parts_of_an_encoder_that_torch_fuses_are_compared_by_their_floors(pair_of, fields):
    run = pair_of(fused_encoder, **fields).run()
    run.assert_close()
    assert {"0.self_attn", "0.linear1", "0.norm2"} <= set(run.sites)
    assert all(result.floor is not None for result in run.results)


@pytest.mark.parametrize("shape", [(3, 7, 6), (2, 11, 6), (5, 2, 6)])
def test_batch_and_time_of_sequences_have_any_size(pair_of, shape):
    pair_of(sequences).run({"x": torch.randn(shape)}).assert_close()


def test_a_length_that_a_program_was_traced_for_alone_is_said_when_another_comes(pair_of):
    """torch unrolls an LSTM over the time of the example."""
    with pytest.raises(RunError, match="'x' has size 11 in dimension 1, the program was traced for 7 alone"):
        pair_of(sequences, **TRACED).run({"x": torch.randn(2, 11, 6)})


def test_regions_of_autocast_and_of_gradients_are_in_a_program_with_what_is_written_in_them(pair_of):
    run = pair_of(regions, **TRACED).run(localize=True)
    run.assert_close()
    assert {"first", "second"} <= set(run.sites)
    assert not run.localization.blamed


@pytest.mark.parametrize("rows", [1, 3])
def test_an_example_of_one_row_does_not_freeze_the_batch(pair_of, rows):
    pair_of(one_row).run({"input": torch.randn(rows, 4)}).assert_close()


@pytest.mark.parametrize("fields", [{}, TRACED])
@pytest.mark.parametrize(("source", "rows", "other"), [(counts_rows, 2, 3), (counts_one_row, 1, 2)])
def test_a_batch_that_the_models_code_freezes_is_said_when_another_comes(pair_of, source, rows, other, fields):
    """The example's own size runs: one row was not traced as two."""
    pair = pair_of(source, outputs="**", **fields)
    pair.run().assert_close()
    with pytest.raises(UsageError, match=rf"'x' has size {other} in dimension 0, its batch is frozen to {rows}"):
        pair.run({"x": torch.randn(other, 4)})


def test_a_row_alone_is_no_relation_of_a_model_that_freezes_its_batch(pair_of):
    relations = pair_of(counts_rows, outputs="**").relations()
    assert all(relations.check(None, "same_bits"))
    with pytest.raises(UsageError, match="has size 1 in dimension 0, its batch is frozen to 2"):
        relations.check()


def test_a_named_dimension_that_the_models_code_freezes_is_refused(pair_of):
    with pytest.raises(BuildError, match=r"dimension 0 of 'x' \(rows\) is frozen to 2: the model's code"):
        pair_of(counts_rows, outputs="**", dynamic={"x": {0: "rows"}}).run()


@pytest.mark.parametrize("size", [(16, 16), (32, 16), (18, 30)])
@pytest.mark.parametrize(
    "fields",
    [
        {"profile": {"height": (8, 16, 64), "width": (8, 16, 64)}},
        {"dynamic": {"input": {2: "rows", 3: "columns"}}, "profile": {"rows": (8, 16, 64), "columns": (8, 16, 64)}},
    ],
    ids=["profile", "dynamic"],
)
def test_height_and_width_that_are_named_have_any_size(pair_of, size, fields):
    pair_of(square_image, **fields).run({"input": torch.rand(2, 3, *size)}).assert_close()


def test_a_size_that_the_engine_was_not_built_for_is_named_with_the_way_out(pair_of):
    with pytest.raises(
        UsageError, match=r"'input' has size 32 in dimension 2, .* built for 16.*dynamic=.*'input': .2:"
    ):
        pair_of(square_image).run({"input": torch.rand(1, 3, 32, 16)})
    with pytest.raises(UsageError, match="'input' has 3 dimensions, expected 4"):
        pair_of(square_image).run({"input": torch.rand(3, 16, 16)})


def test_a_dimension_that_the_example_fixes_cannot_be_dynamic(pair_of):
    with pytest.raises(
        BuildError, match=r"dimension 2 of 'input' \(height\) is frozen to 1: give an example of at least 2"
    ):
        pair_of(one_line, profile={"height": (1, 1, 16)}).run()


@pytest.mark.parametrize(
    ("dynamic", "told"),
    [
        ({"picture": {2: "rows"}}, "'picture'.*has input"),
        ({"input": {4: "rows"}}, "dimension 4 of 'input', which has 4"),
    ],
)
def test_dynamic_names_what_there_is(pair_of, dynamic, told):
    with pytest.raises(UsageError, match=told):
        pair_of(one_line, dynamic=dynamic).run()


@pytest.mark.parametrize(
    "dynamic", ["height", {"input": "height"}, {"input": {"2": "height"}}, {"input": {2: "two rows"}}]
)
def test_dynamic_that_is_no_table_of_dimensions_is_refused(dynamic):
    with pytest.raises(UsageError, match=r"dynamic .*expected a table such as"):
        EngineSpec.of(one_line, dynamic=dynamic)


def test_the_mask_of_an_encoder_hides_nothing_of_its_decoder(pair_of):
    """Decoder and encoder have the same number of tokens: the fault is where the encoder is padded."""
    assert pair_of(encoder_decoder, outputs="embed").run()
    assert not pair_of(faulty_encoder_decoder, outputs="embed").run()


def test_a_recurrent_network_is_exported_in_half_precision(pair_of):
    """ONNX Runtime's full optimization of it ends the process; this engine leaves it out, and so does the export."""
    assert pair_of(gated, dtype="float16", options={"level": "extended"}).run()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONNX Runtime's NCHWc pass is that of x86-64")
def test_an_engine_that_crashes_where_it_is_loaded_is_refused_in_words(pair_of):
    """ONNX Runtime 1.32; this process lives on."""
    refused = r"onnxruntime crashes while .* float16 graph at level 'all' .*options=\{'level': 'extended'\}"
    with pytest.raises(BuildError, match=refused):
        pair_of(gated, dtype="float16").run()
    assert pair_of(one_line, dtype="float16").run()
