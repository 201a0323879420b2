"""The marker ``ditto_gate`` and its fixture: a suite through the engine and reference of ``ditto_engine``.

With ``shards`` a gate becomes several tests, which xdist spreads over its workers. The one that finishes last puts the
shards together and judges them; a gate whose shards were never all there fails the run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ditto_core.errors import UsageError
from ditto_core.gates.signature import MARKER
from pytest_ditto.bench import bench_of
from pytest_ditto.fixtures import require
from pytest_ditto.marker import wanted
from pytest_ditto.pytest_options import OPTIONS

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace
    from ditto_core.gates import Gate, GateResult
    from ditto_core.gates.settings import GateSettings

SHARD = "_ditto_gate_shard"
FOLDER = "ditto-gates"
SCORED, JUDGED = "ditto_gate_scored", "ditto_gate"


@pytest.fixture
def _ditto_gate_shard(request: pytest.FixtureRequest) -> str:
    """The share of the suite that a test runs."""
    return str(getattr(request, "param", "1/1"))


@pytest.fixture
def ditto_gate(
    request: pytest.FixtureRequest,
    ditto_workspace: Workspace,
    tmp_path_factory: pytest.TempPathFactory,
    _ditto_engine_variant: None,
    _ditto_gate_shard: str,
) -> GateResult:
    """The :class:`~ditto_core.gates.GateResult` of the gate that the marker asks for.

    With several shards, all tests but the last to finish are skipped.
    """
    from ditto_core.gates.marker import MarkedGate
    from ditto_core.gates.shards import Shard
    from ditto_core.gates.text import plan

    item = request.node
    if item.get_closest_marker(MARKER) is None:
        raise UsageError(f"the test uses the fixture ditto_gate without a marker: add @pytest.mark.{MARKER}()")
    marked, shard = MarkedGate.of(arguments_of(item), item.config.rootpath), Shard.parse(_ditto_gate_shard)
    gate = gate_of(item, marked.settings)
    update = request.config.stash[OPTIONS].update_baseline
    marked.check_files(update=update)
    bench_of(request.config).close()  # its sessions' memory is the gate's now
    print("\n".join(plan(gate.suite, gate.policy, gate.dtype)))  # pytest shows it with -s, or when the test fails

    def together(part: GateResult) -> GateResult:
        folder = shared_folder(request.config, tmp_path_factory)
        return part if shard.count == 1 else judged_last(item, part, shard.count, folder)

    result = marked.run(gate, ditto_workspace, shard, update=update, together=together)
    report(item, result)
    return result


def arguments_of(node: Any) -> dict[str, Any]:
    """Return the arguments of all ``ditto_gate`` markers around a test; the nearest wins."""
    from ditto_core.gates.marker import merged

    return merged((mark.args, mark.kwargs) for mark in reversed(list(node.iter_markers(MARKER))))


def gate_of(item: pytest.Item, settings: GateSettings) -> Gate:
    """Return the gate on the engine and reference of the marker ``ditto_engine``."""
    asked = wanted(item)
    require(item, asked.spec, asked.options, must=item.config.stash[OPTIONS].require_backends)
    own = {"reference": asked.options.reference, "threads": asked.options.threads, "device": asked.options.device}
    return settings.over(**own).gate(asked.spec)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one test for each shard. Errors in the marker are reported when the test runs."""
    if SHARD not in metafunc.fixturenames:
        return
    from ditto_core.gates.marker import shards_of

    try:
        shards = shards_of(arguments_of(metafunc.definition))
    except UsageError:
        return
    if shards:
        metafunc.parametrize(SHARD, shards, ids=[f"shard{s.replace('/', 'of')}" for s in shards], indirect=True)


def judged_last(item: pytest.Item, part: GateResult, count: int, folder: Path) -> GateResult:
    """Put a shard beside the others; skip the test unless it is the last of them."""
    from ditto_core.gates.marker import gathered

    item.user_properties.append((SCORED, whole(item.nodeid)))
    result = gathered(part, count, folder)
    if result is None:
        pytest.skip(f"shard {part.shard} is scored; the last of {count} shards judges the gate")
    return result


def whole(nodeid: str) -> str:
    """Return a test's id without its shard: one engine's gate is not another's of the same test."""
    return re.sub(r"(?<=[\[-])shard\d+of\d+-?", "", nodeid).replace("-]", "]").replace("[]", "")


def shared_folder(config: pytest.Config, factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this run that all workers of xdist share."""
    base = factory.getbasetemp()
    folder = (base.parent if hasattr(config, "workerinput") else base) / FOLDER
    folder.mkdir(exist_ok=True)
    return folder


def report(item: pytest.Item, result: GateResult) -> None:
    """Give a gate's verdict and table to the test's report."""
    from ditto_core.gates.text import table

    item.user_properties.append((JUDGED, result.summary))
    item.user_properties += [(f"ditto_gate_{v.metric}", v.estimate) for v in result.verdicts]
    item.add_report_section("setup", "ditto-gate", "\n".join([*result.notes, table(result)]))


class GateTally:
    """Sees to it that every gate whose shards ran was judged, in the process that shows the terminal."""

    def __init__(self) -> None:
        self.summaries: list[str] = []
        self.scored: set[str] = set()
        self.judged: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one report in."""
        if report.when != "teardown":
            return
        name = whole(report.nodeid)
        for key, value in report.user_properties:
            if key == SCORED:
                self.scored.add(str(value))
            elif key == JUDGED:
                self.judged.add(name)
                self.summaries.append(str(value))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run when a gate has shards and no verdict."""
        if self.scored - self.judged and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show each gate's verdict, and those that have none."""
        for summary in self.summaries:
            terminalreporter.write_line(f"ditto-engine: {summary}")
        for name in sorted(self.scored - self.judged):
            terminalreporter.write_line(f"ditto-engine: gate {name} FAILED: not all of its shards ran", red=True)
