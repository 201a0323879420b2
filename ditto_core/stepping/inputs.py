"""Inputs before tensors: what a server makes of a prompt and a conversation, which settings it took, which positions
and weights it has, against the reference's.

A prompt without its BOS or another RoPE base shows in every layer: it is said before any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ditto_core.compare.text import INPUTS_DIFFER
from ditto_core.model.checkpoint import chat_ids
from ditto_core.session import HoldsWeights, ReadsInputs, Session, TellsPositions
from ditto_core.stepping.prompts import SourceBatch, TokenBatch
from ditto_core.system.fingerprint import checksum

CONVERSATION = ({"role": "user", "content": "Hi"},)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""What a server takes from the model's generation configuration for requests that do not say it."""


def input_differences(
    session: Session, batch: TokenBatch | SourceBatch, module: Any, tokenizer: Any, dtype: str
) -> Iterator[str]:
    """Yield a line for each text that the server reads as other ids, and each setting that is not the reference's.

    ``module`` and ``tokenizer`` are the reference's, ``dtype`` is what was asked for. Sessions of other engines than
    servers have none of these.
    """
    if not isinstance(session, ReadsInputs) or not isinstance(batch, TokenBatch):
        return
    for row, text in enumerate(batch.texts):
        ids = batch.input_ids[row][batch.mask[row].bool()].tolist()
        yield from ids_differ(repr(text[:40]), session.tokens(text) if text else None, ids)
    chat = chat_ids(tokenizer, CONVERSATION) or []
    yield from ids_differ("'Hi' of a user in the chat template", session.chat(CONVERSATION) if chat else None, chat)
    yield from settings_differ({"dtype": session.info.dtype}, {"dtype": dtype})
    taken = session.settings()
    config = getattr(module, "config", None)
    yield from settings_differ(taken, {name: getattr(config, name, value) for name, value in taken.items()})
    defaults = session.generation()
    if defaults is not None:
        own: dict[str, object] = getattr(getattr(module, "generation_config", None), "to_diff_dict", dict)()
        ours, theirs = ({f"default {name}": side.get(name) for name in SAMPLING} for side in (own, defaults))
        yield from settings_differ(theirs, ours)


def ids_differ(what: str, theirs: Any, ours: list[int]) -> Iterator[str]:
    """Yield a line where a server, which may not tell, makes other ids of a text than the reference."""
    if theirs is not None and list(theirs) != ours:
        yield f"{INPUTS_DIFFER}: {what} is {shown(theirs)} for the engine, {shown(ours)} for the reference"


def settings_differ(theirs: Mapping[str, object], ours: Mapping[str, object]) -> Iterator[str]:
    """Yield a line for each setting that is another in the engine."""
    for name, value in theirs.items():
        if value != ours[name]:
            yield f"{INPUTS_DIFFER}: {name} is {value!r} in the engine, {ours[name]!r} in the reference"


def position_differences(session: Session) -> Iterator[str]:
    """Yield a line where the last sequence's tokens had other positions in the engine than in the reference."""
    if isinstance(session, TellsPositions) and session.other_positions:
        yield f"{INPUTS_DIFFER}: {session.other_positions}"


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
