"""Localization of real engines: healthy ones, causes that show in whole runs, a second build, JSON, the command."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ditto_core.backends.onnxruntime import OnnxRuntimeBackend, OnnxRuntimeSession
from ditto_core.compare.blame import Localization
from ditto_core.compare.formats import round_bits
from ditto_core.errors import RunError
from ditto_core.localize import EVERYTHING, Localizer, conclude
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.operators import as_array
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.report.localization import localization_text
from ditto_core.session import KernelProperty
from ditto_core.spec import EngineSpec
from ditto_core.stepping.prompts import Sequencer
from tests.engines.gpu_stand_in import OnGpuStandIn
from tests.faults import FaultyWorkspace, cache, graph, rope, weights
from tests.faults.runs import DOWN, PROMPT, pair_with
from tests.models import DECODERS, bert, conv_net, llama

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.healthy import engines
from benchmarks.healthy import localize as localize_healthy


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


def test_an_operator_that_saturates_shows_on_a_structured_input_only(workspace, tmp_path):
    """The clip lies between what random pixels reach and what an edge in a real picture does."""
    pair = pair_with(workspace, tmp_path, graph.clipped("0", -2.5, 2.5), conv_net)
    random = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    edge = torch.cat([torch.full((2, 3, 16, 8), -4.0), torch.full((2, 3, 16, 8), 4.0)], -1)
    assert not pair.run({"input": random}, localize=True).localization
    found = pair.run({"input": edge}, localize=True).localization
    assert (found.first.site, found.cause.kind) == ("0", "saturation")


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


def test_localizing_never_has_two_engines_loaded(workspace, tmp_path, monkeypatch):
    """The engine of the test, the one that shows every site, and the one that shows the operators of one."""
    loaded, most = set(), []
    opened, closed = OnnxRuntimeBackend.open, OnnxRuntimeSession.close

    def note_open(self, *arguments):
        session = opened(self, *arguments)
        loaded.add(session)
        most.append(len(loaded))
        return session

    def note_close(self):
        loaded.discard(self)
        closed(self)

    monkeypatch.setattr(OnnxRuntimeBackend, "open", note_open)
    monkeypatch.setattr(OnnxRuntimeSession, "close", note_close)
    monkeypatch.setattr("ditto_core.pair.proving.SECONDS", 0)  # a large engine takes longer: it is not run once more
    fault = graph.constant_changed("model.layers.1.self_attn:probs", "Mul", lambda s: s * 2)
    spec = EngineSpec.of(llama, outputs=["model.layers.*"])
    pair = Pair(FaultyWorkspace(workspace.cache, fault, tmp_path), spec, PairOptions(observer=False))
    assert not pair.generate(PROMPT, max_new_tokens=1, localize=False)
    found = pair.localize(PROMPT, max_new_tokens=1, operators=True).localization
    assert found.first.operator.startswith("Mul ")
    pair.close()
    assert (len(most) >= 3, max(most), loaded) == (True, 1, set())


def test_a_step_starts_from_the_engines_own_cache(workspace, tmp_path):
    """All 12 tokens of a prefill are wrong, then one of 13: cached ones are what the engine itself wrote."""
    site = "model.layers.1.self_attn:v_states"
    pair = pair_with(workspace, tmp_path, cache.new_scaled(1, "value", 0.99))
    found = pair.generate(list(range(5, 17)), max_new_tokens=3, localize=True).localization
    prefill, first, second = (result.metrics.rel_l2 for result in found.by_site[site])
    assert prefill == pytest.approx(0.01, rel=1e-2)
    assert first < 0.5 * prefill
    assert second < 0.5 * prefill


def test_positions_that_count_padding_are_said_to_heal_under_rope(workspace, tmp_path):
    """Only differences of positions count, so the logits agree though cosine, sine, queries and keys do not."""
    pair = pair_with(workspace, tmp_path, rope.positions_from_zero())
    found = pair.generate([PROMPT, PROMPT[:3]], max_new_tokens=1, localize=True).localization
    assert [cause.kind for cause in found.causes] == ["padding positions", "hidden by this input"]
    assert found.causes[1].evidence[1] == "model.layers.1.self_attn:k_rope is the last site that shows it"


def test_a_fault_below_float16_rounding_shows_in_float32(workspace, tmp_path):
    pair = pair_with(workspace, tmp_path, weights.scaled(DOWN, 1.0005), dtype="float16")
    hidden = pair.localize(PROMPT, max_new_tokens=1).localization
    assert not hidden.blamed
    assert "fp32=True" in hidden.notes[-1]
    shown = pair.localize(PROMPT, max_new_tokens=1, fp32=True).localization
    assert (shown.dtype, shown.first.site, shown.cause.kind) == ("float32", DOWN, "weight scaled")


def test_a_localization_survives_json_and_reads_as_text(workspace, tmp_path):
    pair = pair_with(workspace, tmp_path, weights.not_a_number(DOWN))
    found = pair.generate(PROMPT, max_new_tokens=1, localize=True).localization
    again = Localization.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False)))
    assert again.to_json() == found.to_json()
    text = localization_text(again)
    assert text.startswith(f"blame {DOWN}: local error ")
    assert f"cause: weights not finite at {DOWN} (confidence 96%)" in text
    assert str(again.cause).startswith(f"weights not finite at {DOWN}: 1 of 64 output channels")


def tf32_as_a_probe_measures_it():
    """The property that TensorRT's backend reports, from a product of operands with 10 bits of mantissa."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).double() for shape in ((16, 1024), (1024, 256)))
    exact = x @ w
    errors = (round_bits(x, 10) @ round_bits(w, 10) - exact).norm(), 2 * (exact.float() - exact).norm()
    return KernelProperty("TF32", float(errors[0] / errors[1]), "a product of 16 rows is coarse")


def test_what_the_kernels_do_is_explained_and_the_faults_beside_it_are_blamed(workspace, tmp_path):
    norm_site = "model.layers.1.input_layernorm"

    def fault(edit):
        weights.scaled(DOWN, 1.02)(edit)
        weights.scaled(norm_site, 1.001)(edit)
        graph.products_rounded(10)(edit)

    pair = pair_with(workspace, tmp_path, fault)
    blind = pair.generate(PROMPT, max_new_tokens=3, localize=True).localization
    assert len(blind.blamed) > 10
    pair.sessions.engine.info = replace(pair.sessions.engine.info, kernels=(tf32_as_a_probe_measures_it(),))
    found = pair.generate(PROMPT, max_new_tokens=3, localize=True).localization
    assert [item.site for item in found.blamed] == [norm_site, DOWN]
    assert {cause.kind for cause in found.causes if cause.fault} == {"weight scaled"}
    explained = {result.site for result in found.results if result.explained}
    assert explained == {item.site for item in blind.blamed} - {norm_site, DOWN}
    assert found.notes[0].startswith(f"{len(explained)} sites are coarser than rounding by a measured property")
    assert "TF32: a product of 16 rows is coarse; 3 x" in found.notes[0]
    assert Localization.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_taps_on_a_gpu_are_measured_like_those_on_the_cpu(workspace, tmp_path):
    pair = pair_with(workspace, tmp_path, weights.scaled(DOWN, 1.01))
    model = workspace.model(pair.spec.model)
    inputs = Sequencer(pair.encode(PROMPT)).inputs()
    found = []
    for kind in (torch.Tensor, OnGpuStandIn):
        localizer = Localizer(model, pair.sessions.engine.taps, "float32")
        localizer.start()
        captured = {}
        pair.sessions.engine.start(1)
        pair.sessions.engine.step(inputs, lambda site, t, into=captured: into.__setitem__(site, t.clone()))
        localizer.take(0, inputs, {site: tensor.as_subclass(kind) for site, tensor in captured.items()})
        found.append(conclude(localizer))
    assert found[1].to_json() == found[0].to_json()
    assert (found[1].first.site, found[1].cause.kind) == (DOWN, "weight scaled")


def test_tensors_of_any_device_and_dtype_become_arrays():
    values = torch.tensor([1.0, -2.5, 3.0])
    assert as_array(values.as_subclass(OnGpuStandIn)).tolist() == [1.0, -2.5, 3.0]
    assert as_array(values.bfloat16()).tolist() == [1.0, -2.5, 3.0]
    assert as_array(values.bfloat16()).dtype == "float32"
    assert as_array(torch.tensor([2**40])).tolist() == [2**40]


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


def narrow_classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 5)), {"input": torch.randn(20, 16)}


def test_a_quantized_engine_that_fails_is_localized_without_a_crash(workspace):
    spec = EngineSpec.of(narrow_classifier, outputs="**", options={"quantize": "int8"})
    pair = Pair(workspace, spec, PairOptions(tolerance={"**": 1e-6}))
    run = pair.run(localize=True)
    pair.close()
    assert not run
    assert [item.site for item in run.localization.blamed] == ["0"]


@pytest.mark.parametrize("broken", ["take", "make", "conclude"])
def test_the_verdict_stands_when_the_localization_fails(workspace, tmp_path, monkeypatch, broken):
    def fail(*_, **__):
        raise KeyError("int8")

    pair = pair_with(workspace, tmp_path, weights.scaled(DOWN, 2.0))
    right = pair.generate(PROMPT, max_new_tokens=1)
    target = {
        "take": "ditto_core.localize.local.Localizer._take",
        "make": "ditto_core.pair.localizing.Localizer",
        "conclude": "ditto_core.pair.localizing.conclude",
    }
    monkeypatch.setattr(target[broken], fail)
    run = pair.generate(PROMPT, max_new_tokens=1, localize=True)
    assert {r.site: r.ok for r in run.results} == {r.site: r.ok for r in right.results}
    assert not run
    assert run.localization is None
    assert "KeyError: no key 'int8'" in run.notes[-1]
    with pytest.raises(RunError, match="not localized"):
        pair.localize(PROMPT, max_new_tokens=1)


def test_one_cause_is_listed_at_all_its_sites_though_two_are_searched(workspace, tmp_path):
    """Three weights are scaled alike, and a fourth by another factor."""
    sites = {f"model.layers.{i}.mlp.{name}_proj": 1.5 for i, name in ((0, "up"), (0, "down"), (1, "down"))}
    sites["model.layers.1.mlp.up_proj"] = 1.25

    def fault(edit):
        for site, factor in sites.items():
            weights.scaled(site, factor)(edit)

    found = pair_with(workspace, tmp_path, fault).generate(PROMPT, max_new_tokens=1, localize=True).localization
    assert [item.site for item in found.blamed] == [*list(sites)[:2], list(sites)[3], list(sites)[2]]
    assert found.cause.kind == "weight scaled"
    assert f"likewise at 2 more sites: {list(sites)[1]}, {list(sites)[2]}" in found.cause.evidence
