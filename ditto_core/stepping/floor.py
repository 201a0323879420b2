"""The noise floor of a reference run: kept, so that the reference in the engine's dtype runs once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ditto_core.system.atomic import write_atomic
from ditto_core.system.files import parse_json, read_text
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from ditto_core.compare.result import SiteResult


class Noise(NamedTuple):
    """The reference's own error in the engine's dtype at one site and step.

    ``rel_l2`` of the tensor (of integers the share that differs); ``max_abs``: the largest |d| of an element; ``rows``:
    rel-L2 of each row [batch, position], empty for a tensor without rows.
    """

    rel_l2: float
    max_abs: float = 0.0
    rows: tuple[float, ...] = ()

    @classmethod
    def of_samples(cls, samples: Sequence[Noise]) -> Noise:
        """Return the noise that several samples show, of the tensor, an element, and each row; NaN where one is.

        The first sample is of the reference as it is, the others of other roundings (see :func:`of_roundings`).
        """
        if any(math.isnan(each.rel_l2) for each in samples):
            return cls(math.nan)
        rows = tuple(map(of_roundings, zip(*(each.rows for each in samples), strict=True)))
        rel_l2 = of_roundings([each.rel_l2 for each in samples])
        return cls(rel_l2, of_roundings([each.max_abs for each in samples]), rows)


def of_roundings(errors: Sequence[float]) -> float:
    """Return the noise that the errors of several roundings show: the largest less half of the smallest.

    The factor on a floor allows for luck: half of it is enough for kernels that are unlike. Where a single number
    decides a norm, some rounding has nearly no error, and the largest is the noise. Where many numbers do, all lose the
    same: there is no luck, and half of it is the noise. Never less than the first, which is the reference's own.
    """
    own, *others = errors
    if not others or math.inf in others:
        return max(errors)
    return max(own, max(others) - min(others) / 2)


MAKING = 2
"""Of how a noise floor is made of its samples; part of the key of one that is kept."""

Floor = dict[str, dict[int, Noise]]
"""Noise floor of a run, by site and step."""

BESIDE_TRACES = "floor.json"
"""File in a run's folder, beside the traces of its two sides."""


def lacks(floor: Floor, results: Iterable[SiteResult]) -> bool:
    """Tell whether there are results that a noise floor lacks, of a step or of a site that it knows."""
    steps = {step for known in floor.values() for step in known}
    bare = (r for r in results if r.floor is None and r.metrics.count)
    return any(r.step not in steps or r.site in floor for r in bare)


def read_floor(path: Path, say: Callable[[str], None]) -> Floor | None:
    """Read a noise floor; None when there is none. One that is not what was written is said, and is none."""
    try:
        data = parse_json(read_text(path))
        if data["sha256"] == fingerprint(data["floor"]):
            return {
                site: {int(step): read_noise(v) for step, v in steps.items()} for site, steps in data["floor"].items()
            }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    say(f"the noise floor in {path.parent.name}/{path.name[:12]} is damaged and not used")
    return None


def read_noise(data: list[Any]) -> Noise:
    """Read the floor of one site and step."""
    rel_l2, max_abs, rows = data
    return Noise(rel_l2, max_abs, tuple(rows))


def write_floor(path: Path, floor: Floor) -> None:
    """Write a noise floor with its digest, so that other processes never see a part of it."""
    data = {site: {str(step): value for step, value in steps.items()} for site, steps in floor.items()}
    write_atomic(path, json.dumps({"sha256": fingerprint(data), "floor": data}))
