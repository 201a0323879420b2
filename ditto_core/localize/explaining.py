"""Causes from the model's own code: each site's recorded computation is changed until it gives the engine's tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ditto_core.causes.mutants import Model
from ditto_core.causes.search import Found, explain, scope_of
from ditto_core.causes.slices import Slice
from ditto_core.compare.blame import Cause
from ditto_core.localize.local import Localizer
from ditto_core.localize.recording import Recording
from ditto_core.localize.settings import setting
from ditto_core.system.threads import torch_threads

SECONDS = 10.0
"""Time for a site, of this thread's processor: a busy machine finds the same causes."""

SEARCHED = 2
"""Sites for which all changes of the model's code are tried."""

SMALL = 1 << 22
"""Parameters up to which the model is built anew for each field of its configuration."""

WIDEST = 70
"""Operations up to which the code upstream is unfolded."""


def explained(localizer: Localizer, sites: Sequence[str]) -> tuple[dict[str, Cause], tuple[str, ...]]:
    """Return the causes of sites, and notes where there is something to say and no cause."""
    if not localizer.kept:
        return {}, ("no cause was searched in the model's code: the first step's tensors are too large to keep",)
    recording = Recording.of(localizer, sites)
    model = Model.of(localizer.truth.module, localizer.dtype, parallel=localizer.parallel)
    small = sum(tensor.numel() for tensor in model.tensors.values()) <= SMALL
    # thousands of small functions: threads that wait for each other made them thirty times slower
    with torch_threads(1 if small else 0):
        found = setting(localizer, recording.results, code_of(recording, sites[0]), SECONDS) if small else None
        return ({found.site: found}, ()) if found is not None else searched(recording, model, sites)


def searched(recording: Recording, model: Model, sites: Sequence[str]) -> tuple[dict[str, Cause], tuple[str, ...]]:
    """Try the mutants of the first sites, and what explains one of these at the others."""
    causes, notes, known = {}, [], []
    for site in sites[:SEARCHED]:
        cause, note, found = explain(levels(recording, site), model, SECONDS)
        if cause is not None and found is not None:
            causes[site] = cause
            known.append((cause, found))
        notes += [note] if note else []
    for site in sites[SEARCHED:] if known else ():
        slices = recording.slices(site)
        causes |= next(({site: replace(cause, site=site)} for cause, found in known if holds(found, slices)), {})
    return causes, tuple(notes)


def holds(found: Found, slices: Sequence[Slice]) -> bool:
    """Tell whether what explains one site explains another, by the other's slices."""
    with suppress(Exception):  # it may take a tensor that is not there
        alike = slices[0].signature == found.part.signature
        return alike and scope_of(found.edits, slices, found.mutant.share) is not None
    return False


def code_of(recording: Recording, site: str) -> str:
    """Return the lines of the model that compute a site."""
    return " ".join({node.code for part in recording.slices(site) for node in part.nodes})


def levels(recording: Recording, site: str) -> Iterator[Sequence[Slice]]:
    """Yield a site's slices, then those in which the nearest sites upstream are computed too."""
    slices = recording.slices(site)
    yield slices
    upstream = {node.label for part in slices for node in part.nodes if node.origin is not None}
    further = recording.slices(site, upstream) if upstream else []
    if further and len(further[0].nodes) <= WIDEST:
        yield further
