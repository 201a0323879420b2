"""Faults in the model's own code, between modules and behind the last one, are blamed at their line."""

from dataclasses import replace

import numpy as np
import pytest

from ditto_core.compare.text import failure_message
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.report.localization import localization_text
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, weights
from tests.module_models import between, called_twice, detector, faulty_detector, faulty_linear, residual_net


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


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "the error is added at second:in, "), (601.0, "or before it: "), (None, "or before it: ")],
)
def test_a_failure_says_the_line_of_the_operator_between_two_modules(workspace, seconds, said):
    """Another engine shows the operator's own tensor, unless to build one takes longer than a failure may cost."""
    pair = Pair(workspace, EngineSpec.of(between, outputs="**"), PairOptions(localize_failed=600))
    facts = {name: value for name, value in pair.engine.facts.items() if name != "build_seconds"}
    known = {} if seconds is None else {"build_seconds": seconds}
    pair.sessions.built = replace(pair.engine, facts=facts | known)
    line = next(line for line in failure_message(pair.run()).splitlines() if said in line)
    pair.close()
    assert "hidden.roll(1, 0)" in line


def test_a_failure_in_a_module_builds_no_other_engine(workspace):
    pair = Pair(workspace, EngineSpec.of(faulty_linear, outputs="**"), PairOptions(localize_failed=600))
    pair.sessions.built = replace(pair.engine, facts=pair.engine.facts | {"build_seconds": 0.0})
    said = failure_message(pair.run())
    pair.close()
    assert "engine diverges at 1," in said
    assert "the error is added at" not in said
    assert "or before it" not in said


def test_a_tensor_that_is_computed_twice_is_no_other_tensor(workspace, tmp_path):
    faulty = FaultyWorkspace(workspace.cache, weights.quantized("inner", bits=4), tmp_path)
    found = Pair(faulty, EngineSpec.of(called_twice, outputs="**")).run(localize=True).localization
    assert {"inner", "inner@1"} <= {blamed.site for blamed in found.blamed}
    assert "other tensor" not in {cause.kind for cause in found.causes}


def test_a_batch_norm_without_its_mean_is_no_other_kind_of_norm(workspace, tmp_path):
    """It has no form that leaves the mean out, as LayerNorm has: the mean was not loaded."""

    def without_mean(edit):
        norm = edit.node("layer1.1.bn1")
        norm.input[3] = edit.constant(np.zeros_like(edit.array(norm.input[3])))

    pair = Pair(FaultyWorkspace(workspace.cache, without_mean, tmp_path), EngineSpec.of(residual_net, outputs="**"))
    found = pair.run(localize=True).localization
    pair.close()
    assert [blamed.site for blamed in found.blamed] == ["layer1.1.bn1"]
    assert (found.cause.kind, found.cause.site) == ("operation missing", "layer1.1.bn1")
