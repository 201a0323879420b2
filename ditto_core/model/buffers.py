"""Buffers that a forward writes into: every step of an exported graph begins with what they held at first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ditto_core.model.traced import version

PLAIN = (bool, int, float)


class Buffers:
    """What a module's buffers hold: a counter, an average over the steps, a norm's statistics in training.

    The plain numbers beside them belong to them: a dynamic RoPE keeps the length that its frequencies were made for.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [part for part in module.modules() if part._buffers]
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [(p._buffers, dict(p._buffers)) for p in owners]
        self._tables += [(vars(part), numbers_of(part)) for part in owners]
        self._held = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._versions = [version(buffer) for buffer, _ in self._held]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give back what a step wrote into, or replaced."""
        try:
            yield
        finally:
            for table, own in self._tables:
                table.update(own)
            for (buffer, content), seen in zip(self._held, self._versions, strict=True):
                if version(buffer) != seen:
                    buffer.copy_(content)
            self._versions = [version(buffer) for buffer, _ in self._held]


def numbers_of(part: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that are plain numbers, by name."""
    return {name: value for name, value in vars(part).items() if isinstance(value, PLAIN)}
