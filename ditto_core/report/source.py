"""Find the comparison that a path holds: its JSON, the dump of a ditto test, or the traces of both sides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ditto_core.compare.comparison import Comparison
from ditto_core.errors import TraceError
from ditto_core.system.files import parse_json, read_text

COMPARISON = "comparison.json"
SIDES = ("engine", "reference")


def open_comparison(path: Path) -> Comparison:
    """Read a comparison from its JSON, or from a folder with ``comparison.json`` or the traces of both sides.

    A dump that lies beside the JSON is taken for the comparison's, wherever it was written. Raises
    :class:`TraceError` when there is no comparison.
    """
    if path.is_dir():
        return from_folder(path)
    comparison = read(path)
    return at(path.parent, comparison) if has_traces(path.parent) else comparison


def comparison_file(path: Path) -> Path:
    """Return the file of a comparison: the one that is named, or the one in a dump's folder."""
    return path / COMPARISON if path.is_dir() else path


def traces_of(path: Path) -> dict[str, Path]:
    """Return where the traces of both sides are, beside or in the path of a comparison."""
    folder = path if path.is_dir() else path.parent
    return {f"{side}'s trace": folder / side for side in SIDES} if has_traces(folder) else {}


def open_comparisons(path: Path, *, named: bool = False) -> dict[str, Comparison]:
    """Read the comparisons of a test run by test, or one, under an empty name (``named``: its test's, if it has one).

    Raises :class:`TraceError`.
    """
    if path.is_file():
        try:
            data = parse_json(read_text(path))
        except (OSError, ValueError):
            data = None  # said by open_comparison
        if is_run(data) and (named or len(data) > 1):
            return {name: parse(path, run) for name, run in data.items()}
    return {"": open_comparison(path)}


def is_run(data: Any) -> bool:
    """Tell whether JSON is that of a test run: comparisons by test."""
    runs = data if isinstance(data, dict) and "schema_version" not in data else {}
    return bool(runs) and all(isinstance(run, dict) and "schema_version" in run for run in runs.values())


def from_folder(path: Path) -> Comparison:
    """Read a dump's comparison, or compare its two traces when the run did not get to its end."""
    if comparison_file(path).is_file():
        found = read(comparison_file(path))
        return at(path, found) if has_traces(path) else found
    if has_traces(path):
        return at(path, compare_traces(path))
    if (path / "manifest.json").is_file():
        raise TraceError(f"{path} is one side only, a report needs two: ditto compare {path} REFERENCE --json FILE")
    raise TraceError(f"{path} holds no comparison: expected {COMPARISON}, or the traces engine/ and reference/")


def has_traces(path: Path) -> bool:
    """Tell whether a folder holds the traces of both sides."""
    return all((path / side / "manifest.json").is_file() for side in SIDES)


def at(folder: Path, comparison: Comparison) -> Comparison:
    """Return a comparison whose dump is here."""
    return replace(comparison, dump=str(folder))


def read(path: Path) -> Comparison:
    """Read JSON. Raises :class:`TraceError` when it is none, or no comparison."""
    try:
        data = parse_json(read_text(path))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise TraceError(f"{path} is not JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not a comparison ({error}), expected what ditto compare --json writes") from error
    return parse(path, data)


def parse(path: Path, data: Any) -> Comparison:
    """Return the comparison in the JSON that ``path`` holds. Raises :class:`TraceError` when it is none."""
    try:
        return Comparison.from_json(only(path, data))
    except TraceError as error:
        raise TraceError(f"{path}: {error}; expected what ditto compare --json writes") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"{type(error).__name__} {error}"
        raise TraceError(
            f"{path} is not a comparison ({problem}), expected what ditto compare --json writes"
        ) from error


def only(path: Path, data: Any) -> Any:
    """Return the comparison in the JSON of a test run, which has them by test; other data passes through.

    Raises :class:`TraceError` when there are several.
    """
    if not is_run(data):
        return data
    if len(data) > 1:
        names = ", ".join(map(repr, data))
        raise TraceError(f"it holds {len(data)} comparisons, expected one of: {names}")
    return next(iter(data.values()))


def compare_traces(path: Path) -> Comparison:
    """Compare two traces of a lockstep run."""
    from ditto_core.compare.dumps import compare_dumps
    from ditto_core.stepping.dumps import compare_offline
    from ditto_core.trace import Trace

    engine, reference = (Trace.open(path / side) for side in SIDES)
    found = compare_offline(compare_dumps(path / "engine", path / "reference"))
    floor = "" if any(r.floor is not None for r in found.results) else ", without a noise floor"
    notes = (*found.notes, f"the run left no comparison: its traces were compared{floor}")
    return replace(found, engine=engine.info, reference=reference.info, taps=engine.taps, notes=notes)
