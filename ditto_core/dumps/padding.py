"""Which positions of a padded batch are real: padded ``[batch, length, …]`` against packed ``[tokens, …]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ditto_core.dumps.base import Dump
from ditto_core.errors import TraceError, UsageError, nearest
from ditto_core.sites import matches

_KEYS = ("mask", "lengths", "side", "last_token")
_SIDES = ("left", "right")


@dataclass(frozen=True)
class Padding:
    """Where the padding is, by one of two: ``mask`` names a tensor [batch, past + length] of ones and zeros in either
    dump; ``lengths`` gives the prompts' lengths, or names a tensor [batch] that holds them, with the padding on
    ``side``. Lengths are about step 0, later steps have one token a row.

    ``last_token`` selects tensors of which a side may hold the last token of each row only (TensorRT-LLM's logits).
    """

    mask: str = ""
    lengths: tuple[int, ...] | str = ()
    side: str = "right"
    last_token: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.mask) == bool(self.lengths):
            raise UsageError("name map: padding needs either mask or lengths")
        if self.side not in _SIDES:
            raise UsageError(
                f"name map: padding side {self.side!r}, expected left or right{nearest(self.side, _SIDES)}"
            )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Padding:
        """Build from the ``padding`` table of a name map. Raises :class:`UsageError` for an unknown key."""
        for key in data:
            if key not in _KEYS:
                raise UsageError(f"name map: unknown key {key!r} in padding{nearest(key, _KEYS)}")
        lengths = data.get("lengths", ())
        return cls(
            mask=str(data.get("mask", "")),
            lengths=lengths if isinstance(lengths, str) else whole_numbers(lengths, "padding's lengths"),
            side=str(data.get("side", "right")),
            last_token=selectors(data.get("last_token", [])),
        )

    def real(self, dumps: tuple[Dump, ...], step: int) -> torch.Tensor:
        """Return the new positions of a step that are real: bool [batch, length].

        Raises :class:`TraceError` when no dump has the tensor that is named, two have different ones, or a mask has
        other dimensions.
        """
        if self.mask:
            total = find_mask(dumps, step, self.mask)
            past = find_mask(dumps, step - 1, self.mask).shape[1] if step else 0
            return total[:, past:]
        lengths = self.lengths
        if isinstance(lengths, str):
            lengths = tuple(int(n) for n in find(dumps, 0, lengths).reshape(-1))
        if step:
            return torch.ones(len(lengths), 1, dtype=torch.bool)
        positions = torch.arange(max(lengths))
        ends = torch.tensor(lengths)[:, None]
        return positions < ends if self.side == "right" else positions >= max(lengths) - ends

    def selects_last_token(self, name: str) -> bool:
        """Tell whether one side holds the last token of each row only."""
        return any(matches(selector, name) for selector in self.last_token)


def selectors(values: Any) -> tuple[str, ...]:
    """Return the selectors of ``last_token``. Raises :class:`UsageError`."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UsageError(f"name map: padding's last_token is {values!r}, expected a list of names")
    return tuple(values)


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """Return a list of a file as whole numbers. Raises :class:`UsageError`."""
    if not isinstance(values, list | tuple) or not all(type(n) is int and n >= 0 for n in values):
        raise UsageError(f"name map: {what} is {values!r}, expected a list of whole numbers")
    return tuple(values)


def find(dumps: tuple[Dump, ...], step: int, name: str) -> torch.Tensor:
    """Return a tensor from the first dump that has it.

    Raises :class:`TraceError` where none has it, or both have it with other numbers: what one hides the other shows.
    """
    held = [dump.load(step, name) for dump in dumps if name in dump.names(step)]
    if not held:
        known = [n for dump in dumps for n in dump.names(step)]
        raise TraceError(f"name map: neither dump has the tensor {name!r} in step {step}{nearest(name, known)}")
    if any(held[0].shape == other.shape and bool((held[0] != other).any()) for other in held[1:]):
        raise TraceError(f"name map: {name!r} tells of other padding in the one dump than in the other, step {step}")
    return held[0]


def find_mask(dumps: tuple[Dump, ...], step: int, name: str) -> torch.Tensor:
    """Return a mask [batch, past + length] as bool."""
    mask = find(dumps, step, name)
    if mask.dim() != 2:
        raise TraceError(f"name map: the mask {name!r} has shape {list(mask.shape)}, expected [batch, length]")
    return mask.bool()


def described(real: torch.Tensor) -> str:
    """Say what a padding is of, for a message about shapes that it does not bring together."""
    rows, length = real.shape
    return f": the name map's padding is of {int(real.sum())} tokens in {rows} rows of {length}"


def packed(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor | None:
    """Return the real tokens of a tensor as [tokens, …], rows one after the other.

    ``tensor`` may be padded, [batch, length, …], or packed already, [tokens, …] or [1, tokens, …]; for any other
    shape the result is None.
    """
    tokens = int(real.sum())
    if tensor.shape[:2] == real.shape:
        return tensor[real]
    if tensor.shape[:2] == (1, tokens):
        return tensor[0]
    return tensor if tensor.shape[:1] == (tokens,) else None


def last_tokens(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor | None:
    """Return the last real token of each row as [batch, …]; a tensor that holds only these stays as it is.

    None for any other shape.
    """
    batch = real.shape[0]
    flat = packed(tensor, real)
    if flat is not None:
        return flat[real.sum(1).cumsum(0) - 1]
    if tensor.shape[:2] == (batch, 1):
        return tensor[:, 0]
    return tensor if tensor.shape[:1] == (batch,) else None
