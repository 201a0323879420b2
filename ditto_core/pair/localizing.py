"""The local errors of a pair's run: what measures them, what is made of them, and the engine that shows every site."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ditto_core.localize import EVERYTHING, Localizer, conclude
from ditto_core.localize.kernels import CoarseKernels

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.graphs.graph import Graph
    from ditto_core.pair.sessions import Sessions
    from ditto_core.spec import EngineSpec


def open_localizer(sessions: Sessions) -> Localizer:
    """Return what takes the engine's taps and measures the error that each site adds by itself."""
    engine = sessions.engine
    kernels = CoarseKernels(engine, engine.taps, lambda: exported_graph(sessions))
    taps = (*engine.taps, *sessions.export.behind(engine.taps))
    return Localizer(sessions.model, taps, sessions.spec.dtype, kernels=kernels)


def localized(sessions: Sessions, localizer: Localizer, comparison: Comparison) -> Comparison:
    """Return a comparison with what its localizer found."""
    return replace(comparison, localization=conclude(localizer, comparison, exported_graph(sessions)))


def exported_graph(sessions: Sessions) -> Graph | None:
    """Return the exported graph; None for a backend that builds from none."""
    from ditto_core.graphs.graph import Graph

    path = sessions.export.onnx_path
    return Graph.read(path) if path.exists() else None


def with_every_site(sessions: Sessions, dtype: str) -> EngineSpec:
    """Return the spec itself when its engine shows every site in ``dtype``; else that of an engine which does."""
    spec = sessions.spec
    known = {tap.site for tap in sessions.built.taps}
    every = {tap.site for tap in sessions.export.provenance.taps}
    if dtype == spec.dtype and every <= known:
        return spec
    return replace(spec, dtype=dtype, outputs=EVERYTHING, aliases=())
