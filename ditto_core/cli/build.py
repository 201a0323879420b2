"""`ditto build`: a model becomes a cached engine with extra outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ditto_core.cli.engine_options import (
    Attention,
    Backend,
    BuildOption,
    CacheDir,
    Dtype,
    Profile,
    Trust,
    key_value,
    settings,
)
from ditto_core.errors import UsageError
from ditto_core.spec import ALL_SITES, EngineSpec
from ditto_core.system.files import check_kept, parse_json
from ditto_core.visible import visible

ADD_OUTPUT_VARIABLE = "TRTLLM_ADD_OUTPUT"


def command(
    model: Annotated[str, typer.Argument(help="Hub id, directory, GGUF file, or FILE.py:NAME of a callable.")],
    directory: Annotated[
        Path | None, typer.Argument(metavar="[OUTPUT_DIR]", help="Copy the engine here; else it stays in the cache.")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="The same, as an option.")] = None,
    backend: Backend = "onnxruntime",
    dtype: Dtype = "float32",
    add_output: Annotated[
        list[str] | None,
        typer.Option(help="Selector (model.layers.*.mlp), raw name (fx:NODE, onnx:VALUE) or NAME=ALIAS; repeatable."),
    ] = None,
    profile: Profile = None,
    option: BuildOption = None,
    attention: Attention = "eager",
    artifacts_dir: Annotated[
        Path | None, typer.Option(help="Write readable by-products here (or DEBUG_ARTIFACTS_DIR).")
    ] = None,
    trust_remote_code: Trust = False,
    cache_dir: CacheDir = None,
) -> None:
    """Build an engine with extra outputs. Prints its directory."""
    from ditto_core.cli import screen
    from ditto_core.cli.model_argument import model_path, read_model
    from ditto_core.engines.staged import copy_engine

    if directory and output_dir and directory != output_dir:
        raise UsageError(f"two output directories, {directory} and {output_dir}: give one")
    output_dir = output_dir or directory
    check_kept({"OUTPUT_DIR": output_dir, "--artifacts-dir": artifacts_dir}, {"model": model_path(model)})
    spec = EngineSpec.of(
        read_model(model, trust_remote_code),
        outputs=outputs(add_output or [], os.environ.get(ADD_OUTPUT_VARIABLE, "")),
        **settings(backend, dtype, profile, option, attention),
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
            aliases = parse_json(variable)
        except ValueError as error:
            raise UsageError(f"{ADD_OUTPUT_VARIABLE} is no JSON, expected {{raw name: alias}}: {error}") from error
        if not isinstance(aliases, dict) or not all(isinstance(v, str) for v in aliases.values()):
            raise UsageError(f"{ADD_OUTPUT_VARIABLE} is {variable!r}, expected a JSON object {{raw name: alias}}")
    plain = [name for name in names if "=" not in name]
    aliases |= dict(key_value(name, "--add-output") for name in names if "=" in name)
    if not aliases:
        return tuple(plain) or ALL_SITES
    return aliases | {name: name for name in plain}
