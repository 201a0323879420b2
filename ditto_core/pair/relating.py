"""The relations of a pair's engine: what must not depend on how it is fed, and the bounds that judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ditto_core.backends.base import ServesModes
from ditto_core.backends.registry import get_backend
from ditto_core.errors import UsageError
from ditto_core.model.checkpoint import vocab_size
from ditto_core.relations import InputRelations, Relations, Terms

if TYPE_CHECKING:
    import torch

    from ditto_core.compare.tolerance import Tolerance
    from ditto_core.pair.sessions import Sessions
    from ditto_core.relations import Relation
    from ditto_core.session import Session


def input_relations(sessions: Sessions, examples: Mapping[str, torch.Tensor], tolerance: Tolerance) -> InputRelations:
    """Return the relations of a model that takes inputs by name."""
    axes, noise = sessions.output_axes, both_references(sessions)
    return InputRelations(sessions.engine, dict(examples), axes, Terms(tolerance), noise, sessions.export.check)


def token_relations(sessions: Sessions, tolerance: Tolerance) -> Relations:
    """Return the relations of a decoder."""
    config = getattr(sessions.model.module, "config", None)
    return Relations(
        sessions.engine,
        Terms(tolerance, profile=sessions.spec.profile, pad=number(config, "pad_token_id")),
        both_references(sessions),
        sessions.reference,
        window=bool(number(config, "sliding_window")),
        longest=number(config, "max_position_embeddings"),
        vocab_size=vocab_size(config),
    )


def both_references(sessions: Sessions) -> tuple[Session, Session] | None:
    """Return the reference and the same in the engine's dtype, which tell the noise; None where there is no second."""
    low_precision = sessions.low_precision
    return None if low_precision is None else (sessions.reference, low_precision)


def served_relations(
    sessions: Sessions, tolerance: Tolerance, ids: Sequence[int], names: Sequence[str]
) -> tuple[Relation, ...]:
    """Check the ways in which a server serves, each by a session of its own. Raises :class:`UsageError` for a backend
    that serves in one way only."""
    from ditto_core.relations.served import Serving, check_served

    backend = get_backend(sessions.spec.backend)
    if not isinstance(backend, ServesModes):
        raise UsageError(f"{sessions.spec.backend} serves in one way only: check relations() instead")
    plain = sessions.spec.untapped()
    modes = {name: dict(options) for name, options in backend.modes(plain).items()}

    def open_mode(name: str) -> Session:
        options = {**dict(plain.options), **modes[name]}
        return sessions.workspace.build(replace(plain, options=tuple(sorted(options.items())))).open()

    terms = token_relations(sessions, tolerance).terms_for([list(ids)])
    serving = Serving(open_mode, sessions.reference, sessions.low_precision)
    return tuple(check_served(serving, list(ids), terms, *names))


def number(config: Any, name: str) -> int:
    """Return a number of a model's configuration, 0 where it has none."""
    return int(getattr(config, name, None) or 0)
