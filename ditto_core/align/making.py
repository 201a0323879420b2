"""A model and a file -> the confirmed map between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ditto_core.align.aligning import concluded, study
from ditto_core.align.cause import explained
from ditto_core.align.decoding import decoding_fault
from ditto_core.align.fault import faults
from ditto_core.align.quantized import quantized
from ditto_core.align.verify import verified
from ditto_core.compare.text import FIRST_WRONG

if TYPE_CHECKING:
    from ditto_core.align.alignment import Alignment
    from ditto_core.align.file import OnnxFile
    from ditto_core.model.loading import LoadedModel


def align(model: LoadedModel, file: OnnxFile, inputs: Mapping[str, str] | None = None) -> Alignment:
    """Return the map of a file, with the final outputs and every site that it holds, confirmed by a held-out prompt.

    ``inputs`` are roles of the file's inputs by name, where names do not tell. A quantized file is aligned with the
    model that has the file's weights. Raises :class:`~ditto_core.errors.UsageError` when an input of the file fits
    nothing or no output is the model's, :class:`~ditto_core.errors.RunError` when a side fails.
    """
    whole = quantized(model, file, inputs) if file.quantization else None
    found = whole.study if whole else study(model, file, inputs)
    made = verified(concluded(found), found.model, found.file, found.batches[0])
    if whole:
        made = replace(made, wrong=whole.weights.wrong)
    if whole and not whole.judged:
        return made
    first = [explained(found, fault).fault for fault in faults(found.matching)[:1]] if made.off else []
    if not made.off and (later := decoding_fault(found)) is not None:
        first = [later]
    notes = (f"{FIRST_WRONG}: {f.operator} {f.node}, {f.cause or f.site}" for f in first)
    return replace(made, notes=(*made.notes, *notes))
