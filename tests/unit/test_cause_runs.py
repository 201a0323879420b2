"""Causes that a whole run shows, where no site is to blame."""

from dataclasses import replace

import pytest

from ditto_core.causes.runs import observer_effect
from ditto_core.compare.result import ObserverEffect
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
