"""How sure a cause is: how often what its family named was right, of faults that were put into real engines."""

from __future__ import annotations

from collections.abc import Mapping

SEVERAL = "several"
"""The family of causes that leave more than one explanation."""

MEASURED: Mapping[str, tuple[int, int]] = {
    "guards": (24, 24),
    "cache": (16, 16),
    "runs": (5, 5),
    "mutants.settings": (4, 4),
    "mutants.operations": (88, 87),
    "mutants.constants": (16, 15),
    "mutants.ids": (18, 18),
    "mutants.masks": (16, 16),
    "mutants.tensors": (25, 25),
    "mutants.ranks": (1, 1),
    "mutants.formats": (43, 42),
    "mutants.layouts": (59, 56),
    "mutants.ranges": (16, 16),
    "mutants.fits": (58, 53),
    SEVERAL: (1, 1),
}
"""By family how many faults it named, and of how many rightly: the table in ``benchmarks/localize.md``."""


def confidence(family: str) -> float:
    """Return the share that is right, by Laplace's rule (right + 1) / (named + 2): few faults say little."""
    named, right = MEASURED.get(family, (0, 0))
    return (right + 1) / (named + 2)
