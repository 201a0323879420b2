"""A dump of another tool as the reference of a real engine: names, layouts, tokens, and a fault found through it.

TensorRT-LLM cannot be installed here: its folders are made by its documented layouts, from eager's tensors.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from ditto_core.backends.packing import new_tokens
from ditto_core.backends.trtllm.names import name_map
from ditto_core.compare.dumps import compare_dumps
from ditto_core.compare.tolerance import Tolerance
from ditto_core.dumps.namemap import NameMap
from ditto_core.errors import RunError, TraceError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from ditto_core.stepping.dumps import compare_offline
from ditto_core.trace import Trace
from tests.models import conv_net, llama
from tests.module_models import detector

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [4, 5, 6], [9, 8, 7, 6, 5]]
STEPS = 3
POLYGRAPHY = "import sys; from polygraphy.tools import main; sys.exit(main())"
SITES = ("model.layers.*", "model.layers.*.self_attn.?_proj", "model.norm", "lm_head")
SPEC = EngineSpec.of(llama, outputs=SITES)


@pytest.fixture(scope="module")
def eager(workspace, tmp_path_factory):
    """What the eager model computes, step by step."""
    folder = tmp_path_factory.mktemp("eager")
    pair = Pair(workspace, SPEC, PairOptions(observer=False, dump=folder))
    pair.generate(PROMPTS, max_new_tokens=STEPS).assert_close()
    pair.close()
    return Trace.open(folder / "reference")


def beside(workspace, reference, spec=SPEC, **options):
    """Run the engine beside a reference."""
    pair = Pair(workspace, spec, PairOptions(reference=str(reference), observer=False, **options))
    try:
        return pair.generate(PROMPTS, max_new_tokens=STEPS) if spec is SPEC else pair.run()
    finally:
        pair.close()


def taps_of(eager, step):
    data = eager.step(step)
    return {site: tensor.float() for site, tensor in data.taps.items()}


def steps_in_pt(eager, folder, change=lambda step, taps: taps):
    folder.mkdir()
    for step in range(eager.steps):
        torch.save(change(step, taps_of(eager, step)), folder / f"step{step}.pt")
    return folder


def tllm_debug(eager, folder, layout):
    """Write what the engine of TensorRT-LLM holds: joint q/k/v, its own names, the last token's logits only."""
    for step in range(eager.steps):
        inputs = eager.step(step).inputs
        real = new_tokens(inputs["attention_mask"], inputs["input_ids"].shape[1])
        taps = taps_of(eager, step)
        tensors = {"input_ids": inputs["input_ids"], "transformer.ln_f": taps["model.norm"]}
        for i in (0, 1):
            joint = [taps[f"model.layers.{i}.self_attn.{x}_proj"] for x in "qkv"]
            tensors[f"transformer.layers.{i}.attention.qkv"] = torch.cat(joint, -1)
            tensors[f"transformer.layers.{i}"] = taps[f"model.layers.{i}"]
        tensors = {name: layout(tensor, real) for name, tensor in tensors.items()}
        write(folder, step, {**tensors, "logits": taps["lm_head"][:, -1]})
    return folder


def write(folder, step, tensors):
    rank = folder / "tllm_debug" / "PP_0" / "TP_0"
    rank.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors.items():
        np.save(rank / f"{name}-step{step}.npy", tensor.numpy().astype(np.float32))


def packed(tensor, real):
    return tensor[real]


def padded_on_the_right(tensor, real):
    out = torch.zeros_like(tensor)
    for row, keep in enumerate(real):
        out[row, : int(keep.sum())] = tensor[row, keep]
    return out


@pytest.mark.parametrize("layout", [packed, padded_on_the_right])
def test_a_tllm_debug_folder_is_a_reference(eager, workspace, tmp_path, layout):
    folder = tllm_debug(eager, tmp_path, layout)
    names = name_map("llama", 4, 2, ["transformer.layers.0", "transformer.layers.0.attention.qkv", "transformer.ln_f"])
    run = beside(workspace, folder, name_map=NameMap.from_json(names))
    run.assert_close()
    run.assert_same_tokens()
    assert set(run.sites) >= {"model.layers.1.self_attn.v_proj", "model.layers.0", "model.norm", "lm_head"}
    assert run.reference.label == "trtllm dump"
    assert run.reference.facts["layout"] == "Python runtime"
    assert "one side has the last token's logits only: the others' are not compared" in run.notes


def test_the_name_map_beside_a_dump_is_found(eager, workspace, tmp_path):
    folder = tllm_debug(eager, tmp_path, packed)
    names = name_map("llama", 4, 2, ["transformer.layers.0", "transformer.layers.0.attention.qkv", "transformer.ln_f"])
    (folder / "names.json").write_text(json.dumps(names))
    assert "model.layers.1.self_attn.k_proj" in beside(workspace, folder).sites


def test_a_folder_of_pt_files_names_the_first_site_that_differs(eager, workspace, tmp_path):
    def scaled(step, taps):
        return {**taps, **{site: taps[site] * 1.01 for site in ("model.norm", "lm_head")}}

    run = beside(workspace, steps_in_pt(eager, tmp_path / "dump", scaled))
    assert not run
    assert run.first_bad.site == "model.norm"
    assert {r.site for r in run.failures} == {"model.norm", "lm_head"}
    run.assert_same_tokens()
    good = beside(workspace, steps_in_pt(eager, tmp_path / "good"))
    good.assert_close()
    assert set(good.sites) == {tap.site for tap in eager.taps}


def test_a_reference_in_half_precision_is_judged_by_its_own_rounding(eager, workspace, tmp_path):
    def half(step, taps):
        return {site: tensor.half() for site, tensor in taps.items()}

    run = beside(workspace, steps_in_pt(eager, tmp_path / "half", half))
    run.assert_close()
    norm = next(r for r in run.results if r.site == "model.norm")
    assert 1e-5 < norm.metrics.rel_l2 < norm.verdict.bound  # float16 rounds to 2^-11: more than float32's table allows
    assert norm.dtype == "float16"
    off = beside(
        workspace, steps_in_pt(eager, tmp_path / "off", lambda s, t: half(s, {k: v * 1.05 for k, v in t.items()}))
    )
    assert off.first_bad.site == off.results[0].site


def test_without_logits_both_sides_follow_the_engine_and_no_token_is_claimed_equal(eager, workspace, tmp_path):
    folder = steps_in_pt(eager, tmp_path / "dump", lambda step, taps: {k: v for k, v in taps.items() if k != "lm_head"})
    run = beside(workspace, folder)
    run.assert_close()
    assert run.tokens == ()
    with pytest.raises(AssertionError, match="no tokens were compared: the reference has no logits"):
        run.assert_same_tokens()
    assert "the reference's dump lacks 1 of 12 sites: lm_head" in run.notes
    assert run.steps == STEPS


def test_logits_of_the_first_step_alone_claim_no_later_token_equal(eager, workspace, tmp_path):
    def first(step, taps):
        return {name: tensor for name, tensor in taps.items() if name != "lm_head" or step == 0}

    run = beside(workspace, steps_in_pt(eager, tmp_path / "dump", first))
    assert len(run.logits) == 1
    with pytest.raises(AssertionError, match="no tokens were compared: the reference has no logits"):
        run.assert_same_tokens()


def test_polygraphys_outputs_are_a_reference(workspace, tmp_path):
    """Written by the real tool, from the exported model, on the example inputs."""
    pytest.importorskip("polygraphy", reason="Polygraphy writes the file")
    spec = EngineSpec.of(conv_net)
    from polygraphy.json import save_json

    examples = workspace.model(spec.model).examples
    save_json([{name: tensor.numpy() for name, tensor in examples.items()}], str(tmp_path / "in.json"))
    engine = next(workspace.build(spec).directory.glob("*.onnx"))
    command = [sys.executable, "-c", POLYGRAPHY, "run", str(engine), "--onnxrt"]
    files = ["--load-inputs", str(tmp_path / "in.json"), "--save-outputs", str(tmp_path / "out.json")]
    subprocess.run([*command, *files], check=True, capture_output=True)
    run = beside(workspace, tmp_path / "out.json", spec)
    run.assert_close()
    assert len(run.sites) >= 6
    assert run.reference.label == "polygraphy dump"


def test_other_tokens_fewer_steps_and_strange_names_are_one_clear_line(eager, workspace, tmp_path):
    shifted = tllm_debug(eager, tmp_path / "shifted", packed)
    ids = next(shifted.rglob("input_ids-step1.npy"))
    np.save(ids, np.load(ids) + 1)
    same = [["transformer.ln_f", "model.norm"]]
    with pytest.raises(RunError, match=r"was recorded on other inputs: step 1, input_ids\[0, 0\] is \d+, recorded was"):
        beside(workspace, shifted, name_map=same)
    short = steps_in_pt(eager, tmp_path / "short")
    (short / f"step{STEPS - 1}.pt").unlink()
    with pytest.raises(RunError, match=r"short ends after 2 steps, step 2 was asked for"):
        beside(workspace, short)
    strange = steps_in_pt(eager, tmp_path / "strange", lambda step, taps: {f"x.{k}": v for k, v in taps.items()})
    with pytest.raises(TraceError, match=r"none of the \d+ names of .*strange is among the \d+ taps .*give name_map="):
        beside(workspace, strange)
    with pytest.raises(UsageError, match=r"name map: 'no.such' matches none of \d+ names on .*strange"):
        beside(workspace, strange, name_map=[("no.such", "model.norm")])
    with pytest.raises(UsageError, match="name_map is given, but reference 'eager' is no path of a dump"):
        beside(workspace, "eager", name_map=same)


def test_a_rule_about_a_step_that_was_not_reached_is_noted_in_a_run_and_between_dumps(eager, workspace, tmp_path):
    folder = steps_in_pt(eager, tmp_path / "dump")
    rules = {"model.norm": [{"bound": 1.0, "step": 2}, {"bound": 1.0, "step": 3}]}
    said = "tolerance for 'model.norm' at step 3 decided nothing: the last step compared is 2"
    between = compare_offline(compare_dumps(folder, folder), tolerance=Tolerance.of(rules))
    for found in (beside(workspace, folder, tolerance=rules), between):
        assert found
        assert [note for note in found.notes if "decided nothing" in note] == [said]
    quiet = compare_offline(compare_dumps(folder, folder), tolerance=Tolerance.of(rules).optional())
    assert not [note for note in quiet.notes if "decided nothing" in note]


DETECTOR = EngineSpec.of(detector, outputs="stem")


def detected(path, **changes):
    """Write what the detector computes, but for ``changes``, with its tap and its input."""
    module, given = detector()
    with torch.no_grad():
        tensors = {**given, "stem": module.stem(given["x"]), **module(**given)}
    tensors = {name: changes.get(name, lambda tensor: tensor)(tensor) for name, tensor in tensors.items()}
    np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None})
    return path


@pytest.mark.parametrize("tapped", [True, False])
def test_every_output_that_a_dump_has_is_compared_though_no_module_produces_it(workspace, tmp_path, tapped):
    change = {} if tapped else {"stem": lambda tensor: None}
    good = beside(workspace, detected(tmp_path / "good.npz", **change), DETECTOR)
    assert good
    assert {"boxes", "scores"} <= set(good.sites)
    bad = beside(workspace, detected(tmp_path / "bad.npz", scores=lambda tensor: 2 * tensor, **change), DETECTOR)
    assert [r.site for r in bad.failures] == ["scores"]


def test_an_output_that_a_dump_lacks_is_noted(workspace, tmp_path):
    run = beside(workspace, detected(tmp_path / "part.npz", scores=lambda tensor: None), DETECTOR)
    assert run
    assert any("no output 'scores'" in note for note in run.notes)


def test_a_dump_of_other_inputs_is_refused_with_the_first_number_that_differs(workspace, tmp_path):
    def other(x):
        return x + (torch.arange(x.numel()).reshape(x.shape) == 9) * 0.25

    with pytest.raises(RunError, match=r"recorded on other inputs: step 0, x\[1, 1\] is"):
        beside(workspace, detected(tmp_path / "other.npz", x=other), DETECTOR)


def test_a_float16_engine_takes_a_dump_of_its_inputs_in_float32(workspace, tmp_path):
    spec = EngineSpec.of(detector, outputs="stem", dtype="float16")
    assert beside(workspace, detected(tmp_path / "wide.npz"), spec)
