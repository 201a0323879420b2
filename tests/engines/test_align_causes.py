"""The cause of a wrong operator: the one change under which it gives, alone, what the right side has."""

import foreign_files
import models
import numpy as np
import onnx
import pytest
import torch
import typer
from torch import nn

from ditto_core.align.aligning import study
from ditto_core.align.feeds import random_feeds
from ditto_core.align.file import OnnxFile
from ditto_core.align.graphs import counterparts, of_files
from ditto_core.align.repair import all_faults, repaired
from ditto_core.cli.compare import command as compare_command
from ditto_core.errors import UsageError
from ditto_core.graphs.files import read_model
from ditto_core.model.loading import load_model
from ditto_core.spec import EngineSpec, ModelSource

LLAMA, BERT = ModelSource.of(models.llama), ModelSource.of(models.bert)
MLP = "model.layers.1.mlp"


@pytest.fixture(scope="module")
def llama_file(workspace):
    return workspace.export(EngineSpec.of(LLAMA)).onnx_path


@pytest.fixture(scope="module")
def bert_file(workspace):
    return workspace.export(EngineSpec.of(BERT)).onnx_path


@pytest.fixture(scope="module")
def tables():
    """The rotary embedding's cosines and sines [positions, half of a head]."""
    module = load_model(LLAMA).module.model.rotary_emb
    with torch.no_grad():
        found = module(torch.zeros(1), torch.arange(64)[None])
    return [table[0, :, : table.shape[-1] // 2].numpy() for table in found]


def first_fault(source, path):
    (first, *_) = all_faults(study(load_model(source), OnnxFile(path)), most=1)
    return first.fault


def test_a_wrong_weight_is_told_with_the_parameter_that_it_should_be(llama_file, tmp_path):
    foreign_files.with_weight(llama_file, tmp_path / "m.onnx", f"{MLP}.down_proj", lambda w: w * np.float32(1.01))
    cause = first_fault(LLAMA, tmp_path / "m.onnx").cause
    assert cause.startswith("weight:")
    assert "1.0e-02" in cause
    assert f"{MLP}.down_proj.weight" in cause


def test_the_weight_of_another_layer_is_recognized(llama_file, tmp_path):
    other = MLP.replace("1", "0")
    foreign_files.with_exchanged_weights(llama_file, tmp_path / "m.onnx", f"{MLP}.down_proj", f"{other}.down_proj")
    fault = first_fault(LLAMA, tmp_path / "m.onnx")
    assert fault.site == f"{other}.down_proj"
    assert f"is {MLP}.down_proj.weight" in fault.cause


def test_two_exchanged_products_are_named_both(llama_file, tmp_path):
    foreign_files.with_exchanged_weights(llama_file, tmp_path / "m.onnx", f"{MLP}.gate_proj", f"{MLP}.up_proj")
    fault = first_fault(LLAMA, tmp_path / "m.onnx")
    nodes = {o: n.name for n in onnx.load(str(tmp_path / "m.onnx")).graph.node for o in n.output}
    assert fault.cause.startswith("wiring:")
    assert {nodes[f"{MLP}.gate_proj"], nodes[f"{MLP}.up_proj"]} <= set(fault.involved)


def test_an_embedding_of_another_size_is_named_although_a_norm_hides_it(llama_file, tmp_path):
    model = read_model(llama_file)
    node = next(n for n in model.graph.node if n.op_type == "Gather" and n.input[1] == "input_ids")
    tensor = next(t for t in model.graph.initializer if t.name == node.input[0])
    array = onnx.numpy_helper.to_array(tensor) * np.float32(1.001)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert first_fault(LLAMA, tmp_path / "m.onnx").node == node.name


@pytest.mark.parametrize("changed", ["read", "written"])
def test_caches_of_two_layers_exchanged_show_in_the_second_step(llama_file, tmp_path, changed):
    kind = {"read": "past_key_values", "written": "present"}[changed]
    names = {f"{kind}.0.key": f"{kind}.1.key", f"{kind}.1.key": f"{kind}.0.key"}
    model = read_model(llama_file)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    onnx.save(model, str(tmp_path / "m.onnx"))
    fault = first_fault(LLAMA, tmp_path / "m.onnx")
    assert fault.operator == "cache"
    assert set(fault.involved) == {"past_key_values.0.key", "past_key_values.1.key"}
    assert "past_key_values.0.key is continued by present.1.key" in fault.cause


def test_clean_files_with_fused_attention_have_no_fault(llama_file, bert_file, tables, tmp_path):
    foreign_files.with_multi_head_attention(bert_file, tmp_path / "bert.onnx", 1)
    assert all_faults(study(load_model(BERT), OnnxFile(tmp_path / "bert.onnx"))) == []
    foreign_files.with_group_query_attention(llama_file, tmp_path / "llama.onnx", 1, tables)
    assert all_faults(study(load_model(LLAMA), OnnxFile(tmp_path / "llama.onnx"))) == []


@pytest.mark.parametrize(("attribute", "wrong", "kind"), [("scale", 0.5, "scale"), ("unidirectional", 1, "mask")])
def test_what_is_wrong_inside_of_multi_head_attention_is_told_apart(bert_file, tmp_path, attribute, wrong, kind):
    node = foreign_files.with_multi_head_attention(bert_file, tmp_path / "m.onnx", 1, **{attribute: wrong})
    fault = first_fault(BERT, tmp_path / "m.onnx")
    assert (fault.node, fault.cause.partition(":")[0]) == (node, kind)


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ({"scale": 0.4}, "scale"),
        ({"softcap": 3.0}, "softcap"),
        ({"local_window_size": 4}, "window"),
        ({"rotary_interleaved": 1}, "rotary"),
        ({"scale": 0.4, "softcap": 3.0}, "scale and softcap"),
    ],
)
def test_what_is_wrong_inside_of_grouped_attention_is_told_apart(llama_file, tables, tmp_path, attributes, kind):
    node = foreign_files.with_group_query_attention(llama_file, tmp_path / "m.onnx", 1, tables, **attributes)
    fault = first_fault(LLAMA, tmp_path / "m.onnx")
    assert (fault.node, fault.cause.partition(":")[0]) == (node, kind)


def test_tables_of_another_rotary_base_are_named(llama_file, tables, tmp_path):
    node = foreign_files.with_group_query_attention(llama_file, tmp_path / "m.onnx", 1, tables, lambda t: t * t)
    fault = first_fault(LLAMA, tmp_path / "m.onnx")
    assert (fault.node, fault.cause.partition(":")[0]) == (node, "rotary")


def test_queries_and_keys_exchanged_at_fused_attention_are_wiring(bert_file, tmp_path):
    node = foreign_files.with_multi_head_attention(bert_file, tmp_path / "clean.onnx", 1)
    model = onnx.load(str(tmp_path / "clean.onnx"))
    fused = next(n for n in model.graph.node if n.name == node)
    fused.input[0], fused.input[1] = fused.input[1], fused.input[0]
    onnx.save(model, str(tmp_path / "m.onnx"))
    fault = first_fault(BERT, tmp_path / "m.onnx")
    assert (fault.node, fault.cause.partition(":")[0]) == (node, "wiring")


def test_a_mask_that_is_ignored_shows_on_padded_probes(bert_file, tmp_path):
    node = foreign_files.with_multi_head_attention(bert_file, tmp_path / "clean.onnx", 1)
    model = onnx.load(str(tmp_path / "clean.onnx"))
    next(n for n in model.graph.node if n.name == node).input[5] = ""
    onnx.save(model, str(tmp_path / "m.onnx"))
    fault = first_fault(BERT, tmp_path / "m.onnx")
    assert (fault.node, fault.cause.partition(":")[0]) == (node, "mask")


def test_two_files_without_a_shared_name_are_paired_and_the_wrong_operator_named(llama_file, tmp_path):
    site = f"{MLP}.down_proj"
    node = foreign_files.with_weight(llama_file, tmp_path / "wrong.onnx", site, lambda w: w * np.float32(1.05))
    names = foreign_files.stripped(tmp_path / "wrong.onnx", tmp_path / "m.onnx")
    good = OnnxFile(llama_file)
    roles = {names[name]: name for name in ("input_ids", "attention_mask", "position_ids")}
    sides = of_files(OnnxFile(tmp_path / "m.onnx"), good, random_feeds(good), roles)
    (first,) = repaired(sides, 1)[0]
    assert names[node.output[0]] in first.fault.node
    pairs = counterparts(sides)
    for each in ("model.norm", site, f"{MLP}.gate_proj", "logits"):
        assert pairs[names[each]] == each


def test_compare_takes_two_files(llama_file, tmp_path, capsys):
    node = foreign_files.with_weight(
        llama_file, tmp_path / "wrong.onnx", f"{MLP}.down_proj", lambda w: w * np.float32(1.05)
    )
    with pytest.raises(typer.Exit) as ended:
        compare_command(tmp_path / "wrong.onnx", llama_file)
    assert (ended.value.exit_code, node.output[0] in capsys.readouterr().out) == (1, True)
    with pytest.raises(UsageError, match=r"wrong.onnx is an ONNX file .*ditto align"):
        compare_command(tmp_path / "wrong.onnx", tmp_path)


def dequantized_by_hand(model):
    """Return the integer weights of a file by the name of their product, by the formula (q - zero point) x scale."""
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "MatMulInteger":
            base = node.input[1].removesuffix("_quantized")
            zero, scale = arrays[f"{base}_zero_point"], arrays[f"{base}_scale"]
            found[node.name] = (arrays[node.input[1]].astype(np.float32) - zero) * scale
    return found


def test_8_bit_weights_are_found_and_what_they_cost_is_told_from_the_kernels(workspace, bert_file, tmp_path):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from ditto_core.align.quantized import measure_costs, weights_found

    foreign_files.whole(bert_file, tmp_path / "source.onnx")
    quantize_dynamic(tmp_path / "source.onnx", tmp_path / "m.onnx", weight_type=QuantType.QInt8, per_channel=True)
    file, model = OnnxFile(tmp_path / "m.onnx"), load_model(BERT)
    by_hand = dequantized_by_hand(onnx.load(str(tmp_path / "m.onnx")))
    pieces, missing, total = weights_found(model, file)
    assert (missing, file.quantization) == ([], "int8")
    products = {piece.node: piece for piece in pieces if piece.node in by_hand}
    assert len(products) == len(by_hand) >= 12  # six in each of the two layers
    for name, piece in products.items():
        np.testing.assert_allclose(piece.array.T, by_hand[name], rtol=1e-5, atol=1e-6)
    costs = measure_costs(study(model, file))
    assert (costs.found, costs.missing) == (total, ())
    last = {cost.site: cost for cost in costs.sites}["encoder.layer.1.output.LayerNorm"]
    assert 1e-3 < last.quantization < 0.1
    assert 1e-5 < last.kernels < last.quantization  # activations have 8 bits, too


def convolutions():
    """Two convolutions, one in groups, with what keeps an exporter from folding into them between."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 12, 3, groups=4, bias=False)]
    return nn.Sequential(*layers), {"input": torch.rand(2, 3, 11, 13)}


@pytest.mark.parametrize("form", ["dynamic", "dynamic by channel", "stored"])
def test_8_bit_weights_of_convolutions_are_found(workspace, tmp_path, form):
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )

    from ditto_core.align.quantized import weights_found

    exported = workspace.export(EngineSpec.of(convolutions))
    foreign_files.whole(exported.onnx_path, tmp_path / "source.onnx")
    paths = tmp_path / "source.onnx", tmp_path / "m.onnx"
    if form == "stored":
        examples = iter([{"input": convolutions()[1]["input"].numpy()}])
        reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda self: next(examples, None)})()
        quantize_static(*paths, reader, quant_format=QuantFormat.QDQ, weight_type=QuantType.QInt8)
    else:
        quantize_dynamic(
            *paths, weight_type=QuantType.QInt8, per_channel="channel" in form, op_types_to_quantize=["Conv"]
        )
    model = load_model(ModelSource.of(convolutions))
    pieces, missing, total = weights_found(model, OnnxFile(paths[1]))
    assert ({piece.module for piece in pieces}, missing, total) == ({"0", "3"}, [], 2)
    for piece in pieces:
        weight = model.module.get_submodule(piece.module).weight.numpy()
        step = np.abs(weight).max() / 127  # no rounding to 8 bits is further off than half a step
        assert 0 < np.abs(piece.array - weight).max() <= 0.51 * step


def test_kernels_of_a_file_that_only_stores_8_bit_weights_do_nothing_wrong(llama_file, tmp_path):
    from ditto_core.align.quantized import measure_costs

    foreign_files.stored_in_8_bits(llama_file, tmp_path / "m.onnx")
    costs = measure_costs(study(load_model(LLAMA), OnnxFile(tmp_path / "m.onnx")))
    assert (costs.found, costs.total) == (15, 15)  # seven in each of the two layers, and the head
    assert max(cost.kernels for cost in costs.sites) < 1e-5
    assert {cost.site: cost for cost in costs.sites}["model.layers.1"].quantization > 1e-3
