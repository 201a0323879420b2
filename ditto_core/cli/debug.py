"""`ditto debug`: reduce a failing model, find the operators that need precision, sort good builds from bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ditto_core.cli import debug_options as shared
from ditto_core.cli.gate_options import Cluster, Jobs
from ditto_core.errors import UsageError
from ditto_core.system.atomic import write_atomic

app = typer.Typer(no_args_is_help=True, help="Reduce, bisect and repeat failing builds.")

ART_DIR = Path("ditto_debug_artifacts")
ITER_INFO = Path("iteration.json")


@app.command("reduce", cls=shared.CheckingCommand)
def reduce(
    context: typer.Context,
    model: Path = typer.Argument(help="The failing ONNX model."),
    output: Path = typer.Option(Path("reduced.onnx"), "--output", "-o", help="Where the smallest failing model goes."),
    inputs: shared.Inputs = None,
    step: shared.Step = 0,
    reference: shared.ReferenceModel = None,
    reference_precision: shared.Precision = "",
    expected: shared.Expected = None,
    tolerance: shared.ToleranceBound = 0.0,
    level: shared.Level = "all",
    check: shared.Check = None,
    fail_code: shared.FailCode = None,
    ignore_fail_code: shared.IgnoreFailCode = None,
    fail_regex: shared.FailRegex = None,
    check_timeout: shared.CheckTimeout = None,
    show_output: shared.ShowOutput = False,
    hide_fail_output: shared.HideFailOutput = False,
    artifacts: shared.Artifacts = None,
    art_dir: shared.ArtDir = ART_DIR,
    iter_artifact: shared.IterArtifact = Path("polygraphy_debug.onnx"),
    iter_info: shared.IterInfo = ITER_INFO,
    no_remove_intermediate: shared.KeepIntermediate = False,
    load_debug_replay: shared.LoadReplay = None,
    save_debug_replay: shared.SaveReplay = None,
    json_file: shared.Json = None,
) -> None:
    """Find the smallest part that fails. An ONNX model is cut at captured activations."""
    from ditto_core.debug.graph import Graph
    from ditto_core.debug.reduce import ReduceOptions, reduce_model

    shared.check_output(context)
    feed = shared.feed_of(context, Graph.load(model))
    options = ReduceOptions(model, feed, shared.reference_of(context), shared.engine_of(context), tolerance)
    with shared.Screen(f"reducing {model.name}") as screen:
        found = reduce_model(options, shared.iteration_options(context, shared.check_of(context)), output, screen.say)
    write_json(json_file, found.to_json())
    names = ", ".join(found.labels[:8]) + (" …" if len(found.labels) > 8 else "")
    counts = f"{len(found.nodes)} of {found.total} nodes fail by themselves"
    typer.echo(f"{counts} ({found.judged} checks, {found.seconds:.1f} s): {names}")
    typer.echo(str(found.output))


@app.command("precision", cls=shared.CheckingCommand)
def precision(
    context: typer.Context,
    model: Path = typer.Argument(help="A strongly typed float16 or bfloat16 ONNX model."),
    output: Path = typer.Option(Path("mixed.onnx"), "--output", "-o", help="Where the mixed-precision model goes."),
    inputs: shared.Inputs = None,
    step: shared.Step = 0,
    reference: shared.ReferenceModel = None,
    reference_precision: shared.Precision = "",
    tolerance: shared.ToleranceBound = 0.0,
    keep: str = typer.Option("float32", help="Dtype of the operators that are kept: float32 or bfloat16."),
    engine: str = typer.Option(
        "emulated", help="What judges without a --check: emulated (rounds where an engine stores) or onnxruntime."
    ),
    builds: int = typer.Option(0, min=0, help="Build this often at most; 0: until the set is minimal."),
    jobs: Jobs = 1,
    cluster: Cluster = "",
    level: shared.Level = "all",
    check: shared.Check = None,
    fail_code: shared.FailCode = None,
    ignore_fail_code: shared.IgnoreFailCode = None,
    fail_regex: shared.FailRegex = None,
    check_timeout: shared.CheckTimeout = None,
    show_output: shared.ShowOutput = False,
    hide_fail_output: shared.HideFailOutput = False,
    artifacts: shared.Artifacts = None,
    art_dir: shared.ArtDir = ART_DIR,
    iter_artifact: shared.IterArtifact = Path("polygraphy_debug.onnx"),
    iter_info: shared.IterInfo = ITER_INFO,
    no_remove_intermediate: shared.KeepIntermediate = False,
    load_debug_replay: shared.LoadReplay = None,
    save_debug_replay: shared.SaveReplay = None,
    json_file: shared.Json = None,
) -> None:
    """Find operators that must stay in float32. The model is written with casts around them."""
    from ditto_core.debug.graph import Graph
    from ditto_core.debug.oracle import Reference
    from ditto_core.debug.precision import find_precision
    from ditto_core.debug.trials import Elsewhere, PrecisionOptions
    from ditto_core.engines.workers import executor_of, kept_open
    from ditto_core.engines.workspace import Workspace

    shared.check_output(context)
    feed = shared.feed_of(context, Graph.load(model))
    if not feed:
        raise UsageError("give --inputs FILE: operators are ranked, and judged, on real data")
    good = shared.reference_of(context) if reference or reference_precision else Reference(precision="float32")
    options = PrecisionOptions(model, feed, good, keep, engine, level, tolerance, builds)
    iteration, run = shared.iteration_options(context, shared.check_of(context)), executor_of(jobs, cluster)
    with shared.Screen(f"searching {model.name}") as screen, kept_open(run):
        elsewhere = Elsewhere(run, Workspace(say=screen.say)) if cluster or jobs > 1 else None
        found = find_precision(options, iteration, output, screen.say, elsewhere)
    write_json(json_file or output.with_suffix(".json"), found.to_json())
    typer.echo(found.summary(keep))
    typer.echo(str(found.output))


@app.command("build", cls=shared.CheckingCommand)
def build(
    context: typer.Context,
    until: shared.UntilWord,
    model: Path = typer.Argument(help="The ONNX model."),
    backend: str = typer.Option("onnxruntime", help="onnxruntime or tensorrt."),
    option: shared.BuildOption = None,
    inputs: shared.Inputs = None,
    step: shared.Step = 0,
    reference: shared.ReferenceModel = None,
    reference_precision: shared.Precision = "",
    expected: shared.Expected = None,
    tolerance: shared.ToleranceBound = 0.0,
    level: shared.Level = "all",
    check: shared.Check = None,
    fail_code: shared.FailCode = None,
    ignore_fail_code: shared.IgnoreFailCode = None,
    fail_regex: shared.FailRegex = None,
    check_timeout: shared.CheckTimeout = None,
    show_output: shared.ShowOutput = False,
    hide_fail_output: shared.HideFailOutput = False,
    artifacts: shared.Artifacts = None,
    art_dir: shared.ArtDir = ART_DIR,
    iter_artifact: shared.OwnArtifact = None,
    iter_info: shared.IterInfo = ITER_INFO,
    no_remove_intermediate: shared.KeepIntermediate = False,
    load_debug_replay: shared.LoadReplay = None,
    save_debug_replay: shared.SaveReplay = None,
    json_file: shared.Json = None,
) -> None:
    """Build again and again, from nothing. Engines are sorted into good and bad; how far builds spread is measured."""
    from ditto_core.cli.build import pair
    from ditto_core.compare.tolerance import TABLE
    from ditto_core.debug.builds import make_builder
    from ditto_core.debug.graph import Graph
    from ditto_core.debug.iterations import Until
    from ditto_core.debug.loops import BuildLoop
    from ditto_core.debug.oracle import main_dtype

    graph = Graph.load(model)
    feed = shared.feed_of(context, graph)
    given = bool(reference or reference_precision or expected)
    good = shared.reference_of(context).outputs(graph, feed) if given else {}
    builder = make_builder(backend, model, shared.engine_of(context), dict(pair(o, "--option") for o in option or []))
    iteration = shared.iteration_options(context, shared.check_of(context))
    loop = BuildLoop(model, builder, feed, good, tolerance or TABLE[main_dtype(graph)], iteration)
    with shared.Screen(f"building {model.name}") as screen:
        tally = loop.run(Until.parse(until), screen.say)
    write_json(json_file, tally.to_json())
    typer.echo(tally.summary())


@app.command("repeat", cls=shared.CheckingCommand)
def repeat(
    context: typer.Context,
    until: shared.UntilWord,
    command: list[str] = typer.Argument(None, help="The command, after --; or give it as --check."),
    check: shared.Check = None,
    fail_code: shared.FailCode = None,
    ignore_fail_code: shared.IgnoreFailCode = None,
    fail_regex: shared.FailRegex = None,
    check_timeout: shared.CheckTimeout = None,
    show_output: shared.ShowOutput = False,
    hide_fail_output: shared.HideFailOutput = False,
    artifacts: shared.Artifacts = None,
    art_dir: shared.ArtDir = ART_DIR,
    iter_info: shared.IterInfo = ITER_INFO,
    no_remove_intermediate: shared.KeepIntermediate = False,
    load_debug_replay: shared.LoadReplay = None,
    save_debug_replay: shared.SaveReplay = None,
    json_file: shared.Json = None,
) -> None:
    """Run any command again and again. The files that it writes are sorted into good and bad."""
    from ditto_core.debug.iterations import Until
    from ditto_core.debug.loops import repeat as run

    if command and not check:
        context.params["check"] = shared.SEPARATOR.join(command)
    given = shared.required_check(context, "the iterations")
    with shared.Screen("repeating") as screen:
        tally = run(given, Until.parse(until), shared.iteration_options(context, given), screen.say)
    write_json(json_file, tally.to_json())
    typer.echo(tally.summary())


@app.command("diff-tactics")
def diff_tactics(
    directory: Path = typer.Option(ART_DIR, "--dir", help="Folder with good/ and bad/, as `build` leaves it."),
    good: Path = typer.Option(None, help="Folder of the good builds, instead of DIR/good."),
    bad: Path = typer.Option(None, help="Folder of the bad builds, instead of DIR/bad."),
    json_file: shared.Json = None,
) -> None:
    """Show what only bad builds are made of. Timing-cache entries and layers' kernels."""
    from ditto_core.debug.tactics import diff_tactics as compare

    found = compare(good or directory / "good", bad or directory / "bad")
    write_json(json_file, found.to_json())
    if found.note:
        typer.echo(found.note, err=True)
    typer.echo(f"{len(found.suspects)} choices only in bad builds ({found.good} good, {found.bad} bad builds)")
    for choice in found.suspects:
        typer.echo(f"  {'certain ' if choice in found.certain else ''}{choice.kind}: {choice}")


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    """Write a result where the user wants it; folders above it are made, as for the model."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(data, indent=1, default=str) + "\n")
