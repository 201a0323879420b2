"""What the run says at its beginning and end."""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from typing import Any

import pytest

from ditto_core.visible import visible
from pytest_ditto import reports
from pytest_ditto.pytest_options import OPTIONS
from pytest_ditto.reporting import ATTRIBUTE

SHOWN = 10


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


class Tally:
    """Collects what the reports say, in the process that shows the terminal, and speaks at the end."""

    def __init__(self) -> None:
        self.runs: list[tuple[dict[str, Any], str, str]] = []
        self.notes: list[str] = []
        self.unavailable: Counter[str] = Counter()
        self.ran = False
        """Whether any test had its engine, or failed on the way to it."""
        self.bad_inputs: set[str] = set()
        self.files: list[tuple[str, str]] = []
        self.failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one report in; one that is run again counts when it is through."""
        if str(report.outcome) == "rerun":  # pytest-rerunfailures' own outcome
            return
        facts: dict[str, Any] = getattr(report, ATTRIBUTE, {})
        outcome = "failed" if facts.get("failed") else report.outcome  # of a subtest
        self.runs += [(run, report.nodeid, outcome) for run in facts.get("runs", ())]
        self.notes += facts.get("notes", ())
        if facts.get("bad_input"):
            self.bad_inputs.add(report.nodeid)
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
            tests = f"{len(self.bad_inputs)} test{'s' * (len(self.bad_inputs) != 1)}"
            lines.append(f"bad input in {tests}: exit code 4")
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
        recovered = ", recovered downstream" * run["worst_recovered"]
        place = f"{run['worst_site']}, step {run['worst_step']}{recovered} ({nodeid})"
        worst = f"worst margin {run['worst_margin']:.3g} at {place}"
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
