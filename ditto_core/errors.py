"""The errors that users see. Each message is one line: what is wrong, what was expected, the nearest valid choice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from ditto_core.visible import lines

LONGEST = 120
"""Characters of a value that a message shows."""


class DittoError(Exception):
    """Base of every error that this library raises on purpose. Its text is safe to show, whatever names it holds.

    It is one line, whatever values it shows, unless it carries a child's log (``with_log``).
    """

    with_log = False

    def __str__(self) -> str:
        text = lines(super().__str__())
        return text if self.with_log else re.sub(r"\s*\n\s*", " ", text)


class UsageError(DittoError):
    """The caller asked for something that cannot be: a wrong name, an empty prompt, a step beyond the profile."""


class ModelError(UsageError):
    """The model source is not there, or is not a model."""


class SelectorError(UsageError):
    """A selector matches no site."""


class BackendError(DittoError):
    """A backend is unknown, not installed, lacks a dtype, or cannot run on this machine."""


class BuildError(DittoError):
    """The engine could not be built."""

    with_log = True


class RunError(DittoError):
    """A built engine failed while it was loaded or stepped."""

    with_log = True


class CacheError(DittoError):
    """The cache cannot be read or written."""


class TraceError(DittoError):
    """A recorded trace, or another tool's dump, cannot be read or does not fit."""


def check_type(value: Any, kind: type | tuple[type, ...], what: str, expected: str) -> None:
    """Raise :class:`UsageError` for a value of another type; ``what`` and ``expected`` are words for its message."""
    if not isinstance(value, kind):
        raise UsageError(f"{what} is {shown(value)}, expected {expected}")


def shown(value: object) -> str:
    """Return a value as a message shows it: short, also where its ``repr`` is long or fails."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a value from outside
        text = f"a {type(value).__name__} without repr ({type(error).__name__})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({type(value).__name__})"


def nearest(name: object, choices: Iterable[str], count: int = 1) -> str:
    """Return ``"; did you mean 'x'?"``, or an empty string for no close choice or a ``name`` that is not a string."""
    close = difflib.get_close_matches(name if isinstance(name, str) else "", list(choices), n=count, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its class when it has none."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return f"no key {text}" if isinstance(error, KeyError) else text
