"""Faults in the model's own code, between modules and behind the last one, are blamed at their line."""

import pytest

from ditto_core.pair.pair import Pair
from ditto_core.report.localization import localization_text
from ditto_core.spec import EngineSpec
from tests.module_models import between, detector, faulty_detector


@pytest.fixture
def localized(workspace):
    pairs = []

    def localize(source, outputs):
        pairs.append(Pair(workspace, EngineSpec.of(source, outputs=outputs)))
        return pairs[-1].run(localize=True)

    yield localize
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("outputs", ["**", "stem"])
def test_a_fault_behind_the_last_module_is_blamed_at_its_output_and_line(localized, outputs):
    run = localized(faulty_detector, outputs)
    assert [blamed.site for blamed in run.localization.blamed] == ["boxes"]
    first = run.localization.first
    assert "boxes.flip(-1)" in first.source
    assert first.local == pytest.approx(next(r.metrics.rel_l2 for r in run if r.site == "boxes"), rel=1e-3)


def test_healthy_outputs_behind_the_last_module_are_measured_and_not_blamed(localized):
    run = localized(detector, "**")
    assert {"boxes", "scores"} <= set(run.localization.by_site)
    assert not run.localization.blamed


def test_the_line_of_an_operator_between_two_modules_is_told(localized):
    found = localized(between, "**").localization
    assert [blamed.site for blamed in found.blamed] == ["second"]
    assert "hidden.roll(1, 0)" in localization_text(found)
    ports = localized(between, ("**", "**:**")).localization
    assert [blamed.site for blamed in ports.blamed] == ["second:in"]
    assert "hidden.roll(1, 0)" in ports.first.source
