"""`ditto build`: a model becomes a cached engine with extra outputs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ditto_core.errors import UsageError
from ditto_core.spec import ALL_SITES, EngineSpec
from ditto_core.visible import visible

ADD_OUTPUT_VARIABLE = "TRTLLM_ADD_OUTPUT"


def command(
    model: Annotated[str, typer.Argument(help="Hub id, directory, GGUF file, or FILE.py:NAME of a callable.")],
    directory: Annotated[
        Path | None, typer.Argument(metavar="[OUTPUT_DIR]", help="Copy the engine here; else it stays in the cache.")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="The same, as an option.")] = None,
    backend: Annotated[str, typer.Option(help="Engine to build for.")] = "onnxruntime",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    add_output: Annotated[
        list[str] | None,
        typer.Option(help="Selector (model.layers.*.mlp), raw name (fx:NODE, onnx:VALUE) or NAME=ALIAS; repeatable."),
    ] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="DIM=MIN,OPT,MAX for batch, length or past; repeatable.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the backend; repeatable.")] = None,
    attention: Annotated[str, typer.Option(help="eager or sdpa.")] = "eager",
    artifacts_dir: Annotated[
        Path | None, typer.Option(help="Write readable by-products here (or DEBUG_ARTIFACTS_DIR).")
    ] = None,
    cache_dir: Annotated[str | None, typer.Option(help="Cache directory or fsspec URL (or DITTO_CACHE_DIR).")] = None,
) -> None:
    """Build an engine with extra outputs. Prints its directory."""
    from ditto_core.cli import screen
    from ditto_core.cli.model_argument import read_model
    from ditto_core.engines.staged import copy_engine

    if directory and output_dir and directory != output_dir:
        raise UsageError(f"two output directories, {directory} and {output_dir}: give one")
    output_dir = output_dir or directory
    spec = EngineSpec.of(
        read_model(model),
        backend=backend,
        dtype=dtype,
        outputs=outputs(add_output or [], os.environ.get(ADD_OUTPUT_VARIABLE, "")),
        profile=dict(sizes(text) for text in profile or []),
        options=dict(pair(text, "--option") for text in option or []),
        attention=attention,
    )
    workspace = screen.workspace(cache_dir, artifacts_dir)
    engine = workspace.build(spec)
    if output_dir is not None:
        engine = copy_engine(workspace, engine, output_dir)
    for site, reason in engine.refused.items():
        typer.echo(visible(f"ditto: {site} is no output: {reason}"), err=True)
    typer.echo(f"{len(engine.taps)} extra outputs", err=True)
    typer.echo(str(engine.directory))


def outputs(names: list[str], variable: str) -> Mapping[str, str] | tuple[str, ...]:
    """Merge ``--add-output`` with ``TRTLLM_ADD_OUTPUT`` (JSON, raw name -> alias); every module when both are empty.

    Raises :class:`UsageError` when the variable holds no JSON object of strings.
    """
    aliases: dict[str, str] = {}
    if variable:
        try:
            aliases = json.loads(variable)
        except ValueError as error:
            raise UsageError(f"{ADD_OUTPUT_VARIABLE} is no JSON, expected {{raw name: alias}}: {error}") from error
        if not isinstance(aliases, dict) or not all(isinstance(v, str) for v in aliases.values()):
            raise UsageError(f"{ADD_OUTPUT_VARIABLE} is {variable!r}, expected a JSON object {{raw name: alias}}")
    plain = [name for name in names if "=" not in name]
    aliases |= dict(pair(name, "--add-output") for name in names if "=" in name)
    if not aliases:
        return tuple(plain) or ALL_SITES
    return aliases | {name: name for name in plain}


def pair(text: str, option: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE``."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UsageError(f"{option} got {text!r}, expected KEY=VALUE")
    return key, int(value) if value.isdigit() else value


def sizes(text: str) -> tuple[str, tuple[int, int, int]]:
    """Read ``DIM=MIN,OPT,MAX``."""
    name, _, numbers = text.partition("=")
    parts = numbers.split(",")
    if len(parts) != 3 or not all(p.strip().isdigit() for p in parts):
        raise UsageError(f"--profile got {text!r}, expected DIM=MIN,OPT,MAX such as batch=1,1,4")
    low, typical, high = map(int, parts)
    return name, (low, typical, high)
