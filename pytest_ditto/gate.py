"""The marker ``ditto_gate`` and its fixture: a suite through the engine and reference of ``ditto_engine``.

With ``shards`` a gate becomes several tests, which xdist spreads over its workers. The one that finishes last puts the
shards together and judges them; a gate whose shards were never all there fails the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ditto_core.errors import UsageError, nearest
from pytest_ditto.bench import bench_of
from pytest_ditto.fixtures import require
from pytest_ditto.marker import wanted
from pytest_ditto.pytest_options import OPTIONS

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace
    from ditto_core.gates import Gate, GateResult
    from ditto_core.gates.settings import GateSettings

MARKER = "ditto_gate"
SIGNATURE = (
    f"{MARKER}(name='', *, suite='classics', limits={{}}, alpha=0.05, baseline=None, samples=None, shards=1, jobs=1, "
    "output=None, …): run a suite through the engine of `ditto_engine` and its reference. `name` is a table of "
    "[tool.ditto_core.gates]; `shards` makes so many tests, for xdist; `jobs` are processes of one test."
)
SHARD = "_ditto_gate_shard"
OWN_KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "shards": ("an integer", (int,)),
    "jobs": ("an integer", (int,)),
    "output": ("a path", (str, Path)),
}
"""What the marker's arguments that are no settings have to be, in words and as types."""
OWN = tuple(OWN_KINDS)
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
    from ditto_core.engines.workers import local_processes
    from ditto_core.gates.gate import run_gate
    from ditto_core.gates.shards import Shard
    from ditto_core.gates.text import plan
    from ditto_core.system.files import check_writable

    item, arguments = request.node, arguments_of(request.node)
    settings, shard = settings_of(item, arguments), Shard.parse(_ditto_gate_shard)
    gate = gate_of(item, settings)
    bench_of(request.config).close()  # its sessions' memory is the gate's now
    update = request.config.stash[OPTIONS].update_baseline
    baseline = baseline_of(settings, update)
    run, output = local_processes(arguments.get("jobs", 1)), arguments.get("output")
    for path in filter(None, (output and settings.folder / output, settings.baseline if update else None)):
        check_writable(path)
    print("\n".join(plan(gate.suite, gate.policy, gate.dtype)))  # pytest shows it with -s, or when the test fails
    result = run_gate(gate, ditto_workspace, shard=shard, baseline=baseline, run=run)
    if shard.count > 1:
        result = together(item, result, shard.count, shared_folder(request.config, tmp_path_factory))
    if update and settings.baseline:
        from ditto_core.gates.baseline import Baseline

        Baseline.of(result).save(settings.baseline)
    if output:
        result.save(settings.folder / output)
    report(item, result)
    return result


def arguments_of(node: Any) -> dict[str, Any]:
    """Return the arguments of all ``ditto_gate`` markers around a test; the nearest wins."""
    arguments: dict[str, Any] = {}
    for mark in reversed(list(node.iter_markers(MARKER))):
        if len(mark.args) > 1:
            raise UsageError(f"marker {MARKER} takes one positional argument, a gate's name, but got {len(mark.args)}")
        arguments |= {**dict(zip(("name",), mark.args, strict=False)), **mark.kwargs}
    return arguments


def settings_of(item: pytest.Item, arguments: Mapping[str, Any]) -> GateSettings:
    """Return a gate's settings: the project's table of that name, with the marker's arguments on top."""
    from ditto_core.gates.settings import KNOWN, SPEC, GateSettings, project_gate

    if item.get_closest_marker(MARKER) is None:
        raise UsageError(f"the test uses the fixture ditto_gate without a marker: add @pytest.mark.{MARKER}()")
    known = [*(n for n in KNOWN if n not in (*SPEC, "model", "reference", "threads", "device")), *OWN, "name"]
    for name in arguments:
        if name not in known:
            raise UsageError(
                f"marker {MARKER} has no argument {name!r}{nearest(name, known)} (known: {', '.join(known)})"
            )
    for name, (expected, kind) in OWN_KINDS.items():
        if name in arguments and (not isinstance(arguments[name], kind) or isinstance(arguments[name], bool)):
            raise UsageError(f"marker {MARKER}: {name} is {arguments[name]!r}, expected {expected}")
    if arguments.get("shards", 1) < 1:
        raise UsageError(f"marker {MARKER}: shards is {arguments['shards']}, expected at least 1")
    root = item.config.rootpath
    base = project_gate(root, arguments["name"]) if arguments.get("name") else GateSettings(folder=root)
    return base.over(**{name: value for name, value in arguments.items() if name not in (*OWN, "name")})


def gate_of(item: pytest.Item, settings: GateSettings) -> Gate:
    """Return the gate on the engine and reference of the marker ``ditto_engine``."""
    asked = wanted(item)
    require(item, asked.spec, asked.options, must=item.config.stash[OPTIONS].require_backends)
    own = {"reference": asked.options.reference, "threads": asked.options.threads, "device": asked.options.device}
    return settings.over(**own).gate(asked.spec)


def baseline_of(settings: GateSettings, update: bool) -> Any:
    """Load the baseline that a gate compares with, None where the reference is to run."""
    from ditto_core.gates.baseline import Baseline

    return Baseline.load(settings.baseline) if settings.baseline and not update else None


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one test for each shard. Errors in the marker are reported when the test runs."""
    if SHARD not in metafunc.fixturenames:
        return
    try:
        count = arguments_of(metafunc.definition).get("shards", 1)
    except UsageError:
        return
    if isinstance(count, int) and count > 1:
        shards = [f"{number}/{count}" for number in range(1, count + 1)]
        metafunc.parametrize(SHARD, shards, ids=[f"shard{n}of{count}" for n in range(1, count + 1)], indirect=True)


def together(item: pytest.Item, part: GateResult, count: int, folder: Path) -> GateResult:
    """Put a shard beside the others; skip the test unless it is the last of them."""
    from filelock import FileLock

    from ditto_core.gates.result import GateResult, merge

    name = item.nodeid.partition("[")[0]
    item.user_properties.append((SCORED, name))
    with FileLock(folder / "lock"):
        part.save(folder / part.identity.key / f"{part.shard.replace('/', 'of')}.json")
        files = sorted((folder / part.identity.key).glob("*.json"))
    if len(files) < count:
        pytest.skip(f"shard {part.shard} is scored; the last of {count} shards judges the gate")
    return merge([GateResult.load(path) for path in files])


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
        name = report.nodeid.partition("[")[0]
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
