"""The model's tensor in the engine's place: a fault heals at its site and not upstream, and what remains is another."""

from dataclasses import replace

import pytest
import torch

from ditto_core.engines.cutting import cut
from ditto_core.errors import RunError, SelectorError, UsageError
from ditto_core.localize import EVERYTHING
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.pair.replacing import narrowed
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, graph
from tests.faults.case import ALONE, PROBS, TABLE
from tests.faults.cases import CASES, INNER
from tests.faults.runs import PROMPT, pair_with
from tests.models import DECODERS, MORE, conv_net, llama

BY_NAME = {case.name: case for case in CASES}
HEALED = (
    "rope factor", "rope base", "no rope", "rope backwards", "half a rotation", "pairs", "query heads", "key heads",
    "value heads", "attention scale", "softcap", "probabilities", "past scale", "past lost", "new scale", "residual",
    "gate ignored", "clip", "cast", "positions", "negated", "factor", "other gelu", "inputs permuted", "inputs lost",
)  # fmt: skip


def faulty(workspace, directory, case):
    spec = EngineSpec.of({**DECODERS, **MORE}[case.model], dtype=case.dtype, outputs=EVERYTHING)
    pair = Pair(FaultyWorkspace(workspace.cache, case.fault, directory), spec, PairOptions(observer=False))
    pair.found = pair.generate(case.prompts or ALONE, max_new_tokens=2, localize=True).localization
    return pair


@pytest.mark.parametrize("name", HEALED)
def test_a_fault_heals_at_the_blamed_site_and_not_at_its_neighbours_upstream(workspace, tmp_path, name):
    case = BY_NAME[name]
    pair = faulty(workspace, tmp_path, case)
    here = pair.replace(case.site, *case.also)
    assert here.healed >= 0.99
    assert here.remaining == ()
    assert here
    known = pair.sessions.export.provenance
    upstream = [site for site in pair.found.first.inputs if known.find(site)]
    assert upstream or case.site == TABLE
    for site in upstream[-1:]:
        there = pair.replace(site)
        assert abs(there.healed) < 0.01
        assert not there
    pair.close()


@pytest.mark.parametrize("name", ["poison", "cosine poison"])
def test_what_is_not_finite_heals_too(workspace, tmp_path, name):
    found = faulty(workspace, tmp_path, BY_NAME[name]).replace(BY_NAME[name].site)
    assert (found.healed, found.remaining) == (1.0, ())


def test_a_number_beyond_the_engines_dtype_is_not_put_in(workspace, tmp_path):
    """Clamped it would be another fault: the error grew from 2.0e-3 to 7.2e-1."""
    pair = faulty(workspace, tmp_path, BY_NAME["beyond float16"])
    with pytest.raises(RunError, match=r"down_proj:in cannot be replaced: .* holds 1.3e\+06, beyond float16"):
        pair.replace(INNER)


def test_what_a_mask_hides_is_the_engines_lowest_number():
    hidden = torch.finfo(torch.float64).min
    mask = torch.tensor([0.0, hidden, -torch.inf], dtype=torch.float64)
    lowest = torch.finfo(torch.float16).min
    assert narrowed(mask, "float16", "mask").tolist() == [0.0, lowest, -torch.inf]


def test_a_replaced_mask_masks(workspace, tmp_path):
    case = BY_NAME["padding seen"]
    assert faulty(workspace, tmp_path, case).replace(case.site)


def test_a_healthy_site_can_be_replaced_in_every_decoder(workspace):
    for model in DECODERS.values():
        pair = Pair(workspace, EngineSpec.of(model, outputs="**"), PairOptions(observer=False))
        pair.generate(PROMPT, max_new_tokens=2)
        taps = pair.engine.taps
        found = pair.replace(taps[len(taps) // 2].site)
        assert found.comparison, found
        pair.close()


def test_a_site_that_is_not_tapped_can_be_replaced(workspace, tmp_path):
    spec = EngineSpec.of(llama, outputs="model.layers.*")
    pair = Pair(
        FaultyWorkspace(workspace.cache, graph.scaled(INNER, 1.01), tmp_path), spec, PairOptions(observer=False)
    )
    assert not pair.generate(PROMPT, max_new_tokens=2)
    assert pair.replace(INNER)


def test_a_model_that_is_not_a_decoder_heals_too(workspace, tmp_path):
    pair = pair_with(workspace, tmp_path, graph.scaled("0", 1.5), conv_net)
    assert not pair.run()
    assert pair.replace("0")


def test_an_openvino_engine_heals_too(workspace, tmp_path):
    pytest.importorskip("openvino")
    pair = pair_with(workspace, tmp_path, graph.scaled(INNER, 1.01), backend="openvino")
    assert not pair.generate(PROMPT, max_new_tokens=2)
    assert pair.replace(INNER)
    assert abs(pair.replace(PROBS).healed) < 0.01


def test_what_cannot_be_replaced_is_said(workspace):
    pair = Pair(workspace, EngineSpec.of(llama), PairOptions(observer=False))
    with pytest.raises(UsageError, match="nothing has run yet"):
        pair.replace(PROBS)
    pair.generate(PROMPT, max_new_tokens=1)
    with pytest.raises(UsageError, match="no site is given"):
        pair.replace()
    with pytest.raises(SelectorError, match=r"no site 'model.layers.1.mpl'; did you mean 'model.layers.1.mlp'"):
        pair.replace("model.layers.1.mpl")
    lowered = replace(pair.engine, spec=replace(pair.engine.spec, backend="executorch"))
    with pytest.raises(UsageError, match="not into one of executorch"):
        cut(workspace.cache, lowered, ["model.layers.1.mlp"])


def two_faults(first, second):
    def both(edit):
        BY_NAME[first].fault(edit)
        BY_NAME[second].fault(edit)

    return both


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("attention scale", "clip"),
        ("residual poison", "factor"),
        ("rope factor", "poison"),
        ("past scale", "other gelu"),
        ("cosine poison", "factor"),
        ("cosine poison", "attention scale"),
    ],
)
def test_of_two_faults_both_are_blamed_and_named(workspace, tmp_path, first, second):
    """Behind cosines that are all NaN no other fault shows, until they are replaced."""
    pair = pair_with(workspace, tmp_path, two_faults(first, second))
    found = pair.localize(ALONE, max_new_tokens=3).localization
    cases = [BY_NAME[first], BY_NAME[second]]
    assert {case.site for case in cases} <= {item.site for item in found.blamed}
    assert {(case.kind, case.site) for case in cases} == {(cause.kind, cause.site) for cause in found.causes}
    assert found.notes[1].endswith("no site differs any more")


def test_a_localization_is_proved(workspace, tmp_path):
    found = pair_with(workspace, tmp_path, graph.scaled(INNER, 1.01)).localize(PROMPT, max_new_tokens=2).localization
    assert found.notes[0].startswith(f"proof: the model's tensor at {INNER} heals 99.9")


def test_a_healthy_localization_needs_no_proof(workspace):
    pair = Pair(workspace, EngineSpec.of(llama, outputs=EVERYTHING), PairOptions(observer=False))
    assert not [note for note in pair.localize(PROMPT, max_new_tokens=1).localization.notes if "proof" in note]
