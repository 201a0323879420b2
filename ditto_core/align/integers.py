"""Outputs of integers or truth values: classes, indices, masks. No site is one, so they are not matched by distance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ditto_core.align import eager
from ditto_core.align.alignment import Place
from ditto_core.align.layout import layouts
from ditto_core.align.parts import outputs_of

if TYPE_CHECKING:
    from ditto_core.align.file import OnnxFile
    from ditto_core.align.parts import Feeds
    from ditto_core.align.probes import Probe
    from ditto_core.align.values import Array
    from ditto_core.model.loading import LoadedModel


def integer_places(
    model: LoadedModel, file: OnnxFile, probes: Sequence[Probe], feeds: Feeds
) -> Iterator[tuple[str, Place | None]]:
    """Yield the place of each such output: the file's output of its name, else that of its shape with the fewest other
    elements, each once; None where the file has none."""
    expected = {} if model.decoder else expected_integers(model, probes)
    ports = [port.name for port in file.outputs if not port.floating] if expected else []
    runs = [outputs_of(file, file.copy(), feed, ports) for feed in feeds] if ports else []
    actual = {name: [run[name] for run in runs] for name in ports if all(name in run for run in runs)}
    errors = {
        name: {other: share_of_others(ours, theirs) for other, ours in actual.items()}
        for name, theirs in expected.items()
    }
    for name in sorted(expected, key=lambda name: (name not in actual, min(errors[name].values(), default=1.0))):
        left = {other: error for other, error in errors[name].items() if other in actual and error <= 1}
        best = name if name in left else min(left, key=lambda other: left[other], default="")
        if not best:
            yield name, None
            continue
        del actual[best]
        dims = tuple(zip(*(array.shape for array in expected[name]), strict=True))
        plain = layouts(dims, dims, tuple(probe.batch for probe in probes))[0]
        yield name, Place(name, best, plain, None, left[best])


def expected_integers(model: LoadedModel, probes: Sequence[Probe]) -> dict[str, list[Array]]:
    """Return the model's outputs that are not floating, one array a probe, by name."""
    runs = [eager.outputs(model, probe.inputs) for probe in probes]
    return {name: [run[name].numpy() for run in runs] for name, t in runs[0].items() if not t.is_floating_point()}


def share_of_others(actual: Sequence[Any], expected: Sequence[Array]) -> float:
    """Return the largest share of elements that differ on a probe; infinite for two shapes."""
    pairs = list(zip(actual, expected, strict=True))
    if any(ours.shape != theirs.shape for ours, theirs in pairs):
        return float("inf")
    return max(float(np.mean(ours != theirs)) if theirs.size else 0.0 for ours, theirs in pairs)
