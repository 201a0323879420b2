"""Which token an encoder-decoder continues with: the likeliest of those that its generation configuration allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ditto_core.compare.tokens import Flip, flips, pick
from ditto_core.errors import UsageError
from ditto_core.model.forward import DECODED

Allowed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Ids so far, int64 [batch, length], and the next token's logits [batch, vocab] -> logits, -inf where forbidden."""


def allowed_tokens(config: Any, start: int, steps: int) -> Allowed:
    """Return what a generation configuration allows, in the order of transformers' ``generate``.

    That is: n-grams that may not repeat, bad words, forced first and last tokens, suppressed tokens. ``start`` is the
    number of the decoder's first ids, ``steps`` that of the tokens that are generated.
    """
    from transformers import generation as g

    first = config.forced_bos_token_id
    begin = start if start > 1 or first is None else start + 1
    made: list[tuple[Any, Callable[[Any], Any]]] = [
        (config.no_repeat_ngram_size or None, g.NoRepeatNGramLogitsProcessor),
        (config.bad_words_ids, g.NoBadWordsLogitsProcessor),
        (first, g.ForcedBOSTokenLogitsProcessor),
        (config.forced_eos_token_id, lambda ids: g.ForcedEOSTokenLogitsProcessor(start + steps, ids)),
        (config.suppress_tokens, g.SuppressTokensLogitsProcessor),
        (config.begin_suppress_tokens, lambda ids: g.SuppressTokensAtBeginLogitsProcessor(ids, begin)),
    ]
    chosen = [make(value) for value, make in made if value not in (None, [], ())]
    found: Allowed = g.LogitsProcessorList(chosen)
    return found


def first_ids(config: Any, generation: Any, rows: int) -> torch.Tensor:
    """Return the token that a decoder of an encoder-decoder starts with, int64 [rows, 1], as its configurations say."""
    names = "decoder_start_token_id", "bos_token_id"
    known = (getattr(each, name, None) for name in names for each in (generation, config))
    token = next((token for token in known if token is not None), None)
    if token is None:
        raise UsageError(f"the configuration names no decoder_start_token_id: give {DECODED} among the inputs")
    return torch.full((rows, 1), int(token))


def flips_of(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, near_tie_ulp: float) -> tuple[Flip, ...]:
    """Return the rows of logits [batch, vocab] in which the two sides choose another token."""
    found = flips(pick(slice(None), ours, theirs), dtype, near_tie_ulp)
    return tuple(replace(flip, index=(row,)) for row, flip in found)
