"""The replay that is recorded for causes, and the models that are built anew: what they hold, and how few they are."""

from dataclasses import replace

import pytest

from ditto_core.localize import EVERYTHING, conclude
from ditto_core.localize.recording import Recording
from ditto_core.localize.settings import rebuilt
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec
from tests.faults import weights
from tests.faults.runs import DOWN, PROMPT, pair_with
from tests.models import DECODERS


@pytest.fixture
def localizers(monkeypatch):
    """The localizers of the runs that a test makes."""
    seen = []

    def conclude_and_keep(localizer, *rest):
        seen.append(localizer)
        return conclude(localizer, *rest)

    monkeypatch.setattr("ditto_core.pair.localizing.conclude", conclude_and_keep)
    return seen


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_recorded_computation_of_every_site_has_the_local_error_that_was_measured(workspace, localizers, family):
    pair = Pair(workspace, EngineSpec.of(DECODERS[family], outputs=EVERYTHING))
    found = pair.generate([PROMPT, PROMPT[:3]], max_new_tokens=2, localize=True).localization
    pair.close()
    recording = Recording.of(localizers[0])
    for site, results in found.by_site.items():
        measured = [result.metrics.rel_l2 for result in results]
        assert [part.now for part in recording.every_slice(site)] == pytest.approx(measured, rel=1e-2, abs=1e-9), site


def test_a_recording_that_does_not_reproduce_the_model_explains_nothing(workspace, tmp_path, localizers):
    pair = pair_with(workspace, tmp_path, weights.inputs_rolled(DOWN))
    found = pair.generate(PROMPT, max_new_tokens=1, localize=True).localization
    recording = Recording.of(localizers[0])
    assert len(recording.slices(found.first.site)) == 1
    results = {
        key: replace(r, metrics=replace(r.metrics, rel_l2=1.1 * r.metrics.rel_l2))
        for key, r in recording.results.items()
    }
    assert replace(recording, results=results).slices(found.first.site) == []


def test_a_field_without_a_say_at_the_wrong_site_is_tried_with_one_value(workspace, tmp_path, localizers, monkeypatch):
    """A norm's epsilon, an activation and a rotary base do not reach the embedding."""
    tried = []

    def rebuilt_and_told(root, own, name, value):
        tried.append(name)
        return rebuilt(root, own, name, value)

    monkeypatch.setattr("ditto_core.localize.settings.rebuilt", rebuilt_and_told)
    pair = pair_with(workspace, tmp_path, weights.scaled("model.embed_tokens", 1.5))
    assert pair.generate(PROMPT, max_new_tokens=1, localize=True).localization.cause.kind == "weight scaled"
    assert {"hidden_act", "rms_norm_eps", "rope_parameters"} <= set(tried)
    assert [name for name in set(tried) if tried.count(name) > 1] == []


def test_a_recording_ends_behind_the_last_wanted_site(workspace, tmp_path, localizers):
    pair_with(workspace, tmp_path, weights.inputs_rolled(DOWN)).generate(PROMPT, max_new_tokens=1, localize=True)
    whole, part = (Recording.of(localizers[0], sites) for sites in ((), (DOWN, "model.embed_tokens")))
    (_, every), (_, some) = whole.steps[0], part.steps[0]
    assert list(some.sites) == list(every.sites)[: list(every.sites).index(DOWN) + 1]
    assert len(some.nodes) < len(every.nodes)
    assert [a.now for a in part.slices(DOWN)] == [b.now for b in whole.slices(DOWN)]
