"""What ``reference=`` may be: the eager model, another engine, a recorded trace or dump. All are sessions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.backends.base import QuantizesWeights
from ditto_core.backends.registry import backend_names, get_backend
from ditto_core.engines.staged import open_engine
from ditto_core.errors import UsageError, nearest
from ditto_core.pair.pair_options import OWN_WEIGHTS
from ditto_core.session import Session
from ditto_core.spec import DTYPE_ALIASES, DTYPES, EngineSpec, parse_backend, parse_dtype

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine
    from ditto_core.engines.workspace import Workspace
    from ditto_core.model.loading import LoadedModel
    from ditto_core.pair.pair_options import PairOptions


def open_reference(workspace: Workspace, spec: EngineSpec, engine: Engine, options: PairOptions) -> Session:
    """Open the reference of an engine. Raises :class:`UsageError` when ``options.reference`` names nothing known."""
    wanted = options.reference
    check_reference(wanted, options.name_map)
    if wanted == OWN_WEIGHTS:
        from ditto_core.backends.eager import HIGHER

        return own_session(own_models(workspace, spec)[0], engine, HIGHER[spec.dtype], options.device)
    built = named_backend(spec, wanted)
    if built is not None:
        return open_engine(workspace, workspace.build(built))
    if path := recorded_at(wanted):
        return open_recorded(path, engine, options, workspace.export(spec).finals)
    _, _, dtype = str(wanted).partition(":")
    return workspace.eager(spec, engine.taps, dtype=parse_dtype(dtype) if dtype else "", device=options.device)


def own_models(workspace: Workspace, spec: EngineSpec) -> tuple[LoadedModel, LoadedModel]:
    """Return the model with an engine's own weights, and the same that rounds as the engine's kernels do.

    Raises :class:`UsageError` when nothing tells the engine's weights.
    """
    backend = get_backend(spec.backend)
    if not isinstance(backend, QuantizesWeights):
        raise UsageError(f"reference={OWN_WEIGHTS!r} needs a quantized engine file, not {spec.backend}")
    return backend.own_models(spec, workspace.model(spec.model, spec.attention))


def own_session(model: LoadedModel, engine: Engine, dtype: str, device: str) -> Session:
    """Open the model with an engine's own weights."""
    from ditto_core.backends.eager import EagerSession

    session = EagerSession(model, engine.taps, dtype=dtype, device=device)
    facts = {**session.info.facts, "weights": engine.fingerprint}
    label = f"{session.info.label} with the engine's weights"
    session.info = replace(session.info, label=label, facts=facts, quantized=True)
    return session


def open_recorded(path: Path, engine: Engine, options: PairOptions, finals: Collection[str] = ()) -> Session:
    """Open one of our traces, or a dump of another tool under the names of the engine's taps and final outputs."""
    from ditto_core.backends.dumped import LOGITS, open_dumped
    from ditto_core.backends.recorded import RecordedSession
    from ditto_core.dumps.traces import claims
    from ditto_core.trace import Trace

    if claims(path) and options.name_map is None:
        return RecordedSession(Trace.open(path))
    return open_dumped(path, engine.taps, options.name_map, {LOGITS, *finals})


def named_backend(spec: EngineSpec, wanted: Any) -> EngineSpec | None:
    """Return the spec of a reference that is an engine: ``wanted`` itself, or the same model by another backend."""
    if isinstance(wanted, EngineSpec):
        return wanted
    name, _, dtype = str(wanted).partition(":")
    name = parse_backend(name)
    if name not in backend_names() or recorded_at(wanted):
        return None
    return replace(spec, backend=name, dtype=parse_dtype(dtype) if dtype else spec.dtype)


def recorded_at(wanted: Any) -> Path | None:
    """Return the path of a reference that is recorded. A text that is a known name is that; ``./`` makes it a path."""
    if isinstance(wanted, EngineSpec):
        return None
    if isinstance(wanted, str) and parse_backend(wanted.partition(":")[0]) in known_names():
        return None
    path = Path(str(wanted))
    return path if path.exists() else None


def known_names() -> list[str]:
    """Return the names of the references that are computed."""
    return ["eager", OWN_WEIGHTS, *backend_names()]


def check_reference(wanted: Any, name_map: Any = None) -> None:
    """Raise :class:`UsageError` when ``wanted`` names no reference, or no dump to map the names of. Loads nothing."""
    if wanted == OWN_WEIGHTS:
        return
    recorded = recorded_at(wanted)
    if name_map is not None and recorded is None:
        raise UsageError(f"name_map is given, but reference {str(wanted)!r} is no path of a dump")
    if recorded is not None or isinstance(wanted, EngineSpec):
        return
    name, _, dtype = str(wanted).partition(":")
    name = parse_backend(name)
    known = known_names()
    if name not in known:
        raise UsageError(
            f"unknown reference {str(wanted)!r}, expected {', '.join(known)} (with ':' and one of "
            f"{', '.join((*DTYPES, *DTYPE_ALIASES))}) or the path of a trace or dump{nearest(name, known)}"
        )
    if dtype:
        parse_dtype(dtype)
