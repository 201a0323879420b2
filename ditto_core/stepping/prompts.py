"""Prompts -> padded token batches -> the inputs of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch

from ditto_core.errors import UsageError, shown
from ditto_core.model.forward import DECODED, later_inputs, positions_of
from ditto_core.stepping.choosing import Allowed

Prompt = str | Sequence[int]
IDS = 1 << 63
"""How many token ids int64 holds: the bound where the vocabulary is not known."""


@dataclass(frozen=True)
class TokenBatch:
    """Padded prompts: ``input_ids`` and ``mask``, int64 [batch, length]; ``mask`` is 0 on padding."""

    input_ids: torch.Tensor
    mask: torch.Tensor
    texts: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Number of prompts."""
        return self.input_ids.shape[0]

    @property
    def padded(self) -> bool:
        """Tell whether any row has padding."""
        return not bool(self.mask.all())

    def sequencer(self) -> Sequencer:
        """Return what makes the inputs of each step."""
        return Sequencer(self)


@dataclass(frozen=True)
class SourceBatch:
    """What a staged model generates from: ``encoded``, an encoder's inputs by name or all that goes with a decoder's
    first ids, and these, ``start``, int64 [batch, length], the input ``name``. ``allowed``: which of the next tokens
    may be chosen; None: all."""

    encoded: Mapping[str, torch.Tensor]
    start: torch.Tensor
    texts: tuple[str, ...] = ()
    allowed: Allowed | None = None
    name: str = DECODED

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.start.shape[0]

    def sequencer(self) -> SourceSequencer:
        """Return what makes the inputs of each step."""
        return SourceSequencer(self)


def encode(
    prompts: Prompt | Sequence[Prompt], *, tokenizer: Any = None, vocab_size: int = 0, pad: int = 0, left: bool = True
) -> TokenBatch:
    """Turn one prompt or several (text, or token ids) into a batch, padded on the ``left`` or the right. Ids may be
    tensors or arrays.

    Raises :class:`UsageError` for what is no prompt, an empty one, text without a tokenizer, or an id outside the
    vocabulary.
    """
    rows = plain_rows(prompts)
    if not rows:
        raise UsageError("no prompt given, expected at least one")
    ids = [encode_one(row, tokenizer, i, len(rows)) for i, row in enumerate(rows)]
    for row in ids:
        bad = [t for t in row if not 0 <= t < (vocab_size or IDS)]
        if bad:
            size = f" of {vocab_size}" if vocab_size else ""
            raise UsageError(f"token id {shown(bad[0])} is outside the vocabulary{size}")
    longest = max(map(len, ids))

    def padded(row: list[int], fill: int) -> list[int]:
        more = [fill] * (longest - len(row))
        return more + row if left else row + more

    tokens = torch.tensor([padded(row, pad) for row in ids], dtype=torch.int64)
    mask = torch.tensor([padded([1] * len(row), 0) for row in ids], dtype=torch.int64)
    return TokenBatch(tokens, mask, tuple(row if isinstance(row, str) else "" for row in rows))


def plain_rows(prompts: Any) -> list[str | list[int]]:
    """Return the prompts as texts and lists of ids. Raises :class:`UsageError` for what is neither."""
    try:
        given = [as_numbers(row) for row in ([prompts] if isinstance(prompts, str) else prompts)]
        rows = [given] if is_single(given) else given
        return [row if isinstance(row, str) else [index(token) for token in row] for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"prompts are {shown(prompts)}, expected a text, token ids, or several of either") from error


def is_single(prompts: Any) -> bool:
    """Tell whether ``prompts`` is one prompt: a text, or a sequence of ids."""
    return isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(p, int) for p in prompts))


def as_numbers(row: Any) -> Any:
    """Return a tensor, an array or a number of numpy as plain numbers, anything else as it is."""
    return row.tolist() if hasattr(row, "tolist") else row


def encode_one(prompt: str | list[int], tokenizer: Any, place: int, count: int) -> list[int]:
    """Return one prompt's token ids."""
    where = f"prompt {place}" if count > 1 else "the prompt"
    if isinstance(prompt, str) and prompt and tokenizer is None:
        raise UsageError(f"{where} is text but the model has no tokenizer that loads here: give token ids")
    ids = list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) and prompt else list(map(int, prompt))
    if not ids:
        raise UsageError(f"{where} is empty, expected at least one token")
    return ids


class Sequencer:
    """Keeps the mask and positions of a growing batch and makes each step's inputs from its new tokens."""

    def __init__(self, batch: TokenBatch) -> None:
        self._mask = batch.mask
        self._next = batch.input_ids
        self.past = 0

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` [batch, length], ``attention_mask`` [batch, past + length], ``position_ids``, int64.

        Positions count real tokens only, as Hugging Face's ``generate`` does for left padding.
        """
        length = self._next.shape[1]
        positions = positions_of(self._mask)[:, -length:]
        return {"input_ids": self._next, "attention_mask": self._mask, "position_ids": positions}

    def advance(self, tokens: torch.Tensor) -> None:
        """Append the next token of each row, int64 [batch]."""
        self.past += self._next.shape[1]
        self._next = tokens.reshape(-1, 1)
        self._mask = torch.cat([self._mask, torch.ones_like(self._next)], 1)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token's logits [batch, vocab] of [batch, length, vocab]."""
        return logits[:, -1]


class SourceSequencer:
    """Makes the inputs of a staged model's steps: an encoder's or images in the first, the new tokens in each."""

    def __init__(self, batch: SourceBatch) -> None:
        self._given = {**batch.encoded, batch.name: batch.start}
        self._ids, self._allowed = batch.start, batch.allowed

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return a step's inputs. An encoder's ``attention_mask`` [batch, source] is one of every step."""
        return self._given

    def advance(self, tokens: torch.Tensor) -> None:
        """Go on with the next token of each row, int64 [batch]."""
        self._given = later_inputs(self._given, tokens.reshape(-1, 1))
        self._ids = torch.cat([self._ids, tokens.reshape(-1, 1)], 1)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token's logits [batch, vocab] of [batch, length, vocab], -inf where it may not be chosen."""
        last = logits[:, -1].float().cpu()
        return last if self._allowed is None else self._allowed(self._ids, last)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely next token of each row, int64 [batch], from logits [batch, length, vocab]."""
    return likeliest(logits[:, -1])


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """Return the most likely next token of each row, int64 [batch], from its logits [batch, vocab]."""
    return scores.float().argmax(-1).to("cpu", torch.int64)


def valid_elements(axes: Sequence[str], mask: torch.Tensor, length: int) -> torch.Tensor | None:
    """Return a mask, broadcastable to a tap with these ``axes``, that leaves padding out; None when nothing is padded.

    ``mask`` is the step's attention mask [batch, total]; the new tokens are its last ``length`` columns. Along an axis
    ``tokens`` are the new tokens of the first sequence, then of the next; ``2*tokens``: two of each.
    """
    if bool(mask.all()):
        return None
    if (flat := next((axis for axis in axes if axis.endswith("tokens")), "")) and "batch" not in axes:
        count = int(flat.partition("*")[0]) if "*" in flat else 1
        rows = mask[:, -length:].bool().flatten().repeat_interleave(count)
        return rows.reshape([-1 if axis == flat else 1 for axis in axes])
    if "batch" not in axes:
        return None
    valid: torch.Tensor | None = None
    # Of attention weights, a real query's row counts whole: what it gives to padding is an error.
    keys = "total" if "length" not in axes else ""
    for axis, columns in (("length", mask[:, -length:]), (keys, mask)):
        if axis and axis in axes:
            shape = [1] * len(axes)
            shape[axes.index("batch")], shape[axes.index(axis)] = columns.shape
            part = columns.bool().reshape(shape)
            valid = part if valid is None else valid & part
    return valid
