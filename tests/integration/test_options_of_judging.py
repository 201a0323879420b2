"""--ditto-calibrate and --ditto-localize on real tiny engines."""

from ditto_core.compare.tolerance_files import load_tolerance
from tests.integration.conftest import AGREES, DIVERGES


def test_calibrate_writes_rules_for_review(project):
    project.makepyfile(test_it=AGREES)
    result = project.runpytest_inprocess("--ditto-calibrate=rules.toml")
    result.assert_outcomes(passed=1)
    rules = load_tolerance(project.path / "rules.toml").rules
    assert rules
    assert all(0 < rule.bound < 1e-4 for rule in rules)
    result.stdout.fnmatch_lines(["*tolerance rules in *rules.toml: review and commit them"])


def test_calibrate_refuses_a_diverging_engine(project):
    project.makepyfile(test_it=DIVERGES)
    result = project.runpytest_inprocess("--ditto-calibrate=rules.toml")
    assert not (project.path / "rules.toml").exists()
    result.stdout.fnmatch_lines(["*not calibrated: *diverges*"])


def test_localize_measures_local_errors_in_the_same_run(project):
    body = "    assert run.localization is not None\n    assert run.localization.results\n"
    project.makepyfile(
        test_it="import pytest\nfrom tiny import tiny_llama\n\n\n"
        "@pytest.mark.ditto_engine(model=tiny_llama, outputs=['**', '**:**'])\n"
        "def test_local(ditto):\n    run = ditto.generate([3, 1, 4], max_new_tokens=2)\n" + body
    )
    project.runpytest_inprocess("--ditto-localize").assert_outcomes(passed=1)
