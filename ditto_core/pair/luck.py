"""What six samples of the noise floor say: an error beyond them is not there by chance."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.session import SessionInfo


def has_no_luck(engine: SessionInfo) -> bool:
    """Tell whether what exceeds a floor of six samples is no rounding: in float32 on a CPU, with no kernel that a probe
    found coarse. Of healthy engines there so far nothing did (benchmarks/tolerance.md)."""
    return engine.judged_as == "float32" and engine.device == "cpu" and not engine.kernels


def without_luck(comparison: Comparison) -> Comparison:
    """Return a comparison that was judged by six samples as they allow: then nothing recovers."""
    if not has_no_luck(comparison.engine):
        return comparison
    return comparison.judged(replace(comparison.tolerance, recovers=False))
