"""The noise floor of a reference run: kept, so that the reference in the engine's dtype runs once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ditto_core.system.atomic import write_atomic
from ditto_core.system.fingerprint import fingerprint

Floor = dict[str, dict[int, float]]
"""Noise floor: the reference's own rel-L2 error in the engine's dtype, by site and step."""

BESIDE_TRACES = "floor.json"
"""File in a run's folder, beside the traces of its two sides."""


def read_floor(path: Path, say: Callable[[str], None]) -> Floor | None:
    """Read a noise floor; None when there is none. One that is not what was written is said, and is none."""
    try:
        data = json.loads(path.read_text())
        if data["sha256"] == fingerprint(data["floor"]):
            return {site: {int(step): value for step, value in steps.items()} for site, steps in data["floor"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    say(f"the noise floor in {path.parent.name}/{path.name[:12]} is damaged and not used")
    return None


def write_floor(path: Path, floor: Floor) -> None:
    """Write a noise floor with its digest, so that other processes never see a part of it."""
    data = {site: {str(step): value for step, value in steps.items()} for site, steps in floor.items()}
    write_atomic(path, json.dumps({"sha256": fingerprint(data), "floor": data}))
