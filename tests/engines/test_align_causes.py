"""The cause of a wrong operator: the one change under which it gives, alone, what the right side has."""

import foreign_files
import models
import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from ditto_core.align.aligning import study
from ditto_core.align.feeds import random_feeds
from ditto_core.align.file import OnnxFile
from ditto_core.align.graphs import counterparts, of_files
from ditto_core.align.repair import all_faults, repaired
from ditto_core.cli import application
from ditto_core.errors import UsageError
from ditto_core.graphs.files import read_model
from ditto_core.model.loading import load_model
from ditto_core.spec import ModelSource
from tests.engines.onnx_files import two_layers

LLAMA, BERT = ModelSource.of(models.llama), ModelSource.of(models.bert)
MLP = "model.layers.1.mlp"


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


def compared(*files):
    """What ``ditto compare`` of two files ends with: its exit code and what it says."""
    ended = CliRunner().invoke(application(), ["compare", *map(str, files)])
    if isinstance(ended.exception, UsageError):
        raise ended.exception
    return ended.exit_code, ended.output


def test_compare_takes_two_files(llama_file, tmp_path):
    node = foreign_files.with_weight(
        llama_file, tmp_path / "wrong.onnx", f"{MLP}.down_proj", lambda w: w * np.float32(1.05)
    )
    code, said = compared(tmp_path / "wrong.onnx", llama_file)
    assert (code, node.output[0] in said) == (1, True)
    with pytest.raises(UsageError, match=r"wrong.onnx is an ONNX file .*ditto align"):
        compared(tmp_path / "wrong.onnx", tmp_path)


def test_an_output_of_the_right_file_that_the_other_lacks_is_a_difference(tmp_path):
    right = two_layers(tmp_path / "right.onnx")
    model = onnx.load(str(right))
    del model.graph.node[-2:]
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("act", onnx.TensorProto.FLOAT, None))
    onnx.save(model, str(tmp_path / "short.onnx"))
    code, said = compared(tmp_path / "short.onnx", right)
    assert (code, "nothing in short.onnx is the output y of right.onnx" in said) == (1, True)
    assert compared(right, right)[0] == 0
