"""The results of an unfinished run: one line for each sample, so that a kill costs one sample at most."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ditto_core.engines.workers import Run, Work
from ditto_core.system.files import parse_json

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace

T = TypeVar("T")

OnSample = Callable[[int, int], None]
"""Told how many samples are done, of how many."""


@dataclass(frozen=True)
class Journal(Generic[T]):
    """A file of results by sample, appended to line by line. Its name tells of which run it is.

    ``dump`` makes JSON of a result; ``load`` is its inverse, and raises ``ValueError``, ``KeyError``, ``TypeError`` or
    ``AttributeError`` for what is no result.
    """

    path: Path
    dump: Callable[[T], Any]
    load: Callable[[Any], T]

    def read(self) -> dict[str, T]:
        """Return the results by sample; a line that was cut short counts as not written."""
        if not self.path.exists():
            return {}
        return dict(self._parsed(self.path.read_bytes().splitlines()))

    def append(self, name: str, result: T) -> None:
        """Add a result by one write, on a line of its own even where the last one was cut short."""
        line = json.dumps({"sample": name, "result": self.dump(result)}, separators=(",", ":")).encode() + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            cut_short = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" + line if cut_short else line)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Forget the run."""
        self.path.unlink(missing_ok=True)

    def _parsed(self, lines: Sequence[bytes]) -> Iterator[tuple[str, T]]:
        for line in lines:
            try:
                data = parse_json(line)
                yield str(data["sample"]), self.load(data["result"])
            except (ValueError, KeyError, TypeError, AttributeError):
                continue


def carry_on(
    journal: Journal[T],
    name: str,
    work: Work,
    tasks: Mapping[str, Any],
    workspace: Workspace,
    *,
    run: Run,
    on_sample: OnSample | None = None,
) -> dict[str, T]:
    """Do the tasks that the journal has no result of, and return the results of all, by sample.

    Each result is written to the journal at once. ``name`` is what the user calls the run.
    """
    done = {sample: result for sample, result in journal.read().items() if sample in tasks}
    if done:
        workspace.say(f"{name} goes on: {len(done)} of {len(tasks)} samples are done")
    left = {sample: task for sample, task in tasks.items() if sample not in done}
    for sample, result in run(work, left, workspace):
        journal.append(sample, result)
        done[sample] = result
        if on_sample is not None:
            on_sample(len(done), len(tasks))
    return done
