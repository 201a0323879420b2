"""Verdicts on disk, so that an interrupted or killed search resumes where it stopped."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from ditto_core.debug.check import Verdict
from ditto_core.errors import UsageError
from ditto_core.system.atomic import write_atomic
from ditto_core.system.files import parse_json

FORMAT = "ditto-debug-replay"
DEFAULT_NAME = "ditto_debug_replay.jsonl"


@dataclass
class Journal:
    """One line of JSON a verdict, written through to the disk before the search moves on.

    ``search`` is the fingerprint of what is searched: verdicts of another model, other inputs or another check are
    refused. A last line that was cut off by a crash is dropped.
    """

    path: Path
    search: str
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    resumed: int = 0

    @classmethod
    def open(cls, path: Path, search: str, load: Path | None = None) -> Journal:
        """Open the journal at ``path``, with the verdicts it holds and those of ``load``.

        Raises :class:`UsageError` when either belongs to another search, or when ``load`` is not there.
        """
        journal = cls(path, search)
        if load is not None and not load.is_file():
            raise UsageError(f"--load-debug-replay: {load} is not there")
        for source in (load, path):
            if source is not None and source.is_file():
                journal.verdicts.update(read(source, search))
        journal.resumed = len(journal.verdicts)
        journal._rewrite()
        return journal

    def add(self, key: str, verdict: Verdict) -> None:
        """Append one verdict; it is on the disk when this returns."""
        self.verdicts[key] = verdict
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "verdict": verdict.to_json()}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)

    def _rewrite(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"format": FORMAT, "search": self.search}]
        lines += [{"key": key, "verdict": verdict.to_json()} for key, verdict in self.verdicts.items()]  # type: ignore[dict-item]
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path, search: str) -> dict[str, Verdict]:
    """Return the verdicts of a journal's file. Raises :class:`UsageError` when it is none, or of another search."""
    lines = path.read_text().splitlines()
    try:
        head = parse_json(lines[0])
        known = head["search"] if head["format"] == FORMAT else None
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a replay of `ditto debug`; remove it or choose another file") from error
    if known != search:
        raise UsageError(f"{path} is the replay of another search (other model, inputs, check or options): remove it")
    verdicts = {}
    for i, line in enumerate(lines[1:], 1):
        try:
            data = parse_json(line)
            verdicts[str(data["key"])] = Verdict.from_json(data["verdict"])
        except (ValueError, KeyError, TypeError) as error:
            if i < len(lines) - 1:
                raise UsageError(f"{path} is damaged in line {i + 1}: remove it") from error
    return verdicts
