"""What GitHub Actions shows: a job summary, and annotations at lines of the source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ditto_core.report.markdown import summary
from ditto_core.visible import lines, visible

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

SUMMARY = "GITHUB_STEP_SUMMARY"
LARGEST = 900_000
"""Bytes of a step's summary that we use; GitHub drops the whole of one above a MiB."""


def append_summary(runs: Mapping[str, Comparison], environ: Mapping[str, str] = os.environ) -> bool:
    """Append a summary to the job's file; tell whether there is one. A file that cannot be written is left."""
    path = environ.get(SUMMARY)
    if not path or not runs:
        return False
    text = summary(runs)
    if len(text.encode()) > LARGEST:
        text = text.encode()[:LARGEST].decode(errors="ignore").rpartition("\n")[0] + "\n\n(cut)\n"
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return False
    return True


def annotation(message: str, file: str, line: int, title: str = "ditto-engine") -> str:
    """Return the workflow command that marks a line of a file; ``line`` counts from 1."""
    message, title = lines(message), visible(title)
    return f"::error file={value(file)},line={line},title={value(title)}::{data(message)}"


def data(text: str) -> str:
    """Escape the text of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def value(text: str) -> str:
    """Escape a property of a workflow command."""
    return data(text).replace(":", "%3A").replace(",", "%2C")
