"""Causes that a whole run shows, where no site is to blame."""

from dataclasses import replace

import pytest

from ditto_core.causes.runs import hidden_by_input, observer_effect
from ditto_core.compare.blame import Blame
from ditto_core.compare.result import ObserverEffect
from ditto_core.compare.verdict import INCONCLUSIVE
from tests.unit.hand_made import FLOOR, compared


@pytest.mark.parametrize(
    ("floor", "effect", "named"),
    [(FLOOR, 3.9e-3, False), (FLOOR, 4.1e-3, True), (None, 9e-3, False), (None, 1.1e-2, True)],
    ids=["within four floors", "beyond", "within the table", "beyond the table"],
)
def test_taps_disturb_an_engine_beyond_its_floor_or_the_table_where_none_was_measured(floor, effect, named):
    """Beside another engine or a dump there is no floor: float16's rounding is 1e-3, and taps undo fusions."""
    run = compared({})
    results = tuple(replace(result, floor=floor) for result in run.results)
    run = replace(run, results=results, observer=ObserverEffect(effect, 1, "logits"))
    assert (observer_effect(run, ()) is not None) is named


@pytest.mark.parametrize("judged", [True, False])
def test_a_fault_is_hidden_from_final_outputs_that_pass_not_from_those_that_could_not_be_judged(judged):
    """A reference that draws random numbers repeats itself nowhere, and nothing was hidden."""
    run = compared({})
    verdict = run.results[-1].verdict
    last = replace(run.results[-1], final=True, verdict=verdict if judged else replace(verdict, status=INCONCLUSIVE))
    run = replace(run, results=(*run.results[:-1], last))
    blamed = Blame("lm_head", "lm_head", "", "", 0, (0,), 1.0, 1e-3, 4e-3, None)
    assert (hidden_by_input(run, (blamed,)) is not None) is judged
