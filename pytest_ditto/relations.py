"""The fixture ``ditto_relations``: what must hold for an engine without a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ditto_core.pair.pair import Pair
    from ditto_core.relations import Relations


@pytest.fixture
def ditto_relations(ditto: Pair) -> Relations:
    """The :class:`~ditto_core.relations.Relations` of the engine that the marker ``ditto_engine`` asks for.

    They are judged by the noise floor on the very tokens where the reference is eager, else by the table of dtypes.
    """
    return relations_of(ditto)


def relations_of(pair: Pair) -> Relations:
    """Return the relations of a pair's engine."""
    from ditto_core.compare.tolerance import Tolerance
    from ditto_core.relations import Relations, Terms

    noise = None if pair.noisy is None else (pair.reference, pair.noisy)
    config = pair.model_config
    terms = Terms(Tolerance.of(pair.options.tolerance), profile=pair.spec.profile, pad=number(config, "pad_token_id"))
    return Relations(
        pair.engine,
        terms,
        noise,
        pair.reference,
        window=bool(number(config, "sliding_window")),
        longest=number(config, "max_position_embeddings"),
        vocab_size=pair.vocab_size,
    )


def number(config: Any, name: str) -> int:
    """Return a number of a model's configuration, 0 if it has none."""
    return int(getattr(config, name, None) or 0)
