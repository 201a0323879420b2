"""The row of a tensor that exceeds its noise floor most, and by how much it may. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ditto_core.compare._record import decode, encode

GROWTH = 0.25
"""The factor of the worst of n rows is that of a tensor times 1 + GROWTH log10(n): the largest of n samples with an
exponential tail grows with log n. benchmarks/tolerance.md has the measurement."""


@dataclass(frozen=True)
class RowError:
    """The row of a tensor that is furthest beyond its own noise floor.

    ``index``: the row's place along batch and position, as far as the tensor has these axes. ``error`` and ``floor``:
    rel-L2 of the engine's row and of the low-precision reference's, None where no floor was measured. ``rows``: how
    many there are; ``width``: elements in each.
    """

    index: tuple[int, ...]
    error: float
    floor: float | None
    rows: int
    width: int

    def __str__(self) -> str:
        return f"row {list(self.index)}, the worst of {self.rows}"

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON; infinite numbers are texts."""
        return {name: encode(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RowError:
        """Inverse of :meth:`to_json`."""
        return cls(**{name: decode(value) for name, value in data.items()})


def row_factor(factor: float, rows: int) -> float:
    """Return the factor for the worst of ``rows`` rows, where a whole tensor may have ``factor`` times its floor."""
    return factor * (1 + GROWTH * math.log10(rows))
