"""`ditto debug`: reduce a failing model, find the operators that need precision, sort good builds from bad ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from ditto_core.cli import debug_options as shared
from ditto_core.cli.debug_words import SEPARATOR, CheckingCommand
from ditto_core.cli.engine_options import BuildOption, key_value
from ditto_core.cli.gate_options import Cluster, Jobs
from ditto_core.cli.results import Json, writable
from ditto_core.errors import UsageError
from ditto_core.system.files import check_kept

app = typer.Typer(no_args_is_help=True, help="Reduce, bisect and repeat failing builds.")


@app.command("reduce", cls=CheckingCommand)
@shared.grouped
def reduce(
    good: shared.GoodSide,
    judgement: shared.Judgement,
    model: Path = typer.Argument(help="The failing ONNX model."),
    output: Path = typer.Option(
        Path("reduced.onnx"), "--output", "-o", help="Where the smallest failing model goes.", callback=writable
    ),
    expected: shared.Expected = None,
    iter_artifact: shared.IterArtifact = shared.ITER_ARTIFACT,
) -> None:
    """Find the smallest part that fails. An ONNX model is cut at captured activations."""
    from ditto_core.debug.reduce import ReduceOptions, reduce_model
    from ditto_core.graphs.graph import Graph

    sources = {"model": model, "reference": good.reference, "inputs": good.inputs, "expected": expected}
    shared.check_output(judgement, output, iter_artifact, **sources)
    feed = good.feed(Graph.load(model))
    options = ReduceOptions(model, feed, good.values(expected), good.engine, good.tolerance)
    with judgement.screen(f"reducing {model.name}") as screen:
        found = reduce_model(options, judgement.iterations(iter_artifact), output, screen.say)
    judgement.write(found.to_json())
    names = ", ".join(found.labels[:8]) + (" …" if len(found.labels) > 8 else "")
    counts = f"{len(found.nodes)} of {found.total} nodes fail by themselves"
    typer.echo(f"{counts} ({found.judged} checks, {found.seconds:.1f} s): {names}")
    typer.echo(str(found.output))


@app.command("precision", cls=CheckingCommand)
@shared.grouped
def precision(
    good: shared.GoodSide,
    judgement: shared.Judgement,
    model: Path = typer.Argument(help="A strongly typed float16 or bfloat16 ONNX model."),
    output: Path = typer.Option(
        Path("mixed.onnx"), "--output", "-o", help="Where the mixed-precision model goes.", callback=writable
    ),
    keep: str = typer.Option("float32", help="Dtype of the operators that are kept: float32 or bfloat16."),
    engine: str = typer.Option(
        "emulated", help="What judges without a --check: emulated (rounds where an engine stores) or onnxruntime."
    ),
    builds: int = typer.Option(0, min=0, help="Build this often at most; 0: until the set is minimal."),
    jobs: Jobs = 1,
    cluster: Cluster = "",
    iter_artifact: shared.IterArtifact = shared.ITER_ARTIFACT,
) -> None:
    """Find operators that must stay in float32. The model is written with casts around them."""
    from ditto_core.debug.precision import find_precision
    from ditto_core.debug.trials import Elsewhere, PrecisionOptions
    from ditto_core.engines.workers import executor_of, kept_open
    from ditto_core.engines.workspace import Workspace
    from ditto_core.graphs.graph import Graph

    judgement = replace(judgement, json_file=judgement.json_file or output.with_suffix(".json"))
    shared.check_output(judgement, output, iter_artifact, model=model, reference=good.reference, inputs=good.inputs)
    feed = good.feed(Graph.load(model))
    if not feed:
        raise UsageError("give --inputs FILE: operators are ranked, and judged, on real data")
    if not (good.reference or good.reference_precision):
        good = replace(good, reference_precision="float32")
    options = PrecisionOptions(model, feed, good.values(), keep, engine, good.level, good.tolerance, builds)
    iteration, run = judgement.iterations(iter_artifact), executor_of(jobs, cluster)
    with judgement.screen(f"searching {model.name}") as screen, kept_open(run):
        elsewhere = Elsewhere(run, Workspace(say=screen.say)) if cluster or jobs > 1 else None
        found = find_precision(options, iteration, output, screen.say, elsewhere)
    judgement.write(found.to_json())
    typer.echo(found.summary(keep))
    typer.echo(str(found.output))


@app.command("build", cls=CheckingCommand)
@shared.grouped
def build(
    until: shared.UntilWord,
    good: shared.GoodSide,
    judgement: shared.Judgement,
    model: Path = typer.Argument(help="The ONNX model."),
    backend: str = typer.Option("onnxruntime", help="onnxruntime, or a backend that builds from nothing: tensorrt."),
    option: BuildOption = None,
    expected: shared.Expected = None,
    iter_artifact: shared.OwnArtifact = None,
) -> None:
    """Build again and again, from nothing. Engines are sorted into good and bad; how far builds spread is measured."""
    from ditto_core.compare.tolerance import TABLE
    from ditto_core.debug.builds import make_builder
    from ditto_core.debug.iterations import Until
    from ditto_core.debug.loops import BuildLoop
    from ditto_core.debug.oracle import main_dtype
    from ditto_core.graphs.graph import Graph

    sources = {"model": model, "reference": good.reference, "inputs": good.inputs, "expected": expected}
    judgement.check_kept({"--iter-artifact": iter_artifact}, **sources)
    graph = Graph.load(model)
    feed = good.feed(graph)
    given = bool(good.reference or good.reference_precision or expected)
    values = good.values(expected).outputs(graph, feed) if given else {}
    builder = make_builder(backend, model, good.engine, dict(key_value(o, "--option") for o in option or []))
    bound, iteration = good.tolerance or TABLE[main_dtype(graph)], judgement.iterations(iter_artifact)
    loop = BuildLoop(model, builder, feed, values, bound, iteration)
    with judgement.screen(f"building {model.name}") as screen:
        tally = loop.run(Until.parse(until), screen.say)
    judgement.write(tally.to_json())
    typer.echo(tally.summary())


@app.command("repeat", cls=CheckingCommand)
@shared.grouped
def repeat(
    until: shared.UntilWord,
    judgement: shared.Judgement,
    command: list[str] = typer.Argument(None, help="The command, after --; or give it as --check."),
) -> None:
    """Run any command again and again. The files that it writes are sorted into good and bad."""
    from ditto_core.debug.iterations import Until
    from ditto_core.debug.loops import repeat as run

    judgement.check_kept()
    if command and not judgement.check:
        judgement = replace(judgement, check=SEPARATOR.join(command))
    check = judgement.judge()
    if check is None:
        raise UsageError("nothing judges the iterations: give --check COMMAND or --interactive")
    with judgement.screen("repeating") as screen:
        tally = run(check, Until.parse(until), judgement.iterations(), screen.say)
    judgement.write(tally.to_json())
    typer.echo(tally.summary())


@app.command("bisect", cls=CheckingCommand)
@shared.grouped
def bisect(
    judgement: shared.Judgement,
    values: list[str] = typer.Argument(help="Versions, commits or flags: the first is good, the last is bad."),
    skip_code: list[int] = typer.Option([125], help="Exit status of a value that cannot be judged; repeatable."),
) -> None:
    """Find the first version, commit or flag that fails. Its place in the check's command is {}."""
    from ditto_core.debug.bisect import bisect as search
    from ditto_core.debug.person import SKIPPED

    judgement.check_kept()
    skip = {*skip_code, SKIPPED} if judgement.interactive else skip_code
    with judgement.screen("bisecting") as screen:
        found = search(values, judgement.iterations(skips=True), screen.say, skip)
    judgement.write(found.to_json())
    typer.echo(found.summary)


@app.command("diff-tactics")
def diff_tactics(
    directory: Path = typer.Option(shared.ART_DIR, "--dir", help="Folder with good/ and bad/, as `build` leaves it."),
    good: Path = typer.Option(None, help="Folder of the good builds, instead of DIR/good."),
    bad: Path = typer.Option(None, help="Folder of the bad builds, instead of DIR/bad."),
    json_file: Json = None,
) -> None:
    """Show what only bad builds are made of. Timing-cache entries and layers' kernels."""
    from ditto_core.debug.tactics import diff_tactics as compare

    good, bad = good or directory / "good", bad or directory / "bad"
    check_kept({"--json": json_file}, {"good builds": good, "bad builds": bad})
    found = compare(good, bad)
    shared.write_json(json_file, found.to_json())
    if found.note:
        typer.echo(found.note, err=True)
    typer.echo(f"{len(found.suspects)} choices only in bad builds ({found.good} good, {found.bad} bad builds)")
    for choice in found.suspects:
        typer.echo(f"  {'certain ' if choice in found.certain else ''}{choice.kind}: {choice}")
