"""The local errors of a pair's run: what measures them, what is made of them, and the engine that shows every site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ditto_core.errors import RunError, first_line
from ditto_core.localize import EVERYTHING, Localizer, conclude
from ditto_core.localize.kernels import CoarseKernels
from ditto_core.session import RunsRanks
from ditto_core.sites import OPERATORS

if TYPE_CHECKING:
    import torch

    from ditto_core.compare.blame import Localization
    from ditto_core.compare.comparison import Comparison
    from ditto_core.graphs.graph import Graph
    from ditto_core.pair.sessions import Sessions
    from ditto_core.spec import EngineSpec


@dataclass(frozen=True)
class NotLocalized:
    """Stands where a localizer could not be made: takes the engine's taps and measures nothing."""

    failure: str
    results: tuple[()] = ()

    def start(self) -> None:
        """Begin a new sequence."""

    def take(self, step: int, inputs: Mapping[str, torch.Tensor], captured: Mapping[str, torch.Tensor]) -> None:
        """Take one step."""


def open_localizer(sessions: Sessions) -> Localizer | NotLocalized:
    """Return what takes the engine's taps and measures the error that each site adds by itself."""
    engine = sessions.engine
    kernels = CoarseKernels(engine, engine.taps, lambda: exported_graph(sessions))
    taps = (*engine.taps, *sessions.export.behind(engine.taps))
    try:
        parallel = isinstance(sessions.engine, RunsRanks)
        return Localizer(sessions.replayed, taps, sessions.spec.dtype, kernels=kernels, parallel=parallel)
    except Exception as error:  # noqa: BLE001 - the verdict stands, whatever an explanation of it does
        return NotLocalized(f"not localized: {type(error).__name__}: {first_line(error)}")


def localized(sessions: Sessions, localizer: Localizer | NotLocalized, comparison: Comparison) -> Comparison:
    """Return a comparison with what its localizer found; where that failed, with a note. The verdict is the same."""
    if isinstance(localizer, NotLocalized) or (localizer.failure and not localizer.results):
        return with_note(comparison, localizer.failure)
    try:
        return replace(comparison, localization=conclude(localizer, comparison, exported_graph(sessions)))
    except Exception as error:  # noqa: BLE001 - the verdict stands, whatever an explanation of it does
        return with_note(comparison, f"not localized: {type(error).__name__}: {first_line(error)}")


def with_note(comparison: Comparison, note: str) -> Comparison:
    """Return a comparison with one more note."""
    return replace(comparison, notes=(*comparison.notes, note))


def required(comparison: Comparison) -> Localization:
    """Return the localization; raise :class:`~ditto_core.errors.RunError` with the reason where there is none."""
    if comparison.localization is None:
        reasons = [note for note in comparison.notes if note.startswith("not localized")]
        raise RunError(next(iter(reasons), "not localized: the run measured no local errors"))
    return comparison.localization


def exported_graph(sessions: Sessions) -> Graph | None:
    """Return the exported graph; None for a backend that builds from none."""
    from ditto_core.graphs.graph import Graph

    path = sessions.export.onnx_path
    return Graph.read(path) if path.exists() else None


def with_every_site(sessions: Sessions, dtype: str) -> EngineSpec:
    """Return the spec itself when its engine shows every site in ``dtype``; else that of an engine which does."""
    spec, model = sessions.spec, sessions.model
    if not model.decoder and not model.staged:
        finest = (*EVERYTHING, OPERATORS)
        return spec if (dtype, finest) == (spec.dtype, spec.outputs) else with_outputs(spec, dtype, finest)
    # Causes read what a decoder's attention is computed from: its ports stay the nearest sites.
    known = {tap.site for tap in sessions.built.taps}
    every = {tap.site for tap in sessions.export.provenance.taps}
    return spec if dtype == spec.dtype and every <= known else with_outputs(spec, dtype, EVERYTHING)


def with_outputs(spec: EngineSpec, dtype: str, outputs: tuple[str, ...]) -> EngineSpec:
    """Return the spec of another engine of the same model."""
    return replace(spec, dtype=dtype, outputs=outputs, aliases=())
