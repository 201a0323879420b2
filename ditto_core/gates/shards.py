"""A share of a suite: every n-th sample."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ditto_core.errors import UsageError
from ditto_core.gates.suite import Sample


@dataclass(frozen=True)
class Shard:
    """Part ``number`` (from 1) of ``count``."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            last = max(self.count, 1)
            raise UsageError(f"shard {self.number}/{self.count} does not exist, expected 1/{last} to {last}/{last}")

    def __str__(self) -> str:
        return "" if self.count == 1 else f"{self.number}/{self.count}"

    def of(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return the samples of this shard: neighbours, which are alike, go to different ones."""
        return tuple(samples[self.number - 1 :: self.count])

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``2/4``. Raises :class:`UsageError`."""
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None:
            raise UsageError(f"--shard got {text!r}, expected NUMBER/COUNT such as 1/4")
        return cls(int(match[1]), int(match[2]))


WHOLE = Shard(1, 1)
