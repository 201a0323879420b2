"""How sure a cause is: how often what its family named was right, of faults that were put into real engines."""

from __future__ import annotations

from collections.abc import Mapping

SEVERAL = "several"
"""The family of causes that leave more than one explanation."""

MEASURED: Mapping[str, tuple[int, int]] = {
    "guards": (22, 22),
    "cache": (18, 18),
    "runs": (5, 5),
    "mutants.settings": (4, 4),
    "mutants.operations": (86, 86),
    "mutants.constants": (19, 18),
    "mutants.ids": (18, 18),
    "mutants.masks": (16, 16),
    "mutants.tensors": (24, 24),
    "mutants.ranks": (0, 0),
    "mutants.formats": (43, 42),
    "mutants.layouts": (59, 56),
    "mutants.ranges": (17, 17),
    "mutants.fits": (59, 55),
    SEVERAL: (1, 1),
}
"""By family how many faults it named, and of how many rightly: the table in ``benchmarks/localize.md``."""


def confidence(family: str) -> float:
    """Return the share that is right, by Laplace's rule (right + 1) / (named + 2): few faults say little."""
    named, right = MEASURED.get(family, (0, 0))
    return (right + 1) / (named + 2)
