"""Reports of a whole run: comparisons are gathered in a folder, by xdist's workers too, and written at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ditto_core.errors import DittoError
from pytest_ditto.pytest_options import OPTIONS

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

SPOOL = pytest.StashKey[Path]()
"""Folder with the comparisons of this run, where anything is going to be written of them."""

WORKER_KEY = "ditto_engine_spool"


def prepare(config: pytest.Config) -> None:
    """Make the folder when a report is wanted; a worker gets its controller's."""
    if hasattr(config, "workerinput"):
        if WORKER_KEY in config.workerinput:
            config.stash[SPOOL] = Path(config.workerinput[WORKER_KEY])
    elif config.stash[OPTIONS].reports or config.stash[OPTIONS].calibrate or os.environ.get("GITHUB_STEP_SUMMARY"):
        config.stash[SPOOL] = Path(tempfile.mkdtemp(prefix="ditto-engine-"))


def tell_worker(node: Any) -> None:
    """Hand the folder to a worker of xdist."""
    if SPOOL in node.config.stash:
        node.workerinput[WORKER_KEY] = str(node.config.stash[SPOOL])


def discard(config: pytest.Config) -> None:
    """Remove the folder, in the process that made it."""
    if SPOOL in config.stash and not hasattr(config, "workerinput"):
        shutil.rmtree(config.stash[SPOOL], ignore_errors=True)


def spool(config: pytest.Config, runs: Iterable[Comparison]) -> list[str]:
    """Write a test's comparisons to the folder and return the files. A dump that is gone is not mentioned."""
    if SPOOL not in config.stash:
        return []
    files = []
    for run in runs:
        path = config.stash[SPOOL] / f"{uuid.uuid4().hex}.json"
        (run if run.dump and Path(run.dump).is_dir() else replace(run, dump="")).save(path)
        files.append(str(path))
    return files


def named(nodeid: str, files: Sequence[str]) -> list[tuple[str, str]]:
    """Pair a test's files with names: its node id, numbered if there are several."""
    return [(f"{nodeid} #{i}" if len(files) > 1 else nodeid, file) for i, file in enumerate(files)]


def publish(
    config: pytest.Config, files: Iterable[tuple[str, str]], failed: Iterable[pytest.TestReport]
) -> Iterator[str]:
    """Write the reports and the job summary; yield a line for each, and GitHub's annotations."""
    if SPOOL in config.stash:
        yield from write_all(config, files)
    if os.environ.get("GITHUB_ACTIONS") and not annotated(config):
        yield from (annotate(config, report) for report in failed)


def write_all(config: pytest.Config, files: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Write every report that is wanted, and yield where it is or why it is not."""
    from ditto_core.report.github import append_summary
    from ditto_core.report.write import write_report

    runs = load(files)
    append_summary(runs)
    rules = config.stash[OPTIONS].calibrate
    if rules is not None:
        yield calibrated(runs.values(), rules)
    wanted = sorted(config.stash[OPTIONS].reports, key=lambda report: report[0] != "history")  # a page shows it
    history = next((path for kind, path in wanted if kind == "history"), None)
    for kind, path in wanted:
        if not runs:
            yield f"ditto-engine: no {kind} report, nothing was compared"
            continue
        try:
            write_report(kind, runs, path, history)
            yield f"ditto-engine: {kind} report: {path}"
        except DittoError as error:
            yield f"ditto-engine: no {kind} report: {error}"


def calibrated(runs: Iterable[Comparison], path: Path) -> str:
    """Write measured bounds, and say how many or why not."""
    from ditto_core.compare.tolerance_files import calibrate

    try:
        return f"ditto-engine: {calibrate(runs, path)} tolerance rules in {path}: review and commit them"
    except DittoError as error:
        return f"ditto-engine: {error}"


def load(files: Iterable[tuple[str, str]]) -> dict[str, Comparison]:
    """Read the gathered comparisons; where nothing was gathered, torch stays unloaded."""
    files = list(files)
    if not files:
        return {}
    from ditto_core.compare.comparison import Comparison

    return {name: Comparison.load(Path(file)) for name, file in files}


def annotated(config: pytest.Config) -> bool:
    """Tell whether another plugin writes annotations."""
    return any("annotat" in name for name, plugin in config.pluginmanager.list_name_plugin() if plugin is not None)


def annotate(config: pytest.Config, report: pytest.TestReport) -> str:
    """Return the annotation of a failed test, at the test's line."""
    from ditto_core.report.github import annotation

    path, line, _ = report.location
    file = os.path.relpath(config.rootpath / path, os.environ.get("GITHUB_WORKSPACE") or config.rootpath)
    return annotation(crash_line(report), file, (line or 0) + 1, report.nodeid)


def crash_line(report: pytest.TestReport) -> str:
    """Return the first line of what a test failed with."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return next(iter(text.splitlines()), report.nodeid).removeprefix("AssertionError: ")
