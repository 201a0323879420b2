"""Quantized files: what the weights cost and what the kernels do are two numbers, and a fault of either is named."""

import foreign_files
import models
import numpy as np
import onnx
import pytest
import torch
from torch import nn

from ditto_core.align.file import OnnxFile
from ditto_core.align.making import align
from ditto_core.align.pieces import own_weights
from ditto_core.align.quantized import measure_costs, quantized
from ditto_core.align.repair import all_faults
from ditto_core.errors import UsageError
from ditto_core.graphs.files import read_model
from ditto_core.model.loading import load_model
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, ModelSource

LLAMA, BERT = ModelSource.of(models.llama), ModelSource.of(models.bert)
MLP = "model.layers.1.mlp"
SCALES, ZERO_POINTS = 2, 3
"""Inputs of MatMulNBits."""


@pytest.fixture(scope="module")
def llama():
    return load_model(LLAMA)


def in_4_bits(source, path, *, symmetric=True, accuracy=4):
    """Write a copy with its products in 4 bits, in blocks of 32; accuracy level 4 has activations in 8 bits."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    made = MatMulNBitsQuantizer(read_model(source), block_size=32, is_symmetric=symmetric, accuracy_level=accuracy)
    made.process()
    made.model.save_model_to_file(str(path))
    return path


def with_input(path, target, product, place, change):
    """Write a copy with one input of a product changed."""
    model = onnx.load(str(path))
    (node,) = [n for n in model.graph.node if n.output[0] == product]
    (tensor,) = [t for t in model.graph.initializer if t.name == node.input[place]]
    tensor.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(tensor)), tensor.name))
    onnx.save(model, str(target))
    return target


def beside(workspace, path, reference="weights"):
    pair = Pair(workspace, EngineSpec.of(LLAMA, engine=path), PairOptions(reference=reference))
    try:
        return pair.generate([5, 6, 7, 8, 9, 10, 11], max_new_tokens=3)
    finally:
        pair.close()


def test_weights_are_found_by_value_and_kernels_in_float32_do_nothing_wrong(llama, llama_file, tmp_path):
    path = in_4_bits(llama_file, tmp_path / "model.onnx", accuracy=0)
    whole = quantized(llama, OnnxFile(path))
    assert (whole.weights.total, whole.weights.missing, whole.weights.wrong) == (15, (), {})
    last = {cost.site: cost for cost in measure_costs(whole).sites}["model.layers.1"]
    assert last.quantization > 0.05
    assert last.kernels < 1e-4
    assert last.rounding == 0
    assert align(llama, OnnxFile(path)).ambiguous == {}


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_healthy_4_bit_file_agrees_with_its_own_weights_at_every_site(workspace, llama_file, tmp_path, symmetric):
    comparison = beside(workspace, in_4_bits(llama_file, tmp_path / "model.onnx", symmetric=symmetric))
    assert comparison
    last = [r for r in comparison.results if r.site == "model.layers.1"]
    assert {r.step for r in last} == {0, 1, 2}
    for result in last:  # the floor is the rounding of activations to 8 bits, which the kernels do as well
        assert 1e-3 < result.floor < 0.1
        assert 0.5 < result.metrics.rel_l2 / result.floor < 2


@pytest.mark.parametrize("reference", ["weights", "eager"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_that_are_off_by_a_tenth_fail_and_are_named(workspace, llama_file, tmp_path, symmetric, reference):
    healthy = in_4_bits(llama_file, tmp_path / "model.onnx", symmetric=symmetric)
    path = with_input(healthy, tmp_path / "bad.onnx", f"{MLP}.down_proj", SCALES, lambda x: x * np.float32(1.1))
    comparison = beside(workspace, path, reference)
    assert not comparison
    assert list(comparison.missing) == [f"{MLP}.down_proj"]
    assert "1.10 times it: wrong scales" in comparison.missing[f"{MLP}.down_proj"]


def test_zero_points_that_are_one_too_high_fail_and_are_named(workspace, llama_file, tmp_path):
    def higher(packed):
        return (np.minimum((packed >> 4) + 1, 15) << 4 | np.minimum((packed & 15) + 1, 15)).astype(np.uint8)

    healthy = in_4_bits(llama_file, tmp_path / "model.onnx", symmetric=False)
    path = with_input(healthy, tmp_path / "bad.onnx", f"{MLP}.up_proj", ZERO_POINTS, higher)
    comparison = beside(workspace, path)
    assert not comparison
    assert list(comparison.missing) == [f"{MLP}.up_proj"]
    assert "wrong zero points" in comparison.missing[f"{MLP}.up_proj"]


def test_a_wrong_operator_of_a_4_bit_file_is_named_as_in_a_file_of_floats(llama, llama_file, tmp_path):
    path = in_4_bits(llama_file, tmp_path / "model.onnx")
    assert all_faults(quantized(llama, OnnxFile(path)).study) == []
    model = onnx.load(str(path))
    (node,) = [n for n in model.graph.node if n.output[0] == f"{MLP}.gate_proj"]
    node.input[0] = "model.layers.0.post_attention_layernorm"
    onnx.save(model, str(tmp_path / "bad.onnx"))
    (first,) = all_faults(quantized(llama, OnnxFile(tmp_path / "bad.onnx")).study, 1)
    assert (first.fault.operator, first.fault.site) == ("MatMulNBits", f"{MLP}.gate_proj")
    assert first.fault.cause.startswith("wiring: input 0 is model.layers.0.post_attention_layernorm")


def test_the_weights_of_an_engine_that_has_none_of_its_own_are_refused(workspace, llama_file):
    with pytest.raises(UsageError, match=r"needs a quantized engine file, model.onnx is in float32"):
        beside(workspace, llama_file)
    pair = Pair(workspace, EngineSpec.of(LLAMA), PairOptions(reference="weights"))
    with pytest.raises(UsageError, match="needs a quantized engine file, not onnxruntime"):
        pair.generate([5, 6, 7], max_new_tokens=1)


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

    foreign_files.whole(bert_file, tmp_path / "source.onnx")
    quantize_dynamic(tmp_path / "source.onnx", tmp_path / "m.onnx", weight_type=QuantType.QUInt8, per_channel=True)
    file, model = OnnxFile(tmp_path / "m.onnx"), load_model(BERT)
    by_hand = dequantized_by_hand(onnx.load(str(tmp_path / "m.onnx")))
    whole = quantized(model, file)
    weights, own = whole.weights, whole.study.model.module
    assert (weights.missing, weights.wrong, file.quantization) == ((), {}, "int8")
    products = {piece.node: piece for piece in weights.pieces if piece.node in by_hand}
    assert len(products) == len(by_hand) >= 12  # six in each of the two layers
    for name, piece in products.items():
        weight = own.get_submodule(piece.module).weight.numpy()
        np.testing.assert_allclose(weight.T, by_hand[name], rtol=1e-5, atol=1e-6)
    costs = measure_costs(whole)
    last = {cost.site: cost for cost in costs.sites}["encoder.layer.1.output.LayerNorm"]
    assert 1e-3 < last.quantization < 0.1
    assert 1e-5 < last.kernels < last.quantization  # activations have 8 bits, too
    assert 0.5 < last.kernels / last.rounding < 2


def convolutions():
    """Two convolutions, one in groups, with what keeps an exporter from folding into them between."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 12, 3, groups=4, bias=False)]
    return nn.Sequential(*layers), {"input": torch.rand(2, 3, 11, 13)}


@pytest.mark.parametrize("form", ["dynamic", "dynamic by channel", "QDQ", "QOperator"])
def test_8_bit_weights_of_convolutions_are_found(workspace, tmp_path, form):
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )

    exported = workspace.export(EngineSpec.of(convolutions))
    foreign_files.whole(exported.onnx_path, tmp_path / "source.onnx")
    paths = tmp_path / "source.onnx", tmp_path / "m.onnx"
    if "dynamic" not in form:
        examples = iter([{"input": convolutions()[1]["input"].numpy()}])
        reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda self: next(examples, None)})()
        quantize_static(*paths, reader, quant_format=QuantFormat[form], weight_type=QuantType.QInt8)
    else:
        quantize_dynamic(
            *paths, weight_type=QuantType.QInt8, per_channel="channel" in form, op_types_to_quantize=["Conv"]
        )
    model = load_model(ModelSource.of(convolutions))
    own, weights = own_weights(model, OnnxFile(paths[1]))
    assert ({piece.module for piece in weights.pieces}, weights.missing, weights.total) == ({"0", "3"}, (), 2)
    for piece in weights.pieces:
        weight, found = (side.module.get_submodule(piece.module).weight.detach().numpy() for side in (model, own))
        step = np.abs(weight).max() / 127  # no rounding to 8 bits is further off than half a step
        assert 0 < np.abs(found - weight).max() <= 0.51 * step


class Tagger(nn.Module):
    """Looks ids [batch, length] up and takes the length first, as recurrent layers do."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 12)

    def forward(self, ids):
        return self.head(torch.relu(self.table(ids).transpose(0, 1)))


def tagger():
    torch.manual_seed(0)
    return Tagger(), {"ids": torch.arange(6).view(2, 3)}


def test_a_table_is_found_whose_rows_are_moved_before_they_are_dequantized(workspace, tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    foreign_files.whole(workspace.export(EngineSpec.of(tagger)).onnx_path, tmp_path / "source.onnx")
    quantize_dynamic(tmp_path / "source.onnx", tmp_path / "m.onnx")
    nodes = {node.output[0]: node for node in onnx.load(str(tmp_path / "m.onnx")).graph.node}
    assert {nodes[n.input[0]].op_type for n in nodes.values() if n.op_type == "DequantizeLinear"} == {"Transpose"}
    _, weights = own_weights(load_model(ModelSource.of(tagger)), OnnxFile(tmp_path / "m.onnx"))
    assert ({piece.module for piece in weights.pieces}, weights.missing) == ({"table", "head"}, ())


def normed():
    """Convolutions with norms and activations, added up, and a linear layer: what static quantization fuses."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.other = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
            self.first = nn.Conv2d(3, 16, 3, padding=1)
            self.second = nn.Conv2d(16, 16, 3, padding=1, bias=False)
            self.head = nn.Linear(16, 40)

        def forward(self, input):
            first = torch.relu(self.norm(self.first(input)))
            second = torch.relu(self.other(self.second(first)) + first)
            return self.head(second.mean((2, 3)))

    torch.manual_seed(0)
    net = Net().eval()
    for norm in (net.norm, net.other):
        norm.weight.data, norm.running_var = torch.rand(16) + 0.5, torch.rand(16) + 0.5
    return net, {"input": torch.randn(2, 3, 11, 13)}


def in_8_bits(workspace, folder, form):
    """Write the normed net with its norms folded and everything in 8 bits, calibrated on random inputs."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    exported = workspace.export(EngineSpec.of(normed))
    foreign_files.whole(exported.onnx_path, folder / "whole.onnx")
    foreign_files.optimized(folder / "whole.onnx", folder / "source.onnx", "BASIC")
    generator = np.random.default_rng(0)
    batches = iter([{"input": generator.normal(size=(4, 3, 11, 13)).astype(np.float32)} for _ in range(8)])
    reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda self: next(batches, None)})()
    options = {"quant_format": QuantFormat[form], "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(folder / "source.onnx", folder / "m.onnx", reader, **options)
    return folder / "m.onnx"


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_static_quantization_with_folded_norms_is_aligned_without_its_rounding(workspace, tmp_path, form):
    path = in_8_bits(workspace, tmp_path, form)
    model = onnx.load(str(path))
    for node in model.graph.node:
        node.name = ""  # as other exporters leave it
    onnx.save(model, str(path))
    kinds = {node.op_type for node in onnx.load(str(path)).graph.node}
    assert "BatchNormalization" not in kinds
    assert ("QLinearConv" in kinds) == (form == "QOperator")
    whole = quantized(load_model(ModelSource.of(normed)), OnnxFile(path))
    weights = whole.weights
    assert ({piece.module for piece in weights.pieces}, weights.missing) == ({"first", "second", "head"}, ())
    assert weights.wrong == {}
    assert whole.judged
    assert all_faults(whole.study) == []
    last = {cost.site: cost for cost in measure_costs(whole).sites}["head"]
    assert 1e-3 < last.kernels < 0.1
    assert 0.3 < last.kernels / last.rounding < 4


def test_a_wrong_weight_of_a_quantized_convolution_is_named(workspace, tmp_path):
    model = onnx.load(str(in_8_bits(workspace, tmp_path, "QOperator")))
    node = [node for node in model.graph.node if node.op_type == "QLinearConv"][1]
    (scale,) = [t for t in model.graph.initializer if t.name == node.input[4]]
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * np.float32(1.1), scale.name))
    onnx.save(model, str(tmp_path / "bad.onnx"))
    wrong = quantized(load_model(ModelSource.of(normed)), OnnxFile(tmp_path / "bad.onnx")).weights.wrong
    assert list(wrong) == ["second"]
    assert "1.10 times it: wrong scales" in wrong["second"]


def test_kernels_of_a_file_that_only_stores_8_bit_weights_do_nothing_wrong(llama_file, tmp_path):
    foreign_files.stored_in_8_bits(llama_file, tmp_path / "m.onnx")
    whole = quantized(load_model(LLAMA), OnnxFile(tmp_path / "m.onnx"))
    costs = measure_costs(whole)
    assert (whole.weights.missing, whole.weights.total) == ((), 15)  # seven in each of the two layers, and the head
    assert max(cost.kernels for cost in costs.sites) < 1e-5
    assert {cost.site: cost for cost in costs.sites}["model.layers.1"].quantization > 1e-3
