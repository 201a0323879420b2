"""Where a site's tensor is in a server's modules: a module, a port, a piece of a joint projection."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """Where a site lives: a module of the server, its output, input or a port, and which piece of how many.

    ``swapped``: the site is all of it, with its two halves in the other order.
    """

    module: str
    port: str = ""
    part: int = 0
    parts: int = 1
    swapped: bool = False

    @property
    def tensor(self) -> str:
        """Name of the engine's output that holds it."""
        return f"{self.module}:{self.port}" if self.port else self.module

    @property
    def value(self) -> str:
        """Text form: ``transformer.layers.3.attention.qkv[0/3]`` is the first of three pieces."""
        if self.swapped:
            return f"{self.tensor}[1,0]"
        return self.tensor if self.parts == 1 else f"{self.tensor}[{self.part}/{self.parts}]"

    def cut(self, tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return this place's share of the last axis of the tensor that holds it; ``sizes`` is the pieces' ratio."""
        if self.swapped:
            return tensor.roll(tensor.shape[-1] // 2, -1)
        if self.parts == 1:
            return tensor
        unit = tensor.shape[-1] // sum(sizes)
        return tensor.narrow(-1, unit * sum(sizes[: self.part]), unit * sizes[self.part])

    @classmethod
    def parse(cls, value: str) -> Place:
        """Inverse of :attr:`value`."""
        found = re.fullmatch(r"(.*?)(?::(\w+))?(?:\[(\d+)/(\d+)\]|(\[1,0\]))?", value)
        assert found is not None
        return cls(found[1], found[2] or "", int(found[3] or 0), int(found[4] or 1), bool(found[5]))
