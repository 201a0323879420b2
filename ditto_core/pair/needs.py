"""What a pair needs of the cache: its exports and engines, and where each is. Nothing is exported or built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ditto_core.backends.base import BuildsFromSource
from ditto_core.backends.registry import get_backend
from ditto_core.engines.keys import content_key, engine_key, graph_key, outline_key
from ditto_core.errors import UsageError
from ditto_core.model.exported import ONNX_FILE
from ditto_core.pair.reference import named_backend

if TYPE_CHECKING:
    from ditto_core.cache import Held
    from ditto_core.engines.workspace import Workspace
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.spec import EngineSpec

CACHED, STORE, MISSING, UNUSABLE = "cached", "in the store", "to be built", "bad input"


@dataclass(frozen=True)
class Need:
    """One entry: ``what`` for people, ``size`` in bytes (0 for one that is to be built).

    The ``key`` of an engine is empty while its export is to be built: it depends on the bytes of that.
    """

    kind: str
    key: str
    what: str
    where: str
    size: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Need:
        """Inverse of :meth:`to_json`."""
        return cls(**data)


def specs_of(spec: EngineSpec, options: PairOptions) -> Iterator[EngineSpec]:
    """Yield the engines that a pair builds: its own, the same without taps, and a reference that is an engine.

    The engine of an encoder-decoder's later steps is not among them: its taps are known when the first is built.
    """
    yield spec
    if options.observer and spec.outputs:
        yield spec.untapped()
    reference = named_backend(spec, options.reference)
    if reference is not None:
        yield reference


def needs_of(workspace: Workspace, specs: Iterable[EngineSpec]) -> list[Need]:
    """Return what the engines need, each entry once, an export before its engines.

    A model that a callable makes is made, to know what it is; weights on disk are digested. Raises
    :class:`~ditto_core.errors.CacheError` when the store behind the cache cannot be read.
    """
    found = (need for spec in specs for need in _needs_or_why_not(workspace, spec))
    return list(dict.fromkeys(found))


def _needs_or_why_not(workspace: Workspace, spec: EngineSpec) -> list[Need]:
    try:
        return [*_needs(workspace, spec)]
    except UsageError as error:  # its tests' error, when they run
        return [_need("engine", "", f"{spec.model.label} {spec.label}: {error}", None, UNUSABLE)]


def _needs(workspace: Workspace, spec: EngineSpec) -> Iterator[Need]:
    backend = get_backend(spec.backend)
    from_source = isinstance(backend, BuildsFromSource)
    model = workspace.digest(spec.model, graph=not from_source)
    kind, key = ("outline", outline_key(spec, model)) if from_source else ("export", graph_key(spec, model))
    held = workspace.cache.find(kind, key)
    yield _need(kind, key, f"{spec.model.label} {spec.dtype}", held)
    what = f"{spec.model.label} {spec.label}, {'with' if spec.outputs else 'without'} taps"
    if held is None:
        yield _need("engine", "", what, None)
        return
    own = engine_key(spec, backend, content_key(key, held.digest if ONNX_FILE in held.files else ""))
    yield _need("engine", own, what, workspace.cache.find("engine", own))


def _need(kind: str, key: str, what: str, held: Held | None, missing: str = MISSING) -> Need:
    where = missing if held is None else STORE if held.remote else CACHED
    return Need(kind, key, what, where, held.size if held else 0)
