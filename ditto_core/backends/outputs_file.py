"""The names of an engine's final outputs, which its build writes beside it: the engine itself also shows taps."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ditto_core.errors import BuildError, first_line
from ditto_core.sites import Tap
from ditto_core.system.files import parse_json, read_text

SESSION_FILE = "session.json"


def write_outputs(directory: Path, outputs: Sequence[str]) -> None:
    """Write the names."""
    (directory / SESSION_FILE).write_text(json.dumps({"outputs": outputs}))


def read_outputs(directory: Path, shown: Collection[str], taps: Iterable[Tap]) -> list[str]:
    """Return the names. ``shown``: what the engine shows.

    Raises :class:`BuildError` where the file is damaged, or the engine does not show one of them or a tap's value.
    """
    path = directory / SESSION_FILE
    try:
        names = [str(name) for name in parse_json(read_text(path))["outputs"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BuildError(f"{path} is damaged ({first_line(error)}): build the engine again") from error
    for name in (*names, *(tap.value for tap in taps)):
        if name not in shown:
            raise BuildError(f"the engine in {directory} has no output {name!r}: build it again")
    return names
