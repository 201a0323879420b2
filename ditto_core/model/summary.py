"""What an export says of a model, without ONNX: for backends that build from the model itself, at any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ditto_core.errors import BuildError
from ditto_core.model.buffers import Buffers
from ditto_core.model.export import unmapped_modules
from ditto_core.model.export_failure import told
from ditto_core.model.exported import PROVENANCE_FILE, Export, head_axis
from ditto_core.model.loading import LoadedModel
from ditto_core.model.tracing import wrap
from ditto_core.model.wrappers import BATCH, LENGTH, TOTAL, vocab_size
from ditto_core.sites import Provenance, Tap


@dataclass(frozen=True)
class Observed:
    """What one forward pass shows: taps with axes, the shape of each by the tap's value, and the model's borders."""

    taps: tuple[Tap, ...]
    shapes: Mapping[str, tuple[int, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def outline(model: LoadedModel, directory: Path, *, dtype: str) -> Export:
    """Write the description and the provenance of a loaded model into ``directory``, from one small forward pass.

    The sites are those of :func:`ditto_core.model.export.export`; their values are the sites themselves, and their
    source lines those where the module is called. ``dtype`` is what the engine will compute in. Raises
    :class:`BuildError` when the model cannot run.
    """
    seen = observe(model)
    taps = tuple(replace(tap, fx_node=tap.site, dtype=dtype) for tap in seen.taps)
    Provenance(taps, tuple(unmapped_modules(model.module, taps))).save(directory / PROVENANCE_FILE)
    done = Export(directory, model.decoder, seen.inputs, seen.outputs, vocab_size(model.module))
    done.save()
    return done


def observe(model: LoadedModel, *, operators: bool = False) -> Observed:
    """Run a loaded model once, on small inputs. Raises :class:`BuildError` when it cannot run."""
    wrapper = wrap(model)
    wrapper.operators = operators
    try:
        with torch.no_grad(), Buffers(model.module).kept():
            arguments, _, input_names = wrapper.signature()
            outputs = wrapper(*arguments)
    except Exception as error:
        raise BuildError(f"{model.label} could not be run: {told(error)}") from error
    shapes = dict(zip(wrapper.traced.names, (tuple(tensor.shape) for tensor in outputs), strict=True))
    token = arguments[0] if model.decoder else arguments[0][0]
    total = arguments[1].shape[1] if model.decoder else 0
    taps = tuple(
        replace(tap, axes=axes_of(shapes[value], tuple(token.shape), total))
        for value, tap in wrapper.traced.taps.items()
    )
    return Observed(taps, shapes, tuple(input_names), wrapper.traced.outputs)


def axes_of(shape: Sequence[int], token: Sequence[int], total: int) -> tuple[str, ...]:
    """Name the dimensions of a tensor [batch, length, …] or [batch, head, length|total, total|…], by their sizes.

    ``token`` is the shape of the token ids, [batch, length], or of any first input, whose first dimension is the batch.
    """
    names = [""] * len(shape)
    if not shape or not token or shape[0] != token[0]:
        return tuple(names)
    names[0] = BATCH
    places = [i for i in (1, 2) if total and i < len(shape) and shape[i] == token[1]]
    if len(shape) == 4 and total in shape[2:]:  # [batch, head, total, size] and [batch, head, length, total]
        places = [i for i in places if i == 2 and shape[2] != total]
    place = places[0] if places and (len(shape) < 4 or len(places) == 1) else 0  # as many heads as tokens: either
    if place:
        names[place] = LENGTH
    for i in (2, 3):
        if total and len(shape) == 4 and shape[i] == total:
            names[i] = TOTAL
    return head_axis(tuple(names))
