"""The noise floor of a reference run: kept, so that the reference in the engine's dtype runs once."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from ditto_core.system.atomic import write_atomic

Floor = dict[str, dict[int, float]]
"""Noise floor: the reference's own rel-L2 error in the engine's dtype, by site and step."""

BESIDE_TRACES = "floor.json"
"""File in a run's folder, beside the traces of its two sides."""


def read_floor(path: Path) -> Floor | None:
    """Read a noise floor; None when there is none, or it cannot be read."""
    with suppress(OSError, ValueError, AttributeError):
        data = json.loads(path.read_text())
        return {site: {int(step): float(value) for step, value in steps.items()} for site, steps in data.items()}
    return None


def write_floor(path: Path, floor: Floor) -> None:
    """Write a noise floor so that other processes never see a part of it."""
    write_atomic(path, json.dumps(floor))
