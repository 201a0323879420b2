"""Options that several commands have: which engine to build, what to feed it, and where the cache is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ditto_core.errors import UsageError

Backend = Annotated[str, typer.Option(help="Engine to build for.")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")]
Profile = Annotated[list[str] | None, typer.Option(help="DIM=MIN,OPT,MAX for batch, length or past; repeatable.")]
BuildOption = Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the backend; repeatable.")]
Attention = Annotated[str, typer.Option(help="eager or sdpa.")]
InputText = Annotated[list[str] | None, typer.Option(help="Prompt; repeatable for a batch.")]
InputIds = Annotated[list[str] | None, typer.Option(help="Prompt as token ids: 1,2,3; repeatable.")]
WHOLE = re.compile("[0-9]{1,18}")
"""A whole number that 64 bits hold. ``isdigit`` also takes superscripts, which ``int`` refuses."""
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python files that a checkpoint brings; read them before.")
]
CacheDir = Annotated[str | None, typer.Option(help="Cache directory or fsspec URL (or DITTO_CACHE_DIR).")]


def settings(
    backend: str, dtype: str, profile: Sequence[str] | None, option: Sequence[str] | None, attention: str = "eager"
) -> dict[str, Any]:
    """Return what :meth:`~ditto_core.spec.EngineSpec.of` takes. Raises :class:`UsageError` for what cannot be read."""
    sizes = dict(dimension(text) for text in profile or [])
    options = dict(key_value(text, "--option") for text in option or [])
    return {"backend": backend, "dtype": dtype, "profile": sizes, "options": options, "attention": attention}


def key_value(text: str, option: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE``."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UsageError(f"{option} got {text!r}, expected KEY=VALUE")
    return key, int(value) if WHOLE.fullmatch(value) else value


def dimension(text: str) -> tuple[str, tuple[int, int, int]]:
    """Read ``DIM=MIN,OPT,MAX``."""
    name, _, numbers = text.partition("=")
    parts = numbers.split(",")
    if len(parts) != 3 or not all(WHOLE.fullmatch(p.strip()) for p in parts):
        raise UsageError(f"--profile got {text!r}, expected DIM=MIN,OPT,MAX such as batch=1,1,4")
    low, typical, high = map(int, parts)
    return name, (low, typical, high)


def parse_ids(text: str) -> list[int]:
    """Read ``1,2,3``."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"--input-ids got {text!r}, expected whole numbers such as 1,2,3") from error
