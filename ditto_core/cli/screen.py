"""Progress and notices on stderr, so that stdout holds the result alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from ditto_core.visible import visible

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace


def workspace(cache_dir: Path | str | None = None, artifacts: Path | None = None) -> Workspace:
    """Return a workspace that shows what it is doing."""
    from ditto_core.cache import Cache
    from ditto_core.engines.workspace import Workspace  # torch: `ditto --help` must not wait for it

    console = Console(stderr=True)

    def progress(message: str) -> AbstractContextManager[object]:
        if not console.is_terminal:
            console.print(visible(f"{message} …"), highlight=False, markup=False)
        return console.status(escape(visible(f"{message} …")))

    def say(message: str) -> None:
        console.print(visible(f"ditto: {message}"), highlight=False, markup=False)

    return Workspace(Cache.at(cache_dir), say, progress, artifacts)


def counter(what: str) -> Callable[[int, int], None]:
    """Return what shows how far a run is: a line that is rewritten on a terminal, else a line each tenth."""
    console = Console(stderr=True)

    def on_sample(done: int, total: int) -> None:
        text = f"{what}: {done} of {total} samples"
        if console.is_terminal:
            console.print(text, end="\n" if done == total else "\r", highlight=False)
        elif done == total or done % max(1, total // 10) == 0:
            console.print(text, highlight=False)

    return on_sample


class Screen:
    """Says things on stderr, where a terminal shows a spinner with the latest line above those before.

    The spinner would take the line of a question away: where a person is asked it stands still.
    """

    def __init__(self, title: str, *, spins: bool = True) -> None:
        self._console = Console(stderr=True)
        self._spins = spins and self._console.is_terminal
        self._status = self._console.status(f"{title} …")

    def __enter__(self) -> Screen:
        if self._spins:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def say(self, message: str) -> None:
        """Print one line."""
        self._console.print(f"ditto: {message}", highlight=False, markup=False, soft_wrap=True)
        self._status.update(message.splitlines()[0])
