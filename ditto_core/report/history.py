"""What each commit's run found, one JSON line a test and commit: the error at the outputs and the first bad site.

The file lies in the repository (beside a gate's baseline, for instance) or is carried from CI run to CI run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.compare._record import decode, encode
from ditto_core.compare.table import BARS
from ditto_core.errors import UsageError
from ditto_core.report.markdown import code, row
from ditto_core.system.files import parse_json, text_lines
from ditto_core.visible import visible

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

SHOWN = 40
"""The latest commits that a table, a line and a picture show."""

WIDTH, HEIGHT, EDGE = 320, 56, 6
HEAD = ("commit", "error at the outputs", "error / bound", "first bad site")

TEXTS, NUMBERS = ("test", "commit", "sides", "first_bad"), ("created", "error", "margin")
KINDS: Mapping[str, Any] = {**dict.fromkeys(TEXTS, str), **dict.fromkeys(NUMBERS, int | float), "ok": bool}
"""What the fields of a line have to be."""


@dataclass(frozen=True)
class Entry:
    """One test at one commit. ``created``: seconds since 1970; ``commit`` is empty where it was not known.

    ``error`` and ``margin`` are the largest rel-L2 and error / bound of the model's outputs (of all sites where no
    output was compared); ``first_bad`` is ``SITE, step N``, or empty.
    """

    test: str
    commit: str
    created: float
    sides: str
    ok: bool
    error: float
    margin: float
    first_bad: str

    @property
    def key(self) -> tuple[str, ...]:
        """What a later run takes the place of: the same test of the same sides at the same commit."""
        return (self.test, self.sides, self.commit or str(self.created))

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        return {name: encode(value) for name, value in asdict(self).items()}

    @classmethod
    def of(cls, test: str, run: Comparison) -> Entry:
        """Take what is kept of a comparison."""
        run = run.shown
        judged = [r for r in run.results if r.final] or list(run.results)
        bad, receipt = run.first_bad, run.receipt
        return cls(
            test=visible(test),
            commit=receipt.commit if receipt else "",
            created=receipt.created if receipt else 0.0,
            sides=f"{run.engine.label} against {run.reference.label}",
            ok=bool(run),
            error=max((r.metrics.rel_l2 for r in judged), default=0.0),
            margin=max((r.verdict.margin for r in judged), default=0.0),
            first_bad=f"{bad.site}, step {bad.step}" if bad else "",
        )


def update(path: Path, runs: Mapping[str, Comparison]) -> list[Entry]:
    """Add a run's comparisons to the file and return all that it holds, the oldest first.

    A test that ran before at the same commit has one line, the new one. Raises :class:`UsageError` for a file that is
    no history, ``OSError`` when it cannot be written.
    """
    from ditto_core.system.atomic import write_atomic

    entries = {entry.key: entry for entry in read(path)} if path.exists() else {}
    entries |= {entry.key: entry for entry in (Entry.of(name, run) for name, run in runs.items())}
    found = sorted(entries.values(), key=lambda entry: (entry.created, entry.test))
    write_atomic(path, "".join(json.dumps(entry.to_json(), allow_nan=False) + "\n" for entry in found))
    return found


def read(path: Path) -> list[Entry]:
    """Read what :func:`update` wrote. Raises :class:`UsageError` with the line that is no entry."""
    found = []
    try:
        lines = text_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(entry_of(line, f"{path}, line {number}"))
    return found


def entry_of(line: str, where: str) -> Entry:
    """Read one line."""
    try:
        data = parse_json(line)
        numbers = {name: decode(data[name]) for name in NUMBERS}
        entry = Entry(**{name: data[name] for name in (*TEXTS, "ok")}, **numbers)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{where} is no entry of a history ({type(error).__name__})") from error
    for name, kind in KINDS.items():
        if not isinstance(getattr(entry, name), kind):
            raise UsageError(f"{where} is no entry of a history: {name} is {getattr(entry, name)!r}")
    return entry


def of_test(entries: Iterable[Entry], test: str) -> list[Entry]:
    """Return the latest entries of one test, the oldest first."""
    return [entry for entry in entries if entry.test == test][-SHOWN:]


def markdown(entries: Sequence[Entry]) -> str:
    """Return, for each test, a line of bars and a table, the newest commit first."""
    parts: list[str] = []
    for test in dict.fromkeys(entry.test for entry in entries):
        known = of_test(entries, test)
        title = f"**{code(visible(test))}** " if test else ""
        parts += [f"{title}{bars(known)}", "", row(HEAD), row(("---",) * len(HEAD))]
        parts += [row(cells(entry)) for entry in reversed(known)]
        parts.append("")
    return "\n".join(parts)


def cells(entry: Entry) -> tuple[str, ...]:
    """Return one row: a commit."""
    sign = "✅" if entry.ok else "❌"
    bad = code(visible(entry.first_bad)) if entry.first_bad else ""
    return f"{sign} {code(short(entry.commit))}", f"{entry.error:.2e}", f"{entry.margin:.3g}", bad


def short(commit: str) -> str:
    """Return the beginning of a commit, with the ``+`` that says that files were changed."""
    return visible(f"{commit[:10]}{'+' if commit.endswith('+') else ''}") or "unknown"


def heights(entries: Sequence[Entry]) -> list[float]:
    """Return the errors on a logarithmic scale from 0 to 1; 0 is the bottom, infinity and NaN the top."""
    numbers = [entry.error for entry in entries]
    logs = [math.log10(number) for number in numbers if 0 < number < math.inf]
    low, high = min(logs, default=0.0), max(logs, default=0.0)
    span = max(high - low, 1.0)
    return [
        0.0 if number == 0 else (math.log10(number) - low) / span if number < math.inf else 1.0 for number in numbers
    ]


def bars(entries: Sequence[Entry]) -> str:
    """Return the errors as bars, a decade apart at least."""
    return "".join(BARS[round(height * (len(BARS) - 1))] for height in heights(entries))


def picture(entries: Sequence[Entry]) -> str:
    """Return the errors over the commits as SVG, for a page: a line, and a cross where a test failed."""
    known = heights(entries)
    step = (WIDTH - 2 * EDGE) / max(1, len(known) - 1)
    points = [(EDGE + i * step, HEIGHT - EDGE - height * (HEIGHT - 2 * EDGE)) for i, height in enumerate(known)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = "".join(mark(x, y, entry) for (x, y), entry in zip(points, entries, strict=True))
    label = f"error at the outputs over {len(entries)} commits, logarithmic"
    return (
        f'<svg class="trend" role="img" aria-label="{label}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" fill="none" stroke="currentColor">'
        f'<polyline points="{line}"/>{marks}</svg>'
    )


def mark(x: float, y: float, entry: Entry) -> str:
    """Return the mark of one commit, with what a pointer shows."""
    shape = f"M{x - 2:.1f} {y:.1f}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0"
    if not entry.ok:
        shape = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
    said = f"{short(entry.commit)}: {entry.error:.2e}" + (f", first bad {entry.first_bad}" if entry.first_bad else "")
    return f'<path d="{shape}"><title>{escape(visible(said))}</title></path>'
