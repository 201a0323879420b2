"""Repros of a real engine: small, of the engine's own tensors, failing alike without the model and without ditto."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from ditto_core.errors import SelectorError, UsageError
from ditto_core.graphs.graph import Graph
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests import graph_faults
from tests.models import llama, tapped_net

PROMPTS = [[3, 40, 5, 61, 7], [9, 8, 7]]


@pytest.fixture
def faulty_pair(workspace, tmp_path):
    """Makes a pair whose engine has a fault in its graph."""
    pairs = []

    def make(edit, outputs=("**", "**:**"), **fields):
        spec = EngineSpec.of(llama, outputs=outputs, **fields)
        engine = graph_faults.faulty_engine(workspace.build(spec), tmp_path / "faulty", edit)
        pair = Pair(workspace, spec, PairOptions(observer=False), engine)
        pairs.append(pair)
        return pair

    yield make
    for pair in pairs:
        pair.close()


def run_test(folder):
    """Run the written test where ditto_core cannot be imported: an empty plugin list, isolated from this folder."""
    blocked = "import sys; sys.modules['ditto_core'] = sys.modules['torch'] = None; import pytest; "
    code = blocked + "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir=.', 'test_repro.py']))"
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_scaled_projection_is_one_operator_and_fails_by_the_same_number(faulty_pair, tmp_path):
    site = "model.layers.1.mlp.down_proj"
    pair = faulty_pair(graph_faults.scaled(site, 1.01))
    run = pair.generate(PROMPTS[0], max_new_tokens=3)
    assert run.first_bad.site == site
    repro = pair.save_repro(site, tmp_path / "repro")
    assert repro.nodes == ("MatMul", "Mul")
    assert repro.fails
    assert repro.rerun > repro.bound
    assert repro.rel_l2 == pytest.approx(0.01, rel=1e-3)
    assert repro.rerun == pytest.approx(0.01, rel=1e-3)
    assert repro.expected_from == "eager Linear in float64"
    assert pair.comparisons[-1].repros == {site: str(tmp_path / "repro")}
    assert repro.size < 200_000
    done = run_test(tmp_path / "repro")
    assert done.returncode == 1
    assert done.stdout.count("rel_l2 1.0e-02 > ") >= 2
    assert "2 failed" in done.stdout


def test_the_files_hold_what_numpy_computes_the_fault_from(faulty_pair, tmp_path):
    site = "model.layers.0.mlp.gate_proj"
    pair = faulty_pair(graph_faults.scaled(site, 1.5))
    pair.generate(PROMPTS[0], max_new_tokens=2)
    pair.save_repro(site, tmp_path / "repro", step=1)
    inputs = load_file(tmp_path / "repro" / "inputs.safetensors")
    output = load_file(tmp_path / "repro" / "output.safetensors")
    (given,) = inputs.values()
    assert given.shape == (1, 1, 64)
    weight = llama().get_submodule(site).weight.double().numpy()
    np.testing.assert_allclose(output["expected"], given.astype(np.float64) @ weight.T, rtol=1e-12)
    np.testing.assert_allclose(output["engine"], 1.5 * output["expected"], rtol=1e-5)


def test_a_healthy_site_passes_its_own_test_downstream_of_a_fault(faulty_pair, tmp_path):
    pair = faulty_pair(graph_faults.scaled("model.layers.0.mlp.down_proj", 1.1))
    run = pair.generate(PROMPTS[0], max_new_tokens=1)
    site = "model.layers.1.mlp.up_proj"
    assert not run.filter(site)
    repro = pair.save_repro(site, tmp_path / "repro")
    assert not repro.fails
    assert repro.rerun <= repro.bound
    assert run_test(tmp_path / "repro").returncode == 0


def test_attention_in_decode_is_cut_at_the_engines_own_cache_and_leaves_padding_out(faulty_pair, tmp_path):
    pair = faulty_pair(graph_faults.mask_anchored_top_left)
    run = pair.generate(PROMPTS, max_new_tokens=3)
    assert (run.first_bad.site, run.first_bad.step) == ("model.layers.0.self_attn:probs", 1)
    repro = pair.save_repro("model.layers.0.self_attn:probs", tmp_path / "repro")
    assert repro.step == 1
    assert "ONNX's reference implementation in float64" in repro.expected_from
    assert repro.fails
    assert repro.rerun > repro.bound
    assert "MatMul" in repro.nodes
    assert len(repro.nodes) < 40
    assert "valid" in load_file(tmp_path / "repro" / "output.safetensors")
    healthy = pair.save_repro("model.layers.0.self_attn:k_rope", tmp_path / "k", step=2)
    assert "past_key_values.0.key" in healthy.inputs
    assert not healthy.fails


def test_with_few_taps_the_cut_reaches_further_up(faulty_pair, tmp_path):
    pair = faulty_pair(graph_faults.scaled("model.layers.1.mlp.down_proj", 1.01), ("model.layers.1.mlp", "model.norm"))
    pair.generate(PROMPTS[0], max_new_tokens=1)
    repro = pair.save_repro("model.layers.1.mlp", tmp_path / "repro")
    assert repro.nodes.count("MatMul") > 3
    assert "input_ids" in repro.inputs
    assert repro.fails


def test_a_failing_final_output_that_is_no_tap_does_not_keep_a_site_from_its_repro(faulty_pair, tmp_path):
    pair = faulty_pair(graph_faults.scaled("logits", 1.05), ("model.layers.1.mlp",))
    run = pair.generate(PROMPTS[0], max_new_tokens=1)
    assert {r.site for r in run.failures} == {"logits"}
    assert not pair.save_repro("model.layers.1.mlp", tmp_path / "repro").fails


def test_a_repro_in_half_precision_is_bounded_by_half_precisions_floor(faulty_pair, tmp_path):
    pair = faulty_pair(graph_faults.scaled("model.layers.1.mlp.down_proj", 1.05, "float16"), dtype="float16")
    pair.generate(PROMPTS[0], max_new_tokens=1)
    repro = pair.save_repro("model.layers.1.mlp.down_proj", tmp_path / "repro")
    assert repro.expected_from == "eager Linear in float32"
    assert 4.8e-4 / 2 < repro.floor < 2e-3
    assert repro.fails
    assert "2 failed" in run_test(tmp_path / "repro").stdout


def test_a_model_that_is_no_decoder_has_repros_too(workspace, tmp_path):
    pair = Pair(workspace, EngineSpec.of(tapped_net, outputs=("**", "**:**")))
    pair.run()
    repro = pair.save_repro("mlp.down", tmp_path / "repro")
    assert repro.nodes == ("Gemm",)
    assert not repro.fails
    facts = json.loads((tmp_path / "repro" / "repro.json").read_text())
    assert facts["versions"]["onnxruntime"]
    assert facts["site"] == "mlp.down"
    pair.close()


def test_what_cannot_be_written_is_said(workspace, tmp_path):
    pair = Pair(workspace, EngineSpec.of(tapped_net, outputs=("**", "**:**")))
    with pytest.raises(UsageError, match="nothing has run yet"):
        pair.save_repro("mlp.down", tmp_path / "repro")
    pair.run()
    with pytest.raises(SelectorError, match=r"no tap .mlp\.dow.; did you mean .mlp\.down."):
        pair.save_repro("mlp.dow", tmp_path / "repro")
    with pytest.raises(UsageError, match="step 3 was asked for"):
        pair.save_repro("mlp.down", tmp_path / "repro", step=3)
    assert not (tmp_path / "repro").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        pair.save_repro("mlp.down", tmp_path / "full")
    pair.save_repro("mlp.down", tmp_path / "repro")
    pair.save_repro("mlp.up", tmp_path / "repro")
    pair.close()


def test_a_cut_holds_no_node_that_the_value_does_not_need():
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["a"]),
        onnx.helper.make_node("Neg", ["a"], ["b"]),
        onnx.helper.make_node("Exp", ["a"], ["unused"]),
        onnx.helper.make_node("Add", ["b", "w"], ["c"]),
    ]
    weight = onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "g", [], [], [weight])
    model = Graph(onnx.helper.make_model(graph))
    whole = model.upstream(["c"], ())
    assert [model.nodes[i].op_type for i in whole] == ["Relu", "Neg", "Add"]
    assert (model.boundary(whole)[0], [w.name for w in model.weights_of(whole)]) == (["x"], ["w"])
    last = model.upstream(["c"], ("b", "c"))
    assert [model.nodes[i].op_type for i in last] == ["Add"]
    assert model.boundary(last)[0] == ["b"]
    with pytest.raises(SelectorError, match="no node computes 'cc'"):
        model.upstream(["cc"], ())
