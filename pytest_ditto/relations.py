"""The fixture ``ditto_relations``: what must hold for an engine without a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ditto_core.pair.pair import Pair
    from ditto_core.relations import Relations


@pytest.fixture
def ditto_relations(ditto: Pair) -> Relations:
    """The :class:`~ditto_core.relations.Relations` of the engine that the marker ``ditto_engine`` asks for.

    They are judged by the noise floor on the very tokens where the reference is eager, else by the table of dtypes.
    """
    return ditto.relations()
