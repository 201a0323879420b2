"""Sizes and ages as people write them: ``10GB``, ``512MiB``, ``30d``, ``12h``."""

from __future__ import annotations

import re

from ditto_core.errors import UsageError

SIZES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
"""Bytes in each unit of size."""

AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
"""Seconds in each unit of age."""

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Return the bytes in ``10GB`` or ``512 MiB``; a bare number is bytes. Raises :class:`UsageError`."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].upper() not in SIZES:
        raise UsageError(f"cannot read the size {text!r}, expected a number and B, KB, MB, GB, TB, KiB, MiB or GiB")
    return round(float(match[1]) * SIZES[match[2].upper()])


def parse_age(text: str) -> float:
    """Return the seconds in ``30d`` or ``12h``. Raises :class:`UsageError`; a unit is required."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in AGES:
        raise UsageError(f"cannot read the time {text!r}, expected a number and s, m, h, d or w, as in 30d")
    return float(match[1]) * AGES[match[2].lower()]


def format_size(size: int) -> str:
    """Return a size in decimal units, three significant digits at least: ``538 MB``."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def format_age(seconds: float) -> str:
    """Return an age in its largest whole unit: ``3 d``, ``40 s``."""
    for unit in ("d", "h", "m"):
        if seconds >= AGES[unit]:
            return f"{seconds / AGES[unit]:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
