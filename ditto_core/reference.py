"""What ``reference=`` may be: the eager model, another engine, or a recorded trace. All are sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ditto_core.backends.base import Session, backend_names
from ditto_core.errors import UsageError, nearest
from ditto_core.spec import DTYPE_ALIASES, DTYPES, EngineSpec, parse_dtype

if TYPE_CHECKING:
    from ditto_core.engine import Engine
    from ditto_core.pair import PairOptions
    from ditto_core.workspace import Workspace


def open_reference(workspace: Workspace, spec: EngineSpec, engine: Engine, options: PairOptions) -> Session:
    """Open the reference of an engine. Raises :class:`UsageError` when ``options.reference`` names nothing known."""
    wanted = options.reference
    if isinstance(wanted, EngineSpec):
        return workspace.build(wanted).open()
    name, _, dtype = str(wanted).partition(":")
    if name == "eager":
        chosen = parse_dtype(dtype) if dtype else ""
        return workspace.eager(spec, engine.taps, dtype=chosen, device=options.device)
    if Path(str(wanted)).is_dir():
        from ditto_core.backends.recorded import RecordedSession
        from ditto_core.trace import Trace

        return RecordedSession(Trace.open(Path(str(wanted))))
    if name in backend_names():
        return workspace.build(replace(spec, backend=name, dtype=parse_dtype(dtype) if dtype else spec.dtype)).open()
    known = ["eager", *backend_names()]
    raise UsageError(
        f"unknown reference {str(wanted)!r}, expected {', '.join(known)} (with ':' and one of "
        f"{', '.join((*DTYPES, *DTYPE_ALIASES))}) or the directory of a trace{nearest(name, known)}"
    )
