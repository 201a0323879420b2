"""What a ditto test adds to pytest's reports.

Numbers travel from xdist's workers inside the test reports: ``user_properties`` (they also end up in JUnit XML), and an
attribute ``ditto_engine`` of plain lists, dictionaries and numbers.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ditto_core.errors import CacheError, DittoError, TraceError, UsageError
from pytest_ditto import reports
from pytest_ditto.bench import NOTES
from pytest_ditto.fixtures import ASKED, PAIR, UNAVAILABLE
from pytest_ditto.marker import MARKER, uses_ditto
from pytest_ditto.pytest_options import OPTIONS
from pytest_ditto.readers import ALL

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

BAD_INPUT = (UsageError, CacheError, TraceError)
"""Errors after which the run exits with code 4."""

ATTRIBUTE = "ditto_engine"
BARE, SAME = "assert <Comparison: ", 80
"""How pytest's message of ``assert run`` begins, and how much of it is the run's repr, before pytest shortens it."""


@dataclass
class Call:
    """A test's call, and what the reports of its subtests have told: they come while it runs."""

    running: bool = False
    failed: bool = False
    """Whether a subtest has."""
    shown: list[Comparison] = field(default_factory=list)
    """The comparisons whose tables are in a report."""


CALL = pytest.StashKey[Call]()


def add_properties(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Give a test's numbers to JUnit before pytest makes its report."""
    runs = comparisons(item, call)
    if not runs or call_of(item).running:
        return
    worst = max(runs, key=lambda run: (not run, run.worst.verdict.margin if run.worst else 0.0))
    numbers = numbers_of(worst)
    properties = {k: v for k, v in numbers.items() if k not in ("ok", "dump")} | {"comparisons": len(runs)}
    added = {f"ditto_{name}": value for name, value in properties.items()}
    others = [(name, value) for name, value in item.user_properties if name not in added]  # a rerun's stand there
    item.user_properties[:] = [*others, *added.items()]


def explain_assert(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Give a plain ``assert run`` the message of ``run.assert_close()``: pytest shows the first line of its repr."""
    error = call.excinfo.value if call.excinfo else None
    if type(error) is not AssertionError or not str(error).startswith(BARE):
        return
    from ditto_core.compare.text import failure_message

    failed = [run for run in comparisons(item, call) if not run and str(error).startswith(f"assert {run!r}"[:SAME])]
    if failed:
        error.args = (failure_message(failed[-1]),)


def comparisons(item: pytest.Item, call: pytest.CallInfo[None]) -> list[Comparison]:
    """Return what a test has compared so far: in its call, or until its setup went wrong."""
    counts = call.when == "call" or (call.when == "setup" and call.excinfo is not None)
    return item.stash[PAIR].comparisons if counts and PAIR in item.stash else []


def call_of(item: pytest.Item) -> Call:
    """Return a test's call; where setup went wrong there is none."""
    return item.stash.get(CALL, Call())


@contextmanager
def calling(item: pytest.Item) -> Iterator[None]:
    """Hold a test's call: what is reported in it is a subtest's."""
    item.stash[CALL] = call = Call(running=True)
    try:
        yield
    finally:
        call.running = False


def numbers_of(run: Comparison) -> dict[str, Any]:
    """Return a comparison's numbers, for reports and for the summary."""
    run = run.shown
    worst, bad = run.worst, run.first_bad
    return {
        "engine": run.engine.label,
        "reference": run.reference.label,
        "steps": run.steps,
        "sites": len(run.sites),
        "worst_site": worst.site if worst else "",
        "worst_step": worst.step if worst else 0,
        "worst_margin": worst.verdict.margin if worst else 0.0,
        "worst_recovered": bool(worst and worst.healed),
        "first_bad": f"{bad.site}, step {bad.step}" if bad else "",
        "bad_logits": next((f"{v}, step {step}" for step, v in run.logits_verdicts if not v.ok), ""),
        "unjudged_output": next((f"{r.site}, step {r.step}" for r in run.unjudged_outputs), ""),
        "unjudged_sites": len({r.site for r in run.inconclusive}),
        "ok": bool(run),
        "dump": run.dump,
    }


def complete(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Put tables, numbers, notes and one-line errors into a test's report, and settle its dump."""
    compared, own = comparisons(item, call), call_of(item)
    if compared and (report.failed or item.config.option.verbose > 0):
        add_tables(report, compared, own.shown, everything=item.config.option.verbose > 0)
    runs = [] if own.running else compared
    facts: dict[str, Any] = {"runs": [numbers_of(run) for run in runs], "notes": take_notes(item.config)}
    if own.running:
        own.failed |= report.failed
        facts["engine"] = bool(compared)
    elif runs:
        facts["failed"] = own.failed
    if call.when == "call" and report.passed and unused_marker(item):
        facts["notes"].append(f"{item.nodeid} has the marker ditto_engine but uses no ditto fixture: no engine ran")
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, DittoError):
        facts["bad_input"] = isinstance(error, BAD_INPUT)
        if facts["bad_input"] and hasattr(report, "wasxfail"):
            facts["notes"].append(f"{item.nodeid} was expected to fail, but not by bad input: {error}")
        shorten(item, call, report)
    if report.skipped and UNAVAILABLE in item.stash and call.when == "setup":
        facts["unavailable"] = item.stash[UNAVAILABLE]
        path, line, _ = item.location
        report.longrepr = (path, (line or 0) + 1, f"Skipped: {item.stash[UNAVAILABLE]}")
    if call.when == "setup" and report.passed and ASKED in item.stash:
        facts["engine"] = True
    settle_dumps(item, runs, failed=report.failed or own.failed)
    facts["files"] = reports.spool(item.config, runs)
    if any(facts.values()):
        setattr(report, ATTRIBUTE, facts)


def unused_marker(item: pytest.Item) -> bool:
    """Tell whether a test has its own marker but no engine."""
    own = any(mark.name == MARKER for mark in item.own_markers)
    return own and not uses_ditto(item) and PAIR not in item.stash


def take_notes(config: pytest.Config) -> list[str]:
    """Return the events that came up since the last report."""
    pending = config.stash[NOTES]
    taken = pending.copy()
    pending.clear()
    return taken


def shorten(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Replace the traceback of an error of ours by its one line; ``--full-trace`` keeps it."""
    if call.excinfo is not None and not item.config.getoption("fulltrace"):
        shown = call.excinfo.getrepr(style="value", chain=False)
        if shown.reprcrash is not None:
            shown.reprcrash.message = str(call.excinfo.value)  # the class's path would fill the short summary
        report.longrepr = shown


def add_tables(report: pytest.TestReport, runs: list[Comparison], shown: list[Comparison], *, everything: bool) -> None:
    """Append a table of the worst sites for each comparison that failed; or of all sites, for each comparison.

    Those that are ``shown`` in a subtest's report are not shown again, and the new ones are added to them.
    """
    from ditto_core.compare.table import ROWS, table

    new = [run for run in runs if (everything or not run) and not any(run is other for other in shown)]
    tables = [table(run, len(run.sites) if everything else ROWS) for run in new]
    encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"  # what it lacks would make pytest escape all lines
    report.sections += [("ditto-engine", text.encode(encoding, "replace").decode(encoding)) for text in tables]
    shown += new


def settle_dumps(item: pytest.Item, runs: list[Comparison], *, failed: bool) -> None:
    """Complete the dump of a test by the comparison itself, or remove it when it is not to be kept."""
    folder = item.stash[PAIR].options.dump if runs else None
    if folder is None:
        return
    if failed or item.config.stash[OPTIONS].dump == ALL:
        for run in runs:
            run.save(Path(run.dump) / "comparison.json")
    else:
        shutil.rmtree(folder, ignore_errors=True)
