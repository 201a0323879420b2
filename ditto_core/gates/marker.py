"""The marker ``ditto_gate`` without pytest: its arguments checked, its gate run, its shards put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import UsageError, nearest
from ditto_core.gates.settings import KNOWN, SPEC, GateSettings, project_gate
from ditto_core.gates.signature import MARKER

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace
    from ditto_core.gates.gate import Gate
    from ditto_core.gates.result import GateResult
    from ditto_core.gates.shards import Shard

OWN_KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "shards": ("an integer", (int,)),
    "jobs": ("an integer", (int,)),
    "output": ("a path", (str, Path)),
}
"""What the marker's arguments that are no settings have to be, in words and as types."""
ARGUMENTS = (
    *(name for name in KNOWN if name not in (*SPEC, "model", "reference", "threads", "device")),
    *OWN_KINDS,
    "name",
)


@dataclass(frozen=True)
class MarkedGate:
    """A gate as markers ask for it. ``arguments`` are theirs, ``settings`` the table's with those on top."""

    arguments: Mapping[str, Any]
    settings: GateSettings

    @classmethod
    def of(cls, arguments: Mapping[str, Any], root: Path) -> MarkedGate:
        """Check the arguments and read the project's table of their name. Raises :class:`UsageError`."""
        check(arguments)
        base = project_gate(root, arguments["name"]) if arguments.get("name") else GateSettings(folder=root)
        own = (*OWN_KINDS, "name")
        return cls(arguments, base.over(**{name: value for name, value in arguments.items() if name not in own}))

    @property
    def output(self) -> Path | None:
        """Where the result is written, None where it is not."""
        output = self.arguments.get("output")
        return self.settings.folder / output if output else None

    def check_files(self, *, update: bool) -> None:
        """Raise :class:`~ditto_core.errors.DittoError` where the result, or with ``update`` the baseline, cannot be
        written, or would be written over what it is made of."""
        from ditto_core.system.files import check_writable

        self.settings.check_kept(self.output, update=update)
        for path in filter(None, (self.output, self.settings.baseline if update else None)):
            check_writable(path)

    def run(
        self,
        gate: Gate,
        workspace: Workspace,
        shard: Shard,
        *,
        update: bool,
        together: Callable[[GateResult], GateResult],
    ) -> GateResult:
        """Run a shard, put it together with the others by ``together``, and write what is to be written.

        ``update``: run the reference and write the baseline. Raises what :func:`~ditto_core.gates.gate.run_gate` does.
        """
        from ditto_core.engines.workers import local_processes
        from ditto_core.gates.baseline import Baseline
        from ditto_core.gates.gate import run_gate

        self.check_files(update=update)
        written = self.settings.baseline if update else None
        baseline = Baseline.load(self.settings.baseline) if self.settings.baseline and not update else None
        execute = local_processes(self.arguments.get("jobs", 1))
        result = together(run_gate(gate, workspace, shard=shard, baseline=baseline, run=execute))
        if written:
            Baseline.of(result).save(written)
        if self.output:
            result.save(self.output)
        return result


def merged(marks: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the arguments of markers, given as (args, kwargs), the outermost first. Raises :class:`UsageError`."""
    arguments: dict[str, Any] = {}
    for args, kwargs in marks:
        if len(args) > 1:
            raise UsageError(f"marker {MARKER} takes one positional argument, a gate's name, but got {len(args)}")
        arguments |= {**dict(zip(("name",), args, strict=False)), **kwargs}
    return arguments


def check(arguments: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for an argument that the marker does not have, or that is not of its kind."""
    for name in arguments:
        if name not in ARGUMENTS:
            known = f"{nearest(name, ARGUMENTS)} (known: {', '.join(ARGUMENTS)})"
            raise UsageError(f"marker {MARKER} has no argument {name!r}{known}")
    for name, (expected, kind) in OWN_KINDS.items():
        if name in arguments and (not isinstance(arguments[name], kind) or isinstance(arguments[name], bool)):
            raise UsageError(f"marker {MARKER}: {name} is {arguments[name]!r}, expected {expected}")
    if arguments.get("shards", 1) < 1:
        raise UsageError(f"marker {MARKER}: shards is {arguments['shards']}, expected at least 1")


def shards_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return the shards that a marker asks for, ``1/2`` and ``2/2``; none where it asks for no or a wrong number."""
    count = arguments.get("shards", 1)
    return [f"{number}/{count}" for number in range(1, count + 1)] if isinstance(count, int) and count > 1 else []


def gathered(part: GateResult, count: int, folder: Path) -> GateResult | None:
    """Put a shard beside the others in ``folder`` and merge them; None while some are not there yet."""
    from filelock import FileLock

    from ditto_core.gates.result import GateResult, merge

    with FileLock(folder / "lock"):
        part.save(folder / part.identity.key / f"{part.shard.replace('/', 'of')}.json")
        files = sorted((folder / part.identity.key).glob("*.json"))
    return merge([GateResult.load(path) for path in files]) if len(files) == count else None
