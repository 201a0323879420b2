"""Files of other tools aligned with their model by value: no name is read, and nothing is wrong that is not wrong."""

import json
import re
from dataclasses import replace

import foreign_files
import models
import numpy as np
import onnx
import pytest
import torch

from ditto_core.align.aligning import concluded, study
from ditto_core.align.alignment import Alignment
from ditto_core.align.eager import record
from ditto_core.align.fault import faults
from ditto_core.align.file import OnnxFile
from ditto_core.align.making import align
from ditto_core.align.probes import probes
from ditto_core.align.repair import all_faults
from ditto_core.align.store import Store
from ditto_core.compare.text import failure_message
from ditto_core.errors import UsageError
from ditto_core.graphs.files import read_model
from ditto_core.model.loading import load_model
from ditto_core.spec import EngineSpec, ModelSource

LLAMA, BERT = ModelSource.of(models.llama), ModelSource.of(models.bert)
MLP = "model.layers.1.mlp"


@pytest.fixture(scope="module")
def llama():
    return load_model(LLAMA)


def named(found):
    return {(fault.operator, fault.site) for fault in found}


def test_a_file_without_names_is_aligned_as_the_one_with_names(llama, llama_file, tmp_path):
    names = foreign_files.stripped(llama_file, tmp_path / "model.onnx")
    found = align(llama, OnnxFile(tmp_path / "model.onnx"))
    right = {site: names[site] for site in found.sites if site in names and ":" not in site}
    assert len(right) >= 20
    assert {site: found.sites[site].value for site in right} == right
    assert (found.off, found.absent, found.ambiguous) == ({}, {}, {})
    inputs = ("input_ids", "attention_mask", "position_ids")
    assert found.binding.roles == {names[name]: name for name in inputs}
    slots = {slot.input: slot.output for slot in found.binding.cache}
    assert slots[names["past_key_values.1.value"]] == names["present.1.value"]


def test_a_file_without_names_goes_through_prefill_and_decode(workspace, llama_file, tmp_path):
    from ditto_core.pair.pair import Pair

    foreign_files.stripped(llama_file, tmp_path / "model.onnx")
    pair = Pair(workspace, EngineSpec.of(LLAMA, engine=tmp_path / "model.onnx"))
    comparison = pair.generate([[5, 6, 7, 8, 9], [9, 8, 7]], max_new_tokens=4)
    pair.close()
    assert comparison
    assert {result.step for result in comparison.results} == {0, 1, 2, 3}
    assert "model.layers.1.self_attn.k_proj" in {result.site for result in comparison.results}


def test_an_output_that_a_file_lacks_is_named_and_one_of_another_shape_fails(workspace, bert_file, tmp_path):
    from ditto_core.pair.pair import Pair

    model = onnx.load(str(foreign_files.whole(bert_file, tmp_path / "whole.onnx")))
    model.graph.output.remove(next(output for output in model.graph.output if output.name == "pooler_output"))
    onnx.save(model, str(tmp_path / "model.onnx"))
    pair = Pair(workspace, EngineSpec.of(BERT, engine=tmp_path / "model.onnx", outputs="encoder"))
    found = pair.run()
    assert found
    assert "not compared: this engine has no output pooler_output" in found.notes
    differ = {"last_hidden_state": "shapes differ: actual [1], expected [2]"}
    lacking = {**differ, "encoder": "the engine did not deliver it at step 0"}
    assert pair._runner._settled(replace(found, missing=lacking)).missing == differ
    pair.close()


def test_columns_of_a_packed_projection_are_the_sites(llama, llama_file, tmp_path):
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    foreign_files.packed(llama_file, tmp_path / "model.onnx", names)
    model = onnx.load(str(tmp_path / "model.onnx"))
    split = next(n for n in model.graph.node if n.name == "packed_split")
    split.output[0] = "unused"  # the queries are now to be found in the packed value alone
    maker = next(n for n in model.graph.node if names[0] in n.input)
    slicing = onnx.helper.make_node("Slice", ["packed", "from", "to", "axis"], [names[0] + "_cut"], "cut")
    for name, number in (("from", 0), ("to", 64), ("axis", 2)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number]), name))
    maker.input[list(maker.input).index(names[0])] = names[0] + "_cut"
    model.graph.node.insert(list(model.graph.node).index(split) + 1, slicing)
    onnx.save(model, str(tmp_path / "model.onnx"))
    found = align(llama, OnnxFile(tmp_path / "model.onnx"))
    assert set(names) <= set(found.sites)
    assert not found.off


@pytest.mark.parametrize("level", ["EXTENDED", "ALL"])
def test_what_onnxruntime_optimizes_offline_is_right(level, bert_file, tmp_path):
    source = foreign_files.whole(bert_file, tmp_path / "source.onnx")
    foreign_files.optimized(source, tmp_path / "model.onnx", level)
    found = align(load_model(BERT), OnnxFile(tmp_path / "model.onnx"))
    assert set(found.finals) == {"last_hidden_state", "pooler_output"}
    assert (found.off, found.absent, found.ambiguous) == ({}, {}, {})


def test_fused_operators_are_asked_for_what_they_hide(bert_file, tmp_path):
    from onnxruntime.transformers.optimizer import optimize_model

    source = foreign_files.whole(bert_file, tmp_path / "source.onnx")
    fused = optimize_model(str(source), model_type="bert", num_heads=4, hidden_size=32, opt_level=0)
    fused.save_model_to_file(str(tmp_path / "model.onnx"))
    found = align(load_model(BERT), OnnxFile(tmp_path / "model.onnx"))
    assert "SkipLayerNormalization" in {node.op_type for node in fused.model.graph.node}
    assert found.sites["encoder.layer.0.attention.output.LayerNorm:in"].value.endswith("::sum")
    assert (found.off, found.absent) == ({}, {})


def test_a_bare_module_exported_without_a_cache(tmp_path):
    model = load_model(ModelSource.of(models.bert))
    ids = model.examples["input_ids"]
    torch.onnx.export(
        model.module,
        (ids, torch.ones_like(ids)),
        str(tmp_path / "model.onnx"),
        input_names=["tokens", "keep"],
        dynamic_shapes={"input_ids": {0: "rows", 1: "columns"}, "attention_mask": {0: "rows", 1: "columns"}},
        dynamo=True,
        verbose=False,
    )
    found = align(model, OnnxFile(tmp_path / "model.onnx"))
    assert found.binding.roles == {"tokens": "input_ids", "keep": "attention_mask"}
    assert (found.off, found.absent) == ({}, {})


def test_a_wrong_weight_is_named_at_its_operator(llama, llama_file, tmp_path):
    site = f"{MLP}.down_proj"
    node = foreign_files.with_weight(llama_file, tmp_path / "model.onnx", site, lambda w: w * np.float32(1.01))
    (first, *_) = faults(study(llama, OnnxFile(tmp_path / "model.onnx")).matching)
    assert (first.node, first.site) == (node.name, site)


def test_an_operator_whose_name_others_share_is_named_by_what_it_makes(llama, llama_file, tmp_path):
    site = f"{MLP}.down_proj"
    foreign_files.with_weight(llama_file, tmp_path / "m.onnx", site, lambda w: w * np.float32(1.01))
    model = onnx.load(str(tmp_path / "m.onnx"))
    for node in model.graph.node:
        node.name = node.op_type
    onnx.save(model, str(tmp_path / "m.onnx"))
    (first, *_) = faults(study(llama, OnnxFile(tmp_path / "m.onnx")).matching)
    assert (first.node, first.site) == (f"making {site}", site)


def test_two_faults_are_both_named_once_the_first_is_repaired(llama, llama_file, tmp_path):
    wrong = ("model.layers.0.self_attn.o_proj", f"{MLP}.down_proj")
    source = llama_file
    nodes = []
    for i, site in enumerate(wrong):
        target = tmp_path / f"{i}.onnx"
        nodes.append(foreign_files.with_weight(source, target, site, lambda w: w * np.float32(1.05)).name)
        source = target
    found = all_faults(study(llama, OnnxFile(source)))
    assert [repair.fault.node for repair in found] == nodes
    assert found[0].sites == (wrong[0],)
    assert found[0].healed > 10


def test_exchanged_weights_are_told_by_what_is_read(llama, llama_file, tmp_path):
    gate, up = f"{MLP}.gate_proj", f"{MLP}.up_proj"
    foreign_files.with_exchanged_weights(llama_file, tmp_path / "model.onnx", gate, up)
    seen = study(llama, OnnxFile(tmp_path / "model.onnx"))
    (first, *_) = faults(seen.matching)
    assert first.misplaced == (up,)
    assert gate in first.model_reads
    assert concluded(seen).finals["logits"].error > 1e-3


def test_a_comparison_names_the_first_wrong_operator(workspace, llama_file, tmp_path):
    from ditto_core.pair.pair import Pair

    site = f"{MLP}.down_proj"
    node = foreign_files.with_weight(llama_file, tmp_path / "model.onnx", site, lambda w: w * np.float32(1.01))
    pair = Pair(workspace, EngineSpec.of(LLAMA, engine=tmp_path / "model.onnx"))
    comparison = pair.generate([5, 6, 7, 8, 9], max_new_tokens=1)
    pair.close()
    assert comparison.failures[0].site == site
    assert re.search(f"first wrong operator .*{node.name}", failure_message(comparison))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral", "gpt2"])
def test_a_clean_file_of_every_family_has_no_fault(workspace, family):
    spec = EngineSpec.of(models.DECODERS[family])
    seen = study(load_model(spec.model), OnnxFile(workspace.export(spec).onnx_path))
    found = concluded(seen)
    assert faults(seen.matching) == []
    assert (found.off, found.absent, found.ambiguous) == ({}, {}, {})
    assert len(found.sites) > 30


def test_an_output_that_the_file_lacks_is_absent_and_no_fault(bert_file, tmp_path):
    whole = read_model(bert_file)  # onnx's own reader refuses weights that the cache links
    part = onnx.utils.Extractor(whole).extract_model(["input_ids", "attention_mask"], ["last_hidden_state"])
    onnx.save(part, str(tmp_path / "model.onnx"))
    seen = study(load_model(BERT), OnnxFile(tmp_path / "model.onnx"))
    found = concluded(seen)
    assert "pooler_output" in found.absent
    assert set(found.finals) == {"last_hidden_state"}
    assert found.off == {}
    assert all(not fault.outputs for fault in faults(seen.matching))


def test_a_map_is_written_and_read_again(llama, llama_file, tmp_path):
    found = align(llama, OnnxFile(llama_file))
    found.save(tmp_path / "names.json")
    assert Alignment.load(tmp_path / "names.json").to_json() == found.to_json()
    data = json.loads((tmp_path / "names.json").read_text())
    assert data["sites"]["model.layers.0.self_attn.q_proj"]["layout"] == "b t c -> b t c"


def test_a_map_is_reused_for_a_later_file_and_judges_it(workspace, llama, llama_file, tmp_path):
    from ditto_core.pair.pair import Pair

    align(llama, OnnxFile(llama_file)).save(tmp_path / "names.json")
    site = f"{MLP}.up_proj"
    foreign_files.with_weight(llama_file, tmp_path / "model.onnx", site, lambda w: w * np.float32(1.01))
    options = {"map": str(tmp_path / "names.json")}
    pair = Pair(workspace, EngineSpec.of(LLAMA, engine=tmp_path / "model.onnx", options=options))
    comparison = pair.generate([5, 6, 7, 8, 9], max_new_tokens=2)
    pair.close()
    assert not comparison
    assert comparison.failures[0].site == site


@pytest.mark.parametrize("name", ["absent.json", ".", "model.onnx"])
def test_a_map_that_is_none_is_one_line_before_anything_is_built(workspace, llama_file, tmp_path, name):
    foreign_files.stripped(llama_file, tmp_path / "model.onnx")
    spec = EngineSpec.of(LLAMA, engine=tmp_path / "model.onnx", options={"map": str(tmp_path / name)})
    with pytest.raises(UsageError, match="cannot be read"):
        workspace.build(spec)


def test_a_changed_file_is_another_engine(workspace, llama_file, tmp_path):
    path = tmp_path / "model.onnx"
    foreign_files.stripped(llama_file, path)
    spec = EngineSpec.of(LLAMA, engine=path, outputs=())
    first = workspace.build(spec).fingerprint
    model = onnx.load(str(path))
    model.doc_string = "another"
    onnx.save(model, str(path))
    assert workspace.build(spec).fingerprint != first


def test_an_input_that_fits_nothing_is_asked_for_by_name(llama, llama_file, tmp_path):
    model = read_model(llama_file)  # onnx refuses weights with several links, as the cache has them
    model.graph.input.append(onnx.helper.make_tensor_value_info("flags", onnx.TensorProto.INT64, [3, 4, 5]))
    onnx.save(model, str(tmp_path / "model.onnx"))
    with pytest.raises(UsageError, match="'flags'"):
        align(llama, OnnxFile(tmp_path / "model.onnx"))


def test_weights_that_are_missing_are_one_line(llama_file, tmp_path):
    (tmp_path / "model.onnx").write_bytes(llama_file.read_bytes())
    with pytest.raises(UsageError, match=r"model\.onnx\.data"):
        OnnxFile(tmp_path / "model.onnx")


def test_a_dtype_that_is_not_the_file_s_is_refused(workspace, llama_file):
    with pytest.raises(UsageError, match="dtype='float32'"):
        workspace.build(EngineSpec.of(LLAMA, engine=llama_file, dtype="float16"))


@pytest.mark.parametrize(
    ("name", "kind"), [("m.xml", "OpenVINO IR"), ("m.plan", "a TensorRT plan"), ("m.pte", "an ExecuTorch program")]
)
def test_an_engine_file_of_another_kind_is_one_line(tmp_path, name, kind):
    (tmp_path / name).write_text("<net/>")
    with pytest.raises(UsageError, match=f"engine file {name} is {kind}, expected an ONNX file"):
        OnnxFile(tmp_path / name)


@pytest.mark.parametrize("path", ["absent.onnx", "."])
def test_no_file_or_several_is_one_line(tmp_path, path):
    (tmp_path / "a.onnx").touch()
    (tmp_path / "b.onnx").touch()
    with pytest.raises(UsageError, match=r"does not exist|2 ONNX files"):
        OnnxFile(tmp_path / path)


def test_a_file_that_is_not_there_is_told_where_it_was_looked_for_and_what_is_near(tmp_path, monkeypatch):
    (tmp_path / "model.onnx").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"'model.onx' does not exist in {tmp_path}, .*; did you mean 'model.onnx'"):
        OnnxFile("model.onx")
    with pytest.raises(UsageError, match=r"none\.onnx' does not exist, expected an ONNX file"):
        OnnxFile(tmp_path / "no" / "none.onnx")


def test_only_lines_of_the_model_are_told():
    def lines(model):
        loaded = load_model(ModelSource.of(model))
        return {line for _, _, line, _ in record(loaded, probes(loaded)[0], Store()).results}

    assert lines(models.conv_net) == {""}  # torch's own containers and modules alone
    assert {line.partition(":")[0] for line in lines(models.tapped_net)} == {"", "models.py"}
