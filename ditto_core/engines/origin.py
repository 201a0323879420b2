"""What an engine was built of: another model at the place of the first is told, not compared with the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ditto_core.errors import UsageError

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine
    from ditto_core.spec import ModelSource

Digest = Callable[["ModelSource"], str]
"""Returns the digest of a source's content: that of a workspace."""


def content_of(source: ModelSource, digest: Digest) -> str:
    """Return what a model is: whether it is read from files or made by code, and the digest of its content."""
    return f"{kind_of(source)} {digest(source)}"


def kind_of(source: ModelSource) -> str:
    """Return what the digest of a source is of; it says nothing beside one of the other kind."""
    return "files" if source.factory is None else "module"


def another_model(engine: Engine, source: ModelSource, digest: Digest) -> str:
    """Say that a model is not what an engine was built of; empty where it is, or where that cannot be told."""
    known = engine.built_of
    if not known.startswith(kind_of(source)) or known == content_of(source, digest):
        return ""
    return f"the engine in {engine.directory} was built of another model than {source.location or source.label} is now"


def refuse_another_model(engine: Engine, source: ModelSource, digest: Digest) -> None:
    """Raise :class:`UsageError` for a model that is not what an engine was built of."""
    if problem := another_model(engine, source, digest):
        raise UsageError(f"{problem}: build the engine again, or put back the model")
