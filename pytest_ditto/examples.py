"""``@given`` with the ditto fixtures: one engine for all examples, no complaint about it, one comparison kept.

Hypothesis warns of fixtures that are made once a test and not once an example. Ours are meant to be: every run begins
with an empty cache. It also limits an example to 200 ms, which is for functions and not for engines.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ditto.marker import FIXTURES

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

OURS = FIXTURES


class Examples(list["Comparison"]):
    """Keeps one comparison of all examples: the last that failed, which is the shrunk one, else the closest call."""

    def append(self, comparison: Comparison) -> None:
        """Take a comparison in, and let go of what it replaces."""
        if not self or not comparison or (self[0] and margin(comparison) >= margin(self[0])):
            self[:] = [comparison]


def margin(comparison: Comparison) -> float:
    """Return the largest share of a bound that was used."""
    return comparison.worst.verdict.margin if comparison.worst else 0.0


def given_test(item: pytest.Item) -> Any:
    """Return the function of a test that hypothesis runs with our fixtures, or None."""
    function: Any = getattr(item, "obj", None)
    if "hypothesis" not in sys.modules or function is None or not set(OURS) & set(getattr(item, "fixturenames", ())):
        return None
    from hypothesis import is_hypothesis_test

    return getattr(function, "__func__", function) if is_hypothesis_test(function) else None


def prepare(item: pytest.Item) -> None:
    """Fit a test's settings to engines, as far as its author has left them to the default."""
    function = given_test(item)
    if function is None:
        return
    from hypothesis import HealthCheck, settings

    from pytest_ditto.fixtures import PAIR

    # The attribute is how hypothesis's own plugin changes a collected test's settings; decorating again is refused.
    chosen = getattr(function, "_hypothesis_internal_use_settings", None) or settings()
    quiet = {HealthCheck.too_slow, HealthCheck.data_too_large, *chosen.suppress_health_check}
    if only_ours(item):
        quiet.add(HealthCheck.function_scoped_fixture)
    deadline = None if chosen.deadline == settings.get_profile("default").deadline else chosen.deadline
    function._hypothesis_internal_use_settings = settings(chosen, deadline=deadline, suppress_health_check=quiet)
    if PAIR in item.stash:
        item.stash[PAIR].comparisons = Examples()


def only_ours(item: pytest.Item) -> bool:
    """Tell whether no fixture of somebody else's is made once a test: hypothesis is right to warn of those."""
    arguments = getattr(item, "_fixtureinfo", None)
    if arguments is None:
        return False
    for name in arguments.argnames:
        definitions = arguments.name2fixturedefs.get(name, ())
        if name not in OURS and any(definition.scope == "function" for definition in definitions):
            return False
    return True
