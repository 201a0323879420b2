"""Localization of real engines: healthy ones, causes that show in whole runs, a second build, JSON, the command."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ditto_core.causes.runs import batch_rounding, build_spread
from ditto_core.localize import EVERYTHING, Localization
from ditto_core.localize.text import cause_line, localization_text
from ditto_core.models import tiny_decoder
from ditto_core.options import PairOptions
from ditto_core.pair import Pair
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, graph, weights
from tests.models import DECODERS, TIED, bert, conv_net, gemma3, llama, nearly_tied
from tests.models import TIED_PROMPT as PROMPT

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.healthy import engines
from benchmarks.healthy import localize as localize_healthy

DOWN = "model.layers.1.mlp.down_proj"


def pair_with(workspace, directory, fault, model=llama, **fields):
    observer = fields.pop("observer", False)
    faulty = FaultyWorkspace(workspace.cache, fault, directory)
    return Pair(faulty, EngineSpec.of(model, outputs=EVERYTHING, **fields), PairOptions(observer=observer))


@pytest.mark.parametrize("engine", list(engines(4, seed=7)), ids=str)
def test_a_healthy_engine_has_no_site_to_blame_and_no_fault(workspace, engine):
    found = localize_healthy(workspace, engine)
    assert not found.blamed
    assert not [cause for cause in found.causes if cause.fault]
    assert len(found.by_site) > 15


@pytest.mark.parametrize("family", DECODERS)
def test_every_tap_of_every_family_has_a_local_error(workspace, family):
    pair = Pair(workspace, EngineSpec.of(DECODERS[family], outputs=EVERYTHING))
    comparison = pair.generate([PROMPT, PROMPT[:3]], max_new_tokens=2, localize=True)
    found = comparison.localization
    assert set(found.by_site) == {tap.site for tap in comparison.taps}
    assert not found


@pytest.mark.parametrize(
    ("model", "site", "value"),
    [(bert, "encoder.layer.1.output.dense", "encoder.layer.1.output.dense"), (conv_net, "5", "output")],
)
def test_a_model_without_a_cache_is_localized_too(workspace, tmp_path, model, site, value):
    healthy = Pair(workspace, EngineSpec.of(model, outputs=EVERYTHING)).run(localize=True).localization
    assert not healthy
    found = pair_with(workspace, tmp_path, weights.scaled(value, 1.01), model).run(localize=True).localization
    assert found.first.site.split(":")[0] == site
    assert found.cause.kind == "weight scaled"


def test_only_the_needed_build_is_made_when_the_engine_shows_too_little(workspace, tmp_path):
    faulty = FaultyWorkspace(workspace.cache, weights.scaled(DOWN, 1.01), tmp_path)
    pair = Pair(faulty, EngineSpec.of(llama, outputs=["model.layers.*"]), PairOptions(observer=False))
    coarse = pair.generate(PROMPT, max_new_tokens=1, localize=True).localization
    assert [item.site for item in coarse.blamed] == ["model.layers.1"]
    assert faulty.builds == 1
    fine = pair.localize(PROMPT, max_new_tokens=1).localization
    assert [item.site for item in fine.blamed] == [DOWN]
    assert faulty.builds == 2


def test_the_operator_inside_the_blamed_site_is_named_after_one_more_build(workspace, tmp_path):
    fault = graph.constant_changed("model.layers.1.self_attn:probs", "Mul", lambda s: s * 2)
    pair = pair_with(workspace, tmp_path, fault)
    found = pair.localize(PROMPT, max_new_tokens=1, operators=True).localization
    assert found.first.operator.startswith("Mul ")
    assert found.first.operator.endswith(": 1.0e+00")
    assert pair.workspace.builds == 2
    assert set(found.first.inputs) == {
        "model.layers.1.self_attn:q_rope",
        "model.layers.1.self_attn:k_rope",
        "model.layers.0:in.attention_mask",
    }


def test_a_fault_below_float16_rounding_shows_in_float32(workspace, tmp_path):
    pair = pair_with(workspace, tmp_path, weights.scaled(DOWN, 1.0005), dtype="float16")
    hidden = pair.localize(PROMPT, max_new_tokens=1).localization
    assert not hidden.blamed
    assert "fp32=True" in hidden.notes[-1]
    shown = pair.localize(PROMPT, max_new_tokens=1, fp32=True).localization
    assert (shown.dtype, shown.first.site, shown.cause.kind) == ("float32", DOWN, "weight scaled")


def test_a_fault_that_the_next_norm_hides_is_said_to_be_hidden(workspace, tmp_path):
    comparison = pair_with(workspace, tmp_path, weights.scaled(DOWN, 1.01), gemma3).generate(
        PROMPT, max_new_tokens=1, localize=True
    )
    assert [item.site for item in comparison.localization.blamed] == [DOWN]
    assert [cause.kind for cause in comparison.localization.causes] == ["weight scaled", "hidden by this input"]


def test_a_near_tie_is_named_as_no_fault(workspace):
    pair = Pair(workspace, EngineSpec.of(nearly_tied, outputs=EVERYTHING, dtype="float16"))
    comparison = pair.generate(PROMPT, max_new_tokens=1, localize=True)
    assert comparison.tokens[0].engine == (TIED,)
    assert comparison.tokens[0].differences == (0,)
    assert [(cause.kind, cause.fault) for cause in comparison.localization.causes] == [("near tie", False)]


def test_outputs_that_change_by_tapping_are_an_observer_effect(workspace, tmp_path):
    fault = graph.only_plain(weights.scaled(DOWN, 1.5))
    comparison = pair_with(workspace, tmp_path, fault, observer=True).generate(PROMPT, max_new_tokens=1, localize=True)
    assert not comparison.localization.blamed
    assert [cause.kind for cause in comparison.localization.causes] == ["observer effect"]


def test_two_healthy_builds_that_differ_are_build_spread(workspace):
    def run(level):
        pair = Pair(workspace, EngineSpec.of(llama, outputs="**", dtype="float16", options={"level": level}))
        return pair.generate(PROMPT, max_new_tokens=2)

    optimized, plain = run("all"), run("disable")
    assert build_spread(optimized, optimized) is None
    assert build_spread(optimized, plain).kind == "build-to-build spread"


def test_batch_rounding_needs_two_healthy_runs_whose_tokens_part(workspace):
    pair = Pair(workspace, EngineSpec.of(llama, outputs="**"))
    alone = pair.generate(PROMPT, max_new_tokens=2)
    batched = pair.generate([PROMPT, PROMPT[:3]], max_new_tokens=2)
    assert batch_rounding(alone, batched) is None
    first, *rest = batched.tokens
    stand_in = replace(batched, tokens=(replace(first, engine=(first.engine[0], first.engine[1] ^ 1)), *rest))
    assert "step 1" in batch_rounding(alone, stand_in).evidence[0]


def test_a_localization_survives_json_and_reads_as_text(workspace, tmp_path):
    pair = pair_with(workspace, tmp_path, weights.not_a_number(DOWN))
    found = pair.generate(PROMPT, max_new_tokens=1, localize=True).localization
    again = Localization.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False)))
    assert again.to_json() == found.to_json()
    text = localization_text(again)
    assert text.startswith(f"blame {DOWN}: local error ")
    assert f"cause: weights not finite at {DOWN} (confidence 97%)" in text
    assert cause_line(again.cause).startswith(f"cause: weights not finite at {DOWN}: 1 of 64 output channels")


def test_the_command_blames_the_engine_in_a_directory(workspace, tmp_path, capsys):
    from ditto_core.cli import application

    model_dir = tmp_path / "model"
    tiny_decoder("llama").save_pretrained(model_dir)
    spec = EngineSpec.of(str(model_dir), outputs=EVERYTHING)
    faulty = FaultyWorkspace(workspace.cache, weights.scaled(DOWN, 1.01), tmp_path)
    engine = faulty.build(spec)
    arguments = ["--input-ids", "5,6,7,8", "--max-output-len", "1", "--cache-dir", str(workspace.cache.root)]

    def ditto(source, *more):
        with pytest.raises(SystemExit) as ended:
            application()(["localize", str(source), *arguments, *more])
        return ended.value.code, capsys.readouterr().out

    code, out = ditto(engine.directory, "--json", str(tmp_path / "found.json"))
    assert code == 1
    assert f"cause: weight scaled at {DOWN}" in out
    assert Localization.from_json(json.loads((tmp_path / "found.json").read_text())).first.site == DOWN
    code, out = ditto(model_dir)
    assert (code, out.split(" of ")[0]) == (0, "no site")
