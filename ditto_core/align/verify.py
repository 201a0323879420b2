"""A held-out prompt confirms a map: other tokens, another length, and once more with padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ditto_core.align import eager, running
from ditto_core.align.alignment import Alignment, Place
from ditto_core.align.binding import MASK
from ditto_core.align.file import OnnxFile, ask_fused
from ditto_core.align.matching import LOOSE
from ditto_core.align.parts import outputs_of
from ditto_core.align.probes import HELD_OUT, PADDING, Probe, probe
from ditto_core.align.values import HIDDEN_SCORE
from ditto_core.errors import DittoError, UsageError

if TYPE_CHECKING:
    from ditto_core.model.loading import LoadedModel

SEED = 97
WORSE = 100.0
"""With padding, a final output's error that is this many times the tolerance comes from the padding."""


def verified(found: Alignment, model: LoadedModel, file: OnnxFile, batch: int) -> Alignment:
    """Return the map without the sites that a held-out prompt does not confirm, with a note on padding.

    A site is confirmed when its value is nearer than an unrelated one could be: whether it agrees is for a test to say.
    """
    plain = probe(model, batch, HELD_OUT, seed=SEED)
    errors = place_errors(found, model, file, plain)
    wrong = {site: error for site, error in errors.items() if site in found.sites and not error <= LOOSE}
    reasons = {site: f"a held-out prompt does not confirm it: {error:.1e} off" for site, error in wrong.items()}
    kept = {site: place for site, place in found.sites.items() if site not in wrong}
    notes = (*found.notes, *padding_note(found, model, file, batch))
    return replace(found, sites=kept, ambiguous={**found.ambiguous, **reasons}, notes=notes)


def padding_note(found: Alignment, model: LoadedModel, file: OnnxFile, batch: int) -> Sequence[str]:
    """Return what padding does to the final outputs of a file that is right without it."""
    if batch < 2 or any(not place.error <= found.tolerance for place in found.finals.values()):
        return ()
    padded = probe(model, batch, HELD_OUT, seed=SEED, padding=PADDING)
    if MASK not in found.binding.roles.values():
        return ()
    try:
        errors = place_errors(replace(found, sites={}), model, file, padded)
    except DittoError as error:
        return (f"a batch with padding fails: {error}",)
    worst = max(errors, key=lambda name: errors[name], default="")
    if not worst or errors[worst] <= WORSE * found.tolerance:
        return ()
    side = "left" if model.decoder else "right"
    return (
        f"rows padded on the {side} come out wrong: {worst} is {errors[worst]:.1e} off; give prompts of one length",
    )


def place_errors(found: Alignment, model: LoadedModel, file: OnnxFile, given: Probe) -> dict[str, float]:
    """Return the relative L2 error of every place on one probe, at the tokens that are not padding."""
    sites, finals = eager.capture(model, [given])
    expected = {name: site for site in sites for name in site.sites}
    expected |= {name: sites[index] for name, index in finals.items()}
    places = {**found.sites, **found.finals}
    values = values_at(found, file, places, given)
    mask = given.inputs.get("attention_mask")
    real = None if mask is None else mask.numpy().astype(bool)
    errors = {}
    for name, place in places.items():
        if name in expected:
            errors[name] = distance(place, values[place.value], expected[name].arrays[0], real, given.batch)
    return errors


def values_at(found: Alignment, file: OnnxFile, places: Mapping[str, Place], given: Probe) -> dict[str, Any]:
    """Return the values of the file that the places are in, on one probe."""
    names = list(dict.fromkeys(place.value for place in places.values()))
    model = file.copy()
    ask_fused(model, names)
    results = outputs_of(file, model, running.fed(found.binding, given), names)
    return {name: np.asarray(result, np.float32) for name, result in results.items()}


def distance(place: Place, value: Any, expected: Any, real: Any, batch: int) -> float:
    """Return the relative L2 error of a place; of a tensor [batch, length, …] at the real tokens only.

    What hides on both sides, with whatever numbers, is alike, and so is NaN; where one side alone is not finite the
    error is infinite.
    """
    try:
        actual = place.take(value, batch)
    except UsageError:
        return math.inf
    if actual.shape[1:2] == (1,) and expected.ndim == 3:
        expected = expected[:, -1:]
    if actual.shape != expected.shape:
        return math.inf
    if real is not None and expected.shape[:2] == real.shape:
        actual, expected = actual[real], expected[real]
    alike = (np.minimum(np.abs(actual), np.abs(expected)) >= HIDDEN_SCORE) | (np.isnan(actual) & np.isnan(expected))
    actual, expected = (np.where(alike, 0, side).astype(np.float64) for side in (actual, expected))
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return math.inf
    return float(np.linalg.norm((actual - expected).ravel()) / (np.linalg.norm(expected.ravel()) + 1e-30))
