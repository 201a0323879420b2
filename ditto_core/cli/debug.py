"""`ditto debug`: reduce a failing model, find the operators that need precision, sort good builds from bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ditto_core.cli import debug_options as shared

app = typer.Typer(no_args_is_help=True, help=__doc__)

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
    """Reduce a failing ONNX model to the smallest part that fails, cut at captured activations."""
    from ditto_core.debug.graph import Graph
    from ditto_core.debug.reduce import ReduceOptions, reduce_model

    feed = shared.feed_of(context, Graph.load(model))
    options = ReduceOptions(model, feed, shared.reference_of(context), shared.engine_of(context), tolerance)
    with shared.Screen(f"reducing {model.name}") as screen:
        found = reduce_model(options, shared.iteration_options(context, shared.check_of(context)), output, screen.say)
    write_json(json_file, found.to_json())
    names = ", ".join(found.labels[:8]) + (" …" if len(found.labels) > 8 else "")
    counts = f"{len(found.nodes)} of {found.total} nodes fail by themselves"
    typer.echo(f"{counts} ({found.judged} checks, {found.seconds:.1f} s): {names}")
    typer.echo(str(found.output))


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    """Write a result where the user wants it."""
    if path is not None:
        path.write_text(json.dumps(data, indent=1, default=str) + "\n")
