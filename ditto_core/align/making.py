"""A model and a file -> the confirmed map between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ditto_core.align.aligning import concluded, study
from ditto_core.align.cause import explained
from ditto_core.align.decoding import decoding_fault
from ditto_core.align.fault import faults
from ditto_core.align.quantized import against_own_weights
from ditto_core.align.verify import verified

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
    found = study(model, file, inputs)
    if file.quantization:
        found = against_own_weights(found)
    made = verified(concluded(found), found.model, file)
    wrong = faults(found.matching) if made.off and not file.quantization else []
    first = [explained(found, fault).fault for fault in wrong[:1]]
    if not made.off and not file.quantization and (later := decoding_fault(found)) is not None:
        first = [later]
    notes = (f"first wrong operator on the probes: {f.operator} {f.node}, {f.cause or f.site}" for f in first)
    return replace(made, notes=(*made.notes, *notes))
