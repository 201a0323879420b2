"""The records of a run that is not over: one line a sample, so that a kill costs one sample at most."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ditto_core.gates.record import Record


@dataclass(frozen=True)
class Journal:
    """A file of records, appended to line by line. Its name tells of which run it is."""

    path: Path

    def read(self) -> dict[str, Record]:
        """Return the records by sample; a line that was cut short counts as not written."""
        if not self.path.exists():
            return {}
        found = (parse(line) for line in self.path.read_bytes().splitlines())
        return {record.id: record for record in found if record is not None}

    def append(self, record: Record) -> None:
        """Add a record by one write, on a line of its own even where the last one was cut short."""
        line = json.dumps(record.to_json(), separators=(",", ":")).encode() + b"\n"
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


def parse(line: bytes) -> Record | None:
    """Return a line's record, or None."""
    try:
        return Record.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
