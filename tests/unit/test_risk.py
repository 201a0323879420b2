"""The false-alarm risk of a run, worked out by hand from what was measured on healthy engines."""

from dataclasses import replace

import pytest

from ditto_core.compare.risk import BEYOND, MEASURED, Risk, poisson_upper
from ditto_core.compare.table import table
from ditto_core.compare.tolerance import Tolerance
from tests.unit.hand_made import compared


@pytest.mark.parametrize(("count", "most"), [(0, 2.996), (1, 4.744), (2, 6.296), (10, 16.962)])
def test_the_upper_bound_of_a_rare_count_is_that_of_the_tables(count, most):
    """Half of the 95 % quantile of chi squared with 2 count + 2 degrees of freedom."""
    assert poisson_upper(count, 0.95) == pytest.approx(most, abs=1e-3)


def test_the_risk_grows_with_the_results_and_ends_at_1():
    assert Risk(100).expected == pytest.approx(100 * BEYOND / MEASURED)
    assert Risk(100).most == pytest.approx(100 * poisson_upper(BEYOND, 0.95) / MEASURED)
    assert Risk(10 * MEASURED).expected == Risk(10 * MEASURED).most == 1


def test_a_run_says_its_risk_and_counts_what_its_floor_judged():
    """Six sites at two steps; a user's rule takes one site out."""
    run = compared({})
    assert run.risk == Risk(12)
    assert table(run).splitlines()[-1].startswith(f"false-alarm risk: {Risk(12).expected:.2g} ")
    assert "12 results" in table(run).splitlines()[-1]
    assert run.to_json()["false_alarm_risk"] == Risk(12).expected
    assert run.judged(Tolerance.of({"lm_head": 0.1})).risk == Risk(10)


@pytest.mark.parametrize(("factor", "known"), [(3.9, False), (4, True), (8, True)])
def test_a_factor_below_the_measured_one_has_no_known_risk(factor, known):
    run = compared({}).judged(Tolerance(factor=factor))
    assert (run.risk is not None) is known
    assert ("false-alarm" in table(run)) is known


def test_what_could_not_be_judged_adds_no_risk():
    """At lm_head the floor is no tolerance, and the error beyond the table."""
    run = compared({(0, "lm_head"): 0.4, (1, "lm_head"): 0.4})
    results = [replace(r, floor=0.3) if r.site == "lm_head" else r for r in run.results]
    run = replace(run, results=tuple(results)).judged(Tolerance())
    assert len(run.inconclusive) == 2
    assert run.risk == Risk(10)
