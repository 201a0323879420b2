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
    """Fit a test's settings to engines, as far as its author has left them to the default.

    Raises hypothesis's ``FailedHealthCheck`` where it would, but for our own fixtures: it would name ours first.
    """
    function = given_test(item)
    if function is None:
        return
    from hypothesis import HealthCheck, settings
    from hypothesis.errors import FailedHealthCheck

    from pytest_ditto.fixtures import PAIR

    # The attribute is how hypothesis's own plugin changes a collected test's settings; decorating again is refused.
    chosen = getattr(function, "_hypothesis_internal_use_settings", None) or settings()
    foreign = foreign_fixture(item)
    if foreign and HealthCheck.function_scoped_fixture not in chosen.suppress_health_check:
        raise FailedHealthCheck(
            f"{item.nodeid!r} uses a function-scoped fixture {foreign!r}, which is not recreated for each example of "
            f"@given: make it inside the test, or suppress HealthCheck.function_scoped_fixture"
        )
    ours = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
    quiet = {*ours, *chosen.suppress_health_check}
    deadline = None if chosen.deadline == settings.get_profile("default").deadline else chosen.deadline
    function._hypothesis_internal_use_settings = settings(chosen, deadline=deadline, suppress_health_check=quiet)
    if PAIR in item.stash:
        item.stash[PAIR].comparisons = Examples()


def foreign_fixture(item: pytest.Item) -> str:
    """Return an argument that is somebody else's fixture and made once a test, or an empty string."""
    known: Any = getattr(item, "_fixtureinfo", None)
    if known is None:
        return ""
    for name in known.argnames:
        definitions = known.name2fixturedefs.get(name, ())
        if name not in OURS and any(definition.scope == "function" for definition in definitions):
            return str(name)
    return ""
