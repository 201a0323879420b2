"""Show names from dumps, models and prompts without characters that a terminal or CI log obeys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

COMMAND = re.compile(r"^(\s*):(?=:)|##(?=\[)")
"""What begins a command in the logs of GitHub and Azure: ``::`` at the start of a line, ``##[`` anywhere."""


def visible(value: T) -> T:
    """Return a value whose texts, however deep in dataclasses, tuples, lists and mappings, are safe to show.

    What Python does not call printable (control characters, newlines, marks of direction, lone surrogates, spaces other
    than the common one) becomes its escape as in a literal: ``\\x1b``, ``\\n``, ``\\u202e``. What would begin a CI
    system's command has its first colon or second hash escaped too. Safe texts and values without texts are returned
    as they are; doing it twice changes nothing.
    """
    return _visible(value)  # type: ignore[no-any-return]


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        flat = [part for item in value.items() for part in item]
        safe = [_visible(part) for part in flat]
        return value if _same(flat, safe) else dict(zip(safe[::2], safe[1::2], strict=True))
    if type(value) in (tuple, list):
        safe = [_visible(part) for part in value]
        return value if _same(value, safe) else type(value)(safe)
    if is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value) if item.init]
        held = [getattr(value, name) for name in names]
        safe = [_visible(part) for part in held]
        return value if _same(held, safe) else replace(value, **dict(zip(names, safe, strict=True)))
    return value


def _same(before: Iterable[Any], after: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(before, after, strict=True))


def text(value: str) -> str:
    """Return one text as it may be shown."""
    if not value.isprintable():
        value = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return COMMAND.sub(_escaped, value) if COMMAND.search(value) else value


def source_path(value: str) -> str:
    """Return how a source file is named: from the working directory, so that the name opens there.

    Of one that lies elsewhere, or in an installed package, the last three parts: its own package, and no one's home.
    """
    path, here = Path(value), Path.cwd()
    if path.is_relative_to(here) and not {"site-packages", "dist-packages"} & {*path.parts}:
        return path.relative_to(here).as_posix()
    return "/".join(path.parts[-3:])


def lines(value: str) -> str:
    """Return a text of several lines as it may be shown: its line breaks and tabs stay."""
    return "\n".join("\t".join(map(text, line.split("\t"))) for line in value.split("\n"))


def _escaped(found: re.Match[str]) -> str:
    return r"#\x23" if found[0] == "##" else rf"{found[1]}\x3a"
