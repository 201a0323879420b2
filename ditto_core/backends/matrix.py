"""What each backend was measured to do: the table of the documentation and of ``ditto doctor``.

``benchmarks/backends.py`` runs the conformance checks and writes ``measured.json``; nothing in it is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEASURED_FILE = Path(__file__).with_name("measured.json")
PROMISES: Mapping[str, tuple[str, ...]] = {
    "taps": ("one_tap", "output_as_tap", "every_tap", "tap_order"),
    "decode": ("decoding", "restart"),
    "padding": ("padding",),
    "dynamic shapes": ("batch_sizes",),
}
"""The promises that a column stands for."""
ABILITIES = ("int8", "localize", "repro", "observer", "own file")
"""Columns that are measured by themselves."""
COLUMNS = ("dtypes", *PROMISES, *ABILITIES)


def measured() -> dict[str, dict[str, Any]]:
    """Return what was measured, by backend and variant (``executorch xnnpack``)."""
    variants: dict[str, dict[str, Any]] = json.loads(MEASURED_FILE.read_text())
    return variants


def cells(variant: Mapping[str, Any]) -> dict[str, str]:
    """Return a variant's cell for each of :data:`COLUMNS`; the dtypes are those whose outputs were right."""
    kept = variant["promises"]
    yes = {
        **{name: all(kept.get(each) == "" for each in promises) for name, promises in PROMISES.items()},
        **{name: bool(variant["abilities"].get(name)) for name in ABILITIES},
    }
    return {"dtypes": ", ".join(variant["dtypes"]), **{name: "yes" if yes[name] else "no" for name in COLUMNS[1:]}}


def promises_kept(variant: Mapping[str, Any]) -> str:
    """Return ``30 of 30``."""
    kept = variant["promises"].values()
    return f"{sum(not failure for failure in kept)} of {len(kept)}"


def markdown() -> str:
    """Return the table of the documentation."""
    rows = [["backend", "promises", *COLUMNS], ["---"] * (len(COLUMNS) + 2)]
    for name, variant in sorted(measured().items()):
        rows.append([f"`{name}`", promises_kept(variant), *cells(variant).values()])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary(backend: str) -> str:
    """Return what a backend was measured to do, by variant, in one line; an empty string when it was not measured."""
    found = []
    for name, variant in sorted(measured().items()):
        first, _, kind = name.partition(" ")
        if first == backend:
            own = cells(variant)
            able = [column for column in COLUMNS[1:] if own[column] == "yes"]
            found.append(f"{kind or 'measured'} in {own['dtypes']}: {', '.join(able)}")
    return "; ".join(found)
