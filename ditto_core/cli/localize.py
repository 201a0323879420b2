"""`ditto localize`: which site adds the error, and why.

Exit code 0: none, 1: a site is to blame or results differ, 2: no local error was measured.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ditto_core.cli.engine_options import (
    Attention,
    Backend,
    BuildOption,
    CacheDir,
    Dtype,
    InputIds,
    InputText,
    Profile,
    Trust,
    parse_ids,
    settings,
)
from ditto_core.cli.model_argument import engine_folder, load_engine, model_path
from ditto_core.cli.results import Json
from ditto_core.errors import UsageError
from ditto_core.system.atomic import write_atomic

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.engines.engine import Engine
    from ditto_core.engines.workspace import Workspace
    from ditto_core.spec import EngineSpec


def command(
    source: Annotated[str, typer.Argument(help="Engine directory, or a model (Hub id, directory, GGUF file).")],
    input_text: InputText = None,
    input_ids: InputIds = None,
    max_output_len: Annotated[int, typer.Option(help="Steps: a prefill, then decoding.")] = 4,
    backend: Backend = "onnxruntime",
    dtype: Dtype = "float32",
    profile: Profile = None,
    option: BuildOption = None,
    attention: Attention = "eager",
    fp32: Annotated[bool, typer.Option("--fp32", help="Build in float32: shows what hides below rounding.")] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="Build once more and name the operator inside the first blamed site.")
    ] = False,
    trust_remote_code: Trust = False,
    json_file: Json = None,
    cache_dir: CacheDir = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every site.")] = False,
) -> None:
    """Name the site that adds the error, and why. One build and one run."""
    from ditto_core.cli import screen
    from ditto_core.cli.model_argument import read_model
    from ditto_core.compare.text import headline
    from ditto_core.localize import EVERYTHING
    from ditto_core.model.beside import check_model_kept
    from ditto_core.pair.localizing import required
    from ditto_core.report.localization import localization_text
    from ditto_core.spec import EngineSpec

    prompts: list[str | list[int]] = [*(input_text or []), *(parse_ids(text) for text in input_ids or [])]
    folder = engine_folder(source)
    results, workspace = {"--json": json_file}, screen.workspace(cache_dir)
    if folder:
        if fp32 or operators or profile or option:
            raise UsageError(
                "--fp32, --operators, --profile and --option build an engine: give the model in place of the directory"
            )
        engine = load_engine(folder, results, trust_remote_code)
        comparison = localize_engine(workspace, engine, prompts, max_output_len)
    else:
        check_model_kept(results, {"model": model_path(source)})
        built = settings(backend, dtype, profile, option, attention)
        spec = EngineSpec.of(read_model(source, trust_remote_code), outputs=EVERYTHING, **built)
        comparison = localize_model(workspace, spec, prompts, max_output_len, fp32, operators)
    found = required(comparison)
    if json_file is not None:
        write_atomic(json_file, json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
    typer.echo(localization_text(found, verbose=verbose))
    if not found.blamed and not comparison:
        typer.echo(f"no site is to blame, but {headline(comparison)}")
    if found.blamed or not comparison:
        raise typer.Exit(1)
    if not found.measured:
        raise typer.Exit(2)


def localize_engine(workspace: Workspace, engine: Engine, prompts: list[str | list[int]], steps: int) -> Comparison:
    """Localize with the very engine in a directory, at the sites that it shows."""
    from ditto_core.pair.pair import Pair
    from ditto_core.pair.pair_options import PairOptions

    pair = Pair(workspace, engine.spec, PairOptions(observer=False), engine=engine)
    if not engine.decoder:
        return pair.run(localize=True)
    return pair.generate(prompts, max_new_tokens=steps, localize=True)


def localize_model(
    workspace: Workspace,
    spec: EngineSpec,
    prompts: list[str | list[int]],
    steps: int,
    fp32: bool,
    operators: bool,
) -> Comparison:
    """Build a model with every site tapped and localize."""
    from ditto_core.pair.pair import Pair
    from ditto_core.pair.pair_options import PairOptions

    pair = Pair(workspace, spec, PairOptions(observer=False))
    return pair.localize(prompts or None, max_new_tokens=steps, fp32=fp32, operators=operators)
