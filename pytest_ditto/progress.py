"""A status line on the terminal while something long runs, out of the way of pytest's own output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

Progress = Callable[[str], AbstractContextManager[Any]]


def progress_of(config: pytest.Config) -> Progress:
    """Return what shows progress in this run: a status line on an interactive terminal, else nothing."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if not interactive(config):
        return lambda message: nullcontext()
    unlocked = capture.global_and_fixture_disabled if capture else nullcontext

    @contextmanager
    def show(message: str) -> Iterator[None]:
        from rich.console import Console

        with unlocked():
            reporter.ensure_newline()
            with Console().status(f"ditto-engine: {message}"):
                yield

    return show


def interactive(config: pytest.Config) -> bool:
    """Tell whether pytest writes to a terminal here; the workers of xdist do not."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return (
        not hasattr(config, "workerinput") and bool(getattr(reporter, "isatty", False)) and config.option.verbose > -2
    )
