"""Inputs before tensors: what a server makes of a prompt, and which settings it took, against the reference's.

A prompt without its BOS or another RoPE base shows in every layer: it is said before any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ditto_core.compare.text import INPUTS_DIFFER
from ditto_core.session import HoldsWeights, ReadsInputs, Session
from ditto_core.stepping.prompts import SourceBatch, TokenBatch
from ditto_core.system.fingerprint import checksum


def input_differences(session: Session, batch: TokenBatch | SourceBatch, config: Any) -> Iterator[str]:
    """Yield a line for each text that the server reads as other ids, and each setting that is not the reference's.

    ``config`` is the reference's model configuration. A session that is not a server's has none.
    """
    if not isinstance(session, ReadsInputs) or not isinstance(batch, TokenBatch):
        return
    for row, text in enumerate(batch.texts):
        theirs = session.tokens(text) if text else None
        ours = batch.input_ids[row][batch.mask[row].bool()].tolist()
        if theirs is not None and list(theirs) != ours:
            yield f"{INPUTS_DIFFER}: {text[:40]!r} is {shown(theirs)} for the engine, {shown(ours)} for the reference"
    for name, value in session.settings().items():
        expected = getattr(config, name, value)
        if expected != value:
            yield f"{INPUTS_DIFFER}: {name} is {value!r} in the engine, {expected!r} in the reference"


def weight_differences(session: Session, module: nn.Module) -> Iterator[str]:
    """Yield a line where weights of the engine are not those of ``module`` in the engine's dtype.

    A weight of another number of elements is in a form of the engine's own, and is not compared.
    """
    theirs = session.weights() if isinstance(session, HoldsWeights) else {}
    ours = {name: tensor for name, tensor in module.state_dict().items() if name in theirs}
    dtype = getattr(torch, session.info.dtype, None) if ours else None
    if dtype is None:
        return
    known = {name: checksum(tensor.to(dtype)) for name, tensor in ours.items()}
    known = {name: own for name, own in known.items() if own[0] == theirs[name][0]}
    other = [name for name, own in known.items() if own != theirs[name]]
    if other:
        count = f"{len(other)} of {len(known)} weights that the engine shows"
        yield f"{INPUTS_DIFFER}: {count} are others, first {other[0]}"


def shown(ids: Any) -> str:
    """Return the first ids, and how many there are."""
    listed = ", ".join(map(str, list(ids)[:6]))
    return f"[{listed}{', …' if len(ids) > 6 else ''}] ({len(ids)} tokens)"
