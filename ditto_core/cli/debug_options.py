"""Options that the commands of ``ditto debug`` share, under the names that Polygraphy's users know."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ditto_core.cli.debug_words import CHECK, SEPARATOR
from ditto_core.cli.results import Json
from ditto_core.cli.screen import Screen
from ditto_core.errors import UsageError
from ditto_core.system.atomic import write_atomic
from ditto_core.system.files import check_kept

if TYPE_CHECKING:
    from ditto_core.debug.check import Check as Judge
    from ditto_core.debug.check import CommandCheck
    from ditto_core.debug.evaluate import OnnxRuntime
    from ditto_core.debug.iterations import IterationOptions
    from ditto_core.debug.oracle import Reference
    from ditto_core.graphs.graph import Graph

ART_DIR = Path("ditto_debug_artifacts")
ITER_INFO = Path("iteration.json")
ITER_ARTIFACT = Path("polygraphy_debug.onnx")


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
Interactive = Annotated[
    bool,
    typer.Option("--interactive", help="Ask on the terminal whether an iteration is good, after --check, if any."),
]
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
    Path | None,
    typer.Option(
        "--inputs", "--load-inputs", help="Real inputs: .safetensors, .npz, JSON of Polygraphy, or a recorded trace."
    ),
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
Level = Annotated[str, typer.Option(help="Optimization level of ONNX Runtime: all, extended, basic, disable.")]


@dataclass(frozen=True)
class Judgement:
    """What judges an iteration, and what is kept of it: the options that every search has."""

    check: Check = None
    fail_code: FailCode = None
    ignore_fail_code: IgnoreFailCode = None
    fail_regex: FailRegex = None
    check_timeout: CheckTimeout = None
    interactive: Interactive = False
    show_output: ShowOutput = False
    hide_fail_output: HideFailOutput = False
    artifacts: Artifacts = None
    art_dir: ArtDir = ART_DIR
    iter_info: IterInfo = ITER_INFO
    no_remove_intermediate: KeepIntermediate = False
    load_debug_replay: LoadReplay = None
    save_debug_replay: SaveReplay = None
    json_file: Json = None

    @property
    def command(self) -> CommandCheck | None:
        """The check, None where none was given. Raises :class:`UsageError` for its options without it."""
        from ditto_core.debug.check import CommandCheck, parse_command

        codes, ignored, patterns = self.fail_code or (), self.ignore_fail_code or (), self.fail_regex or ()
        if self.check is not None:
            words = parse_command(self.check.split(SEPARATOR))
            return CommandCheck(words, tuple(codes), tuple(ignored), tuple(patterns), self.check_timeout)
        if codes or ignored or patterns or self.check_timeout:
            raise UsageError("--fail-code, --ignore-fail-code, --fail-regex and --check-timeout need a --check COMMAND")
        return None

    def judge(self, subject: str = "", *, skips: bool = False) -> Judge | None:
        """Return what judges: the command, or the person who sees its output and is asked about ``subject``."""
        from ditto_core.debug.person import PersonCheck

        return PersonCheck(self.command, subject, skips) if self.interactive else self.command

    def iterations(self, iter_artifact: Path | None = None, *, skips: bool = False) -> IterationOptions:
        """Return the options of the iterations, each of which writes ``iter_artifact``; see :meth:`judge`."""
        from ditto_core.debug.iterations import IterationOptions

        return IterationOptions(
            check=self.judge(str(iter_artifact or ""), skips=skips),
            iter_artifact=iter_artifact,
            artifacts=tuple(self.artifacts or ()),
            art_dir=self.art_dir,
            iter_info=self.iter_info,
            remove_intermediate=not self.no_remove_intermediate,
            show_output=self.show_output,
            hide_fail_output=self.hide_fail_output,
            load_replay=self.load_debug_replay,
            save_replay=self.save_debug_replay,
        )

    def screen(self, title: str) -> Screen:
        """Return where the search says things."""
        return Screen(title, spins=not self.interactive)

    def check_kept(self, results: Mapping[str, Path | None] | None = None, **sources: Path | None) -> None:
        """Raise :class:`UsageError` where a search would write ``results``, or its own files, over what it reads."""
        own = {"--json": self.json_file, "--iter-info": self.iter_info}
        check_kept({**own, **(results or {})}, {**sources, "replay": self.load_debug_replay})
        check_kept({"--save-debug-replay": self.save_debug_replay}, sources)

    def write(self, data: dict[str, Any]) -> None:
        """Write a result where the user wants it."""
        write_json(self.json_file, data)


@dataclass(frozen=True)
class GoodSide:
    """Real inputs, the good values that a model is judged by, and the engine that runs it."""

    inputs: Inputs = None
    step: Step = 0
    reference: ReferenceModel = None
    reference_precision: Precision = ""
    tolerance: ToleranceBound = 0.0
    level: Level = "all"

    def feed(self, graph: Graph) -> dict[str, Any]:
        """Read the inputs, if any were given."""
        from ditto_core.debug.inputs import read_inputs

        return read_inputs(self.inputs, graph, self.step) if self.inputs is not None else {}

    def values(self, expected: Path | None = None) -> Reference:
        """Return what the good values come from: a model, a precision, or values that were recorded."""
        from ditto_core.debug.inputs import read_arrays
        from ditto_core.debug.oracle import Reference
        from ditto_core.graphs.graph import Graph

        recorded = read_arrays(expected, self.step) if expected is not None else {}
        model = Graph.load(self.reference) if self.reference is not None else None
        return Reference(model, self.reference_precision, recorded)

    @property
    def engine(self) -> OnnxRuntime:
        """ONNX Runtime at the level that was asked for."""
        from ditto_core.debug.evaluate import OnnxRuntime

        return OnnxRuntime(self.level)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: each parameter that is such a dataclass becomes an option a field."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command, eval_str=True).parameters
    groups = {name: hints[name] for name in own if is_dataclass(hints[name])}
    spread = [p.replace(kind=p.KEYWORD_ONLY) for name, p in own.items() if name not in groups]
    for group in groups.values():
        spread += [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(group, eval_str=True).parameters.values()]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**made, **given)

    run.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in spread}
    return run


def check_output(judgement: Judgement, output: Path, iter_artifact: Path, **sources: Path | None) -> None:
    """Raise :class:`UsageError` where a result would be written over a file that it is made of."""
    judgement.check_kept({"--output": output, "--iter-artifact": iter_artifact}, **sources)
    if output.absolute() == iter_artifact.absolute():
        raise UsageError(f"--output {output} is the --iter-artifact, which is removed in the end: name another file")


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    """Write a result where the user wants it; folders above it are made, as for the model."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(data, indent=1, default=str) + "\n")
