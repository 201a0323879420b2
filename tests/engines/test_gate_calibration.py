"""Tolerances measured over a suite. The command is in test_gate_cli, several processes in test_gate_cluster."""

import pytest

from ditto_core.compare.rules import load_tolerance, write_rules
from ditto_core.errors import UsageError
from ditto_core.gates import Sample, Suite
from ditto_core.gates.calibration import Calibration, calibrate_suite
from ditto_core.options import PairOptions
from ditto_core.pair import Pair
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


def test_a_sample_that_does_not_fit_is_named(workspace):
    long = Suite("long", (Sample("long", text=(1,) * 600),))
    with pytest.raises(UsageError, match="sample 'long': step needs length 600"):
        calibrate_suite(Calibration.of(tiny_gate(long), TAPS, workspace), long, workspace)
