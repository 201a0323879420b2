"""What backends that run a user's file share: they check the options of its spec first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ditto_core.errors import UsageError, nearest
from ditto_core.model.checkpoint import near_path
from ditto_core.spec import EngineSpec


def check_options(spec: EngineSpec, known: Sequence[str], what: str, example: str) -> None:
    """Raise :class:`UsageError` for an option that is none of ``known``, and where no file is given.

    ``what`` is what the file is called, ``example`` the name of one.
    """
    for name, _ in spec.options:
        if name not in known:
            raise UsageError(f"{what} has no option {name!r}{nearest(name, known)} (known: {', '.join(known)})")
    spec.threads()
    if not spec.option("file"):
        raise UsageError(f"backend {spec.backend!r} runs a file that is there already: give engine={example!r}")


def not_there(path: Path, expected: str) -> UsageError:
    """Return the error of a file that is not there. It says where a relative path begins, and the nearest name."""
    start = "" if path.is_absolute() else f" in {Path.cwd()}"
    return UsageError(f"engine file {str(path)!r} does not exist{start}, expected {expected}{near_path(path)}")
