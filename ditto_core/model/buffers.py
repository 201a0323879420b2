"""Buffers that a forward writes into: every step of an exported graph begins with what they held at first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ditto_core.model.traced import version


class Buffers:
    """What a module's buffers hold: a counter, an average over the steps, a norm's statistics in training."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(part._buffers, dict(part._buffers)) for part in module.modules() if part._buffers]
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
