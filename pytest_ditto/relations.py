"""The fixture ``ditto_relations``: what must hold for an engine without a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ditto_core.pair.pair import Pair
    from ditto_core.relations import InputRelations, Relations


@pytest.fixture
def ditto_relations(ditto: Pair) -> Relations | InputRelations:
    """The :class:`~ditto_core.relations.Relations` of the engine that the marker ``ditto_engine`` asks for.

    Of a model that is not a decoder they are :class:`~ditto_core.relations.InputRelations`, on inputs by name.
    They are judged by the noise floor on the very inputs where the reference is eager, else by the table of dtypes.
    """
    return ditto.relations()
