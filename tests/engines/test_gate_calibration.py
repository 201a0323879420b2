"""Tolerances measured over a suite. The command is in test_gate_cli, several processes in test_gate_cluster."""

from dataclasses import replace

import pytest

from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.tolerance_files import load_tolerance, write_rules
from ditto_core.errors import UsageError
from ditto_core.gates import Sample, Suite
from ditto_core.gates.calibration import Calibration, calibrate_suite
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.gate_suites import tiny_gate, tiny_suite
from tests.models import llama

TAPS = ("model.layers.*.mlp", "lm_head")


@pytest.fixture(scope="module")
def suite():
    return tiny_suite(3, 0, 1)


def test_the_rules_are_twice_the_worst_error_of_all_samples(workspace, suite, tmp_path):
    work = Calibration.of(tiny_gate(suite), TAPS, workspace)
    assert write_rules(calibrate_suite(work, suite, workspace), tmp_path / "rules.toml") == 2
    bounds = {rule.selector: rule.bound for rule in load_tolerance(tmp_path / "rules.toml").rules}

    pair = Pair(workspace, EngineSpec.of(llama, outputs=TAPS), PairOptions("eager:float32"))
    runs = [pair.generate([list(s.text)], max_new_tokens=1) for s in suite.samples if s.text]
    runs += [pair.generate([list(s.prompt)], max_new_tokens=4) for s in suite.samples if s.prompt]
    for selector, end in (("model.layers.*.mlp", "mlp"), ("lm_head", "lm_head")):
        worst = max(r.metrics.rel_l2 for run in runs for r in run.results if r.site.endswith(end))
        assert bounds[selector] == pytest.approx(2 * max(worst, 2**-24), rel=1e-3)


def test_an_interrupted_calibration_goes_on_where_it_stopped(workspace, tmp_path):
    suite = tiny_suite(4, 0, 0)
    work, said = Calibration.of(tiny_gate(suite), TAPS, workspace), []

    def interrupted(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_suite(work, suite, workspace, on_sample=interrupted)
    other = Calibration.of(tiny_gate(suite), TAPS[:1], workspace)
    calibrate_suite(other, suite, replace(workspace, say=said.append))
    assert said == []  # other taps measure something else
    seen = []
    resumed = calibrate_suite(
        work, suite, replace(workspace, say=said.append), on_sample=lambda *count: seen.append(count)
    )
    assert said == ["calibration on tiny goes on: 2 of 4 samples are done"]
    assert seen == [(3, 4), (4, 4)]
    assert resumed == calibrate_suite(work, suite, workspace)


def test_a_reference_that_is_an_engine_is_part_of_what_a_calibration_is(workspace, suite):
    eager, engine = (
        Calibration.of(tiny_gate(suite, reference), TAPS[1:], workspace) for reference in ("eager", "onnxruntime")
    )
    assert eager.key(suite, workspace) != engine.key(suite, workspace)


def test_what_decides_whether_the_engine_is_healthy_is_part_of_what_a_calibration_is(workspace, suite):
    """A sample that looser rules let pass is judged again by stricter ones."""
    rules = (Tolerance.of({"logits": {"metric": "kl_max", "bound": bound}}) for bound in (9.0, 1e-9))
    loose, strict = (Calibration.of(tiny_gate(suite), TAPS[1:], workspace, rule) for rule in rules)
    assert loose.key(suite, workspace) != strict.key(suite, workspace)


def test_a_sample_that_does_not_fit_is_named(workspace):
    long = Suite("long", (Sample("long", text=(1,) * 600),))
    with pytest.raises(UsageError, match="sample 'long': step needs length 600"):
        calibrate_suite(Calibration.of(tiny_gate(long), TAPS, workspace), long, workspace)
