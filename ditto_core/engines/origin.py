"""What an engine was built of: another model at the place of the first is told, not compared with the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ditto_core.backends.base import Backend, BuildsFromSource
from ditto_core.backends.registry import get_backend
from ditto_core.errors import UsageError

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine
    from ditto_core.spec import ModelSource

Digest = Callable[["ModelSource", bool], str]
"""Returns the digest of a source's content, that of a workspace: of all of it, or of what a graph is made of."""


def content_of(source: ModelSource, digest: Digest, backend: Backend) -> str:
    """Return what a model is to a backend's engines: whether it is read from files or made by code, and the digest of
    its content. One that serves the source reads how tokens are chosen, too."""
    return f"{kind_of(source)} {digest(source, not isinstance(backend, BuildsFromSource))}"


def kind_of(source: ModelSource) -> str:
    """Return what the digest of a source is of; it says nothing beside one of the other kind."""
    return "files" if source.factory is None else "module"


def another_model(engine: Engine, source: ModelSource, digest: Digest) -> str:
    """Say that a model is not what an engine was built of, and what to do; empty where it is, or where that cannot be
    told."""
    known, here, backend = engine.built_of, f"the engine in {engine.directory}", get_backend(engine.spec.backend)
    if not known.startswith(kind_of(source)) or known == content_of(source, digest, backend):
        return ""
    other = replace(source, trust_remote_code=not source.trust_remote_code)
    if source.factory is None and known == content_of(other, digest, backend):
        trusted, given = other.trust_remote_code, source.trust_remote_code
        option = "give --trust-remote-code, or" if trusted else "leave out --trust-remote-code, or give"
        how = f"{option} compare_engine ModelSource({source.location!r}, trust_remote_code={trusted})"
        return f"{here} was built with trust_remote_code={trusted} and is opened with {given}: {how}"
    model = source.location or source.label
    return f"{here} was built of another model than {model} is now: build the engine again, or put back the model"


def refuse_another_model(engine: Engine, source: ModelSource, digest: Digest) -> None:
    """Raise :class:`UsageError` for a model that is not what an engine was built of."""
    if problem := another_model(engine, source, digest):
        raise UsageError(problem)
