"""`ditto answers`: which site explains the answers that an engine lost. Exit code 0: none lost or none explained, 1: a
site is to blame, 2: none is, and some could not be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ditto_core.cli.engine_options import Backend, BuildOption, CacheDir, Dtype, Profile, Trust, settings
from ditto_core.cli.model_argument import engine_folder, load_engine, model_path, read_model
from ditto_core.cli.results import Json
from ditto_core.system.files import check_kept
from ditto_core.visible import visible

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine
    from ditto_core.engines.workspace import Workspace
    from ditto_core.pair.answers import Explained, Lost
    from ditto_core.pair.pair import Pair
    from ditto_core.spec import ModelSource


def command(
    source: Annotated[str, typer.Argument(help="Engine directory, or a model (Hub id, directory, GGUF file).")],
    engine_samples: Annotated[Path, typer.Argument(help="The engine's samples_*.jsonl of lm_eval --log_samples.")],
    reference_samples: Annotated[Path, typer.Argument(help="The reference's, of the same questions.")],
    metric: Annotated[str, typer.Option(help="Metric of 0 or 1 [default: the first in the file].")] = "",
    filter: Annotated[str, typer.Option("--filter", help="lm_eval's filter [default: the first in both files].")] = "",
    most: Annotated[int, typer.Option(min=1, help="Replay this many lost answers at most.")] = 20,
    backend: Backend = "onnxruntime",
    dtype: Dtype = "float32",
    profile: Profile = None,
    option: BuildOption = None,
    trust_remote_code: Trust = False,
    json_file: Json = None,
    cache_dir: CacheDir = None,
) -> None:
    """Count which sites explain lost answers. Those that only the reference got right are replayed."""
    from ditto_core.model.beside import check_model_kept
    from ditto_core.pair.answers import lost_answers, read_samples, tally
    from ditto_core.system.atomic import write_atomic

    samples = {"engine's samples": engine_samples, "reference's samples": reference_samples}
    results, folder = {"--json": json_file}, engine_folder(source)
    check_kept(results, samples)
    check_model_kept(results, {} if folder else {"model": model_path(source)})
    engine = load_engine(folder, results, trust_remote_code) if folder else None
    lost = lost_answers(read_samples(engine_samples), read_samples(reference_samples), metric, filter)
    typer.echo(f"{len(lost)} answers lost" + (f", the first {most} are replayed" if len(lost) > most else ""))
    built = settings(backend, dtype, profile, option)
    found = replayed(lost[:most], engine or read_model(source, trust_remote_code), cache_dir, built) if lost else []
    if json_file is not None:
        write_atomic(json_file, json.dumps([each.to_json() for each in found], indent=1) + "\n")
    for line in tally(found):
        typer.echo(visible(line))
    if any(each.site or not each.compared for each in found):
        raise typer.Exit(1 if any(each.site for each in found) else 2)


def replayed(
    lost: Sequence[Lost], source: Engine | ModelSource, cache_dir: str | None, built: Mapping[str, Any]
) -> list[Explained]:
    """Replay lost answers on the engine beside its model."""
    from ditto_core.cli import screen
    from ditto_core.pair.answers import explain

    pair = opened(screen.workspace(cache_dir), source, built)
    try:
        return explain(
            lost,
            lambda text: pair.generate([text], max_new_tokens=1, localize=True),
            lambda text: typer.echo(visible(text), err=True),
        )
    finally:
        pair.close()


def opened(workspace: Workspace, source: Engine | ModelSource, built: Mapping[str, Any]) -> Pair:
    """Return an engine beside its model, or one of the model that shows every site."""
    from ditto_core.localize import EVERYTHING
    from ditto_core.pair.pair import Pair
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.spec import EngineSpec, ModelSource

    options = PairOptions(observer=False)
    if not isinstance(source, ModelSource):
        return Pair(workspace, source.spec, options, engine=source)
    return Pair(workspace, EngineSpec.of(source, outputs=EVERYTHING, **built), options)
