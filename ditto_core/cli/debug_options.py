"""Options that the commands of ``ditto debug`` share, under the names that Polygraphy's users know."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from ditto_core.errors import UsageError

if TYPE_CHECKING:
    from ditto_core.debug.check import CommandCheck
    from ditto_core.debug.evaluate import OnnxRuntime
    from ditto_core.debug.graph import Graph
    from ditto_core.debug.iterations import IterationOptions
    from ditto_core.debug.oracle import Reference

CHECK = "--check"
SEPARATOR = "\x1f"


class CheckingCommand(TyperCommand):
    """A command whose ``--check`` takes one quoted string, or, as Polygraphy's does, all words that follow it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the words of the check into one value."""
        if CHECK in args:
            at = args.index(CHECK)
            words = args[at + 1 :]
            if len(words) > 1 and not any(c.isspace() for c in words[0]):
                args = [*args[:at], CHECK, SEPARATOR.join(words)]
        return super().parse_args(ctx, args)


Check = Annotated[
    str | None,
    typer.Option(
        CHECK,
        help="Command that judges an iteration: exit status 0 is good. One quoted string, or, as the last option, "
        "all words that follow.",
    ),
]
FailCode = Annotated[
    list[int] | None,
    typer.Option("--fail-code", "--fail-returncode", help="Only this exit status of the check is bad; repeatable."),
]
IgnoreFailCode = Annotated[
    list[int] | None,
    typer.Option("--ignore-fail-code", "--ignore-fail-returncode", help="This exit status is good; repeatable."),
]
FailRegex = Annotated[
    list[str] | None, typer.Option(help="Bad only if this matches in the check's output; repeatable, any may match.")
]
CheckTimeout = Annotated[float | None, typer.Option(help="Seconds after which a check is killed and counts as bad.")]
ShowOutput = Annotated[bool, typer.Option("--show-output", help="Show the check's output for good iterations too.")]
HideFailOutput = Annotated[bool, typer.Option("--hide-fail-output", help="Do not show it for bad ones.")]
Artifacts = Annotated[
    list[Path] | None, typer.Option(help="File that each iteration writes, to be sorted into good and bad; repeatable.")
]
ArtDir = Annotated[
    Path, typer.Option("--art-dir", "--artifacts-dir", help="Artifacts are moved to good/ and bad/ in here.")
]
IterInfo = Annotated[
    Path, typer.Option("--iter-info", "--iteration-info", help="JSON about the iteration that runs, for the check.")
]
KeepIntermediate = Annotated[
    bool, typer.Option("--no-remove-intermediate", help="Keep the last iteration's files when the search ends.")
]
LoadReplay = Annotated[
    Path | None, typer.Option("--load-debug-replay", help="Verdicts of an earlier run to start from.")
]
SaveReplay = Annotated[
    Path | None,
    typer.Option(
        "--save-debug-replay",
        help="Keep the verdicts here. Else they are in ditto_debug_replay.jsonl until the search has ended: "
        "after Ctrl-C or a crash the same command goes on from there.",
    ),
]
IterArtifact = Annotated[
    Path, typer.Option("--iter-artifact", "--intermediate-artifact", help="The file that each iteration makes.")
]
OwnArtifact = Annotated[
    Path | None,
    typer.Option(
        "--iter-artifact",
        "--intermediate-artifact",
        help="The file that each iteration makes (default: polygraphy_debug.onnx, or .engine for TensorRT).",
    ),
]
Inputs = Annotated[
    Path | None, typer.Option(help="Real inputs: .safetensors, .npz, JSON of Polygraphy, or a recorded trace.")
]
Step = Annotated[int, typer.Option(help="Which step of the inputs.", min=0)]
ReferenceModel = Annotated[Path | None, typer.Option("--reference", help="A good ONNX model of the same values.")]
Precision = Annotated[
    str,
    typer.Option(
        "--reference-precision", help="Evaluate the reference in float32 or float64; alone: the same model in it."
    ),
]
Expected = Annotated[Path | None, typer.Option(help="Expected values: a file of tensors or a trace, by value name.")]
ToleranceBound = Annotated[
    float, typer.Option("--tolerance", help="Bound on rel-L2 of each output; 0: the table's for the dtype.", min=0)
]
UntilWord = Annotated[str, typer.Option(help="When to stop: good, bad (at the first such iteration) or a number.")]
BuildOption = Annotated[list[str] | None, typer.Option("--option", help="KEY=VALUE for the backend; repeatable.")]
Level = Annotated[str, typer.Option(help="Optimization level of ONNX Runtime: all, extended, basic, disable.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result here.")]


def command_check(
    check: str | None,
    fail_code: list[int] | None,
    ignore_fail_code: list[int] | None,
    fail_regex: list[str] | None,
    timeout: float | None,
) -> CommandCheck | None:
    """Return the check, or None where none was given. Raises :class:`UsageError` for its options without it."""
    from ditto_core.debug.check import CommandCheck, parse_command

    if check is None:
        if fail_code or ignore_fail_code or fail_regex or timeout:
            raise UsageError("--fail-code, --ignore-fail-code, --fail-regex and --check-timeout need a --check COMMAND")
        return None
    words = check.split(SEPARATOR)
    codes, ignored = tuple(fail_code or ()), tuple(ignore_fail_code or ())
    return CommandCheck(parse_command(words), codes, ignored, tuple(fail_regex or ()), timeout)


def iteration_options(context: typer.Context, check: CommandCheck | None) -> IterationOptions:
    """Collect the shared options of a command from its parameters."""
    from ditto_core.debug.iterations import IterationOptions

    given = context.params
    return IterationOptions(
        check=check,
        iter_artifact=given.get("iter_artifact"),
        artifacts=tuple(given.get("artifacts") or ()),
        art_dir=given["art_dir"],
        iter_info=given["iter_info"],
        remove_intermediate=not given["no_remove_intermediate"],
        show_output=given["show_output"],
        hide_fail_output=given["hide_fail_output"],
        load_replay=given["load_debug_replay"],
        save_replay=given["save_debug_replay"],
    )


def required_check(context: typer.Context, what: str) -> CommandCheck:
    """Return the check. Raises :class:`UsageError` where none was given."""
    check = check_of(context)
    if check is None:
        raise UsageError(f"nothing judges {what}: give --check COMMAND")
    return check


def check_of(context: typer.Context) -> CommandCheck | None:
    """Collect the options of the check from a command's parameters."""
    names = ("check", "fail_code", "ignore_fail_code", "fail_regex", "check_timeout")
    return command_check(*(context.params[name] for name in names))


def reference_of(context: typer.Context) -> Reference:
    """Collect what the good side is made of."""
    from ditto_core.debug.graph import Graph
    from ditto_core.debug.inputs import read_arrays
    from ditto_core.debug.oracle import Reference

    model, expected = context.params["reference"], context.params.get("expected")
    recorded = read_arrays(expected, context.params["step"]) if expected is not None else {}
    return Reference(Graph.load(model) if model is not None else None, context.params["reference_precision"], recorded)


def check_output(context: typer.Context) -> None:
    """Raise :class:`UsageError` where the result would be written over a file that it is made of."""
    output = context.params["output"]
    for name in ("model", "reference", "inputs", "expected"):
        path = context.params.get(name)
        if path is not None and output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"--output {output} would overwrite the {name}: name another file")
    if output.absolute() == context.params["iter_artifact"].absolute():
        raise UsageError(f"--output {output} is the --iter-artifact, which is removed in the end: name another file")


def feed_of(context: typer.Context, graph: Graph) -> dict[str, Any]:
    """Read the inputs, if any were given."""
    from ditto_core.debug.inputs import read_inputs

    path = context.params["inputs"]
    return read_inputs(path, graph, context.params["step"]) if path is not None else {}


def engine_of(context: typer.Context) -> OnnxRuntime:
    """Return ONNX Runtime at the level that was asked for."""
    from ditto_core.debug.evaluate import OnnxRuntime

    return OnnxRuntime(context.params["level"])


class Screen:
    """Says things on stderr, where a terminal shows a spinner with the latest line above those before."""

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status(f"{title} …")

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def say(self, message: str) -> None:
        """Print one line."""
        self._console.print(f"ditto: {message}", highlight=False, markup=False, soft_wrap=True)
        self._status.update(message.splitlines()[0])
