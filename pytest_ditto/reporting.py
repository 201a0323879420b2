"""What a ditto test adds to pytest's reports, and what the run says at its beginning and end.

Numbers travel from xdist's workers inside the test reports: ``user_properties`` (they also end up in JUnit XML), and an
attribute ``ditto_engine`` of plain lists, dictionaries and numbers.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ditto_core.errors import CacheError, DittoError, TraceError, UsageError
from ditto_core.visible import visible
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
SHOWN = 10
BARE, SAME = "assert <Comparison: ", 80
"""How pytest's message of ``assert run`` begins, and how much of it is the run's repr, before pytest shortens it."""


def header(config: pytest.Config) -> str:
    """Return the line above the tests: backends, libraries and cache, without importing any of them."""
    from ditto_core.backends.registry import backend_names, libraries
    from ditto_core.cache import default_root

    found = {name: version(*libraries(name)) for name in (*backend_names(), "torch", "transformers")}
    here = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    return f"ditto-engine: {here}; cache: {config.stash[OPTIONS].cache_dir or default_root()}"


def version(*distributions: str) -> str:
    """Return the version of the first distribution that is installed, or an empty string."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def add_properties(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Give a test's numbers to JUnit before pytest makes its report."""
    runs = comparisons(item, call)
    if not runs:
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
    """Return what a test has compared, once it is through: after its call, or where its setup went wrong."""
    over = call.when == "call" or (call.when == "setup" and call.excinfo is not None)
    return item.stash[PAIR].comparisons if over and PAIR in item.stash else []


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
        "first_bad": f"{bad.site}, step {bad.step}" if bad else "",
        "bad_logits": next((f"{v}, step {step}" for step, v in run.logits_verdicts if not v.ok), ""),
        "unjudged_output": next((f"{r.site}, step {r.step}" for r in run.unjudged_outputs), ""),
        "unjudged_sites": len({r.site for r in run.inconclusive}),
        "ok": bool(run),
        "dump": run.dump,
    }


def complete(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Put tables, numbers, notes and one-line errors into a test's report, and settle its dump."""
    runs = comparisons(item, call)
    facts: dict[str, Any] = {"runs": [numbers_of(run) for run in runs], "notes": take_notes(item.config)}
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
    if runs and (report.failed or item.config.option.verbose > 0):
        add_tables(report, runs, everything=item.config.option.verbose > 0)
    settle_dumps(item, report, runs)
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


def add_tables(report: pytest.TestReport, runs: list[Comparison], *, everything: bool) -> None:
    """Append a table of the worst sites for each comparison that failed; or of all sites, for each comparison."""
    from ditto_core.compare.table import ROWS, table

    shown = [run for run in runs if everything or not run]
    tables = [table(run, len(run.sites) if everything else ROWS) for run in shown]
    encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"  # what it lacks would make pytest escape all lines
    report.sections += [("ditto-engine", text.encode(encoding, "replace").decode(encoding)) for text in tables]


def settle_dumps(item: pytest.Item, report: pytest.TestReport, runs: list[Comparison]) -> None:
    """Complete the dump of a test by the comparison itself, or remove it when it is not to be kept."""
    folder = item.stash[PAIR].options.dump if runs else None
    if folder is None:
        return
    if report.failed or item.config.stash[OPTIONS].dump == ALL:
        for run in runs:
            run.save(Path(run.dump) / "comparison.json")
    else:
        shutil.rmtree(folder, ignore_errors=True)


class Tally:
    """Collects what the reports say, in the process that shows the terminal, and speaks at the end."""

    def __init__(self) -> None:
        self.runs: list[tuple[dict[str, Any], str, str]] = []
        self.notes: list[str] = []
        self.unavailable: Counter[str] = Counter()
        self.ran = False
        """Whether any test had its engine, or failed on the way to it."""
        self.bad_inputs = 0
        self.files: list[tuple[str, str]] = []
        self.failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one report in; one that is run again counts when it is through."""
        if str(report.outcome) == "rerun":  # pytest-rerunfailures' own outcome
            return
        facts: dict[str, Any] = getattr(report, ATTRIBUTE, {})
        self.runs += [(run, report.nodeid, report.outcome) for run in facts.get("runs", ())]
        self.notes += facts.get("notes", ())
        self.bad_inputs += bool(facts.get("bad_input"))
        self.ran |= report.failed or bool(facts.get("engine") or facts.get("runs"))
        self.files += reports.named(report.nodeid, facts.get("files", ()))
        if report.failed and facts:
            self.failed.append(report)
        if "unavailable" in facts:
            self.unavailable[facts["unavailable"]] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Exit with code 4, as for wrong usage, when a test met bad input that only showed as it ran."""
        if self.bad_inputs and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show what was compared, worst first; one line when all is well."""
        lines = [*self.lines()]
        if len(lines) > 1:
            terminalreporter.write_sep("=", "ditto-engine")
        for line in (*lines, *reports.publish(terminalreporter.config, self.files, self.failed)):
            terminalreporter.write_line(line)
        if self.unavailable and not self.ran:
            terminalreporter.write_line(all_skipped(self.unavailable.total()), red=True, bold=True)

    def lines(self) -> list[str]:
        """Return the summary."""
        failed = sorted((run for run in self.runs if not run[0]["ok"]), key=lambda run: -run[0]["worst_margin"])
        lines = [line_of(*run) for run in failed[:SHOWN]]
        if len(failed) > SHOWN:
            lines.append(f"and {len(failed) - SHOWN} more that diverge")
        lines += [visible(f"note: {note}") for note in dict.fromkeys(self.notes)]
        lines += [visible(f"skipped {count}: {reason}") for reason, count in self.unavailable.most_common()]
        if self.bad_inputs:
            lines.append(f"bad input in {self.bad_inputs} test{'s' * (self.bad_inputs != 1)}: exit code 4")
        return lines + self.total()

    def total(self) -> list[str]:
        """Return the line that is always there when anything was compared."""
        if not self.runs:
            return []
        run, nodeid, _ = max(self.runs, key=lambda run: run[0]["worst_margin"])
        sites = sum(run["sites"] for run, _, _ in self.runs)
        unjudged = sum(run["unjudged_sites"] for run, _, _ in self.runs)
        judged = f"{sites} sites" + (f" ({unjudged} not judged)" if unjudged else "")
        count = len(self.runs)
        worst = f"worst margin {run['worst_margin']:.3g} at {run['worst_site']}, step {run['worst_step']} ({nodeid})"
        return [f"ditto-engine: {count} comparison{'s' * (count != 1)}, {judged}, {worst}"]


def all_skipped(count: int) -> str:
    """Return what to say of a run in which no test had its engine."""
    tests = "the only test that needs an engine was" if count == 1 else f"all {count} tests that need an engine were"
    return (
        f"ditto-engine: NOTHING WAS COMPARED, {tests} skipped (missing backend or dtype); "
        "--ditto-require-backends makes that a failure"
    )


def line_of(run: dict[str, Any], nodeid: str, outcome: str) -> str:
    """Return one diverging comparison's line."""
    first = "sites that could not be compared"
    if run["first_bad"] or run["unjudged_output"]:
        bad, output = run["first_bad"], run["unjudged_output"]
        first = f"first bad site {bad}" if bad else f"could not be judged: output {output}"
    elif run["bad_logits"]:
        first = f"the logits are off: {run['bad_logits']}"
    unasserted = " [the test passed: nothing asserted it]" if outcome == "passed" else ""
    return f"{run['worst_margin']:.3g} x bound  {nodeid}  {run['engine']}: {first}{unasserted}"
