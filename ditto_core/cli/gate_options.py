"""Options that `ditto gate run` and `ditto calibrate` share, and the settings that they make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ditto_core.cli.engine_options import dimension, key_value
from ditto_core.errors import UsageError

if TYPE_CHECKING:
    from ditto_core.gates.settings import GateSettings

Name = Annotated[str, typer.Argument(help="A gate of pyproject.toml: [tool.ditto_core.gates.NAME].")]
Model = Annotated[str, typer.Option(help="Hub id, model directory or GGUF file.")]
Backend = Annotated[str, typer.Option(help="Engine to build for [default: onnxruntime].")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16 [default: float32].")]
SuiteName = Annotated[str, typer.Option(help="JSONL file, classics or classics-choice [default: classics].")]
Samples = Annotated[int | None, typer.Option(help="Only the first N samples.")]
Reference = Annotated[str, typer.Option(help="eager, eager:DTYPE, or a backend (without --option) [default: eager].")]
Limit = Annotated[list[str] | None, typer.Option(help="METRIC=BOUND, or METRIC=none; repeatable.")]
Alpha = Annotated[float | None, typer.Option(help="Chance that a healthy engine fails [default: 0.05].")]
Beta = Annotated[float | None, typer.Option(help="Chance to miss the smallest effect [default: 0.2].")]
Seed = Annotated[int | None, typer.Option(help="Of the bootstrap [default: 0].")]
NewTokens = Annotated[int | None, typer.Option(help="After each prompt [default: 16].")]
Device = Annotated[str | None, typer.Option(help="Where the reference runs: cpu, cuda, cuda:1 [default: cpu].")]
Batch = Annotated[int | None, typer.Option(help="Samples at once [default: 1 on the CPU, 16 on a GPU].")]
Threads = Annotated[int | None, typer.Option(help="Of torch [default: 1]; 0 leaves them as they are.")]
BaselineFile = Annotated[Path | None, typer.Option(help="Take the reference's results from this file.")]
Jobs = Annotated[int, typer.Option(help="Local processes.")]
Cluster = Annotated[str, typer.Option(help="Run on the Dask cluster at this address, tcp://host:8786.")]
CacheDir = Annotated[str, typer.Option(help="Cache directory, or fsspec URL (or DITTO_CACHE_DIR).")]

PLAIN = (
    "model",
    "backend",
    "dtype",
    "samples",
    "reference",
    "alpha",
    "beta",
    "seed",
    "max_new_tokens",
    "device",
    "threads",
    "batch",
)
"""Options whose value is the setting of the same name."""


def settings_of(context: typer.Context) -> GateSettings:
    """Return the settings of the gate that a command names, none without a name, with its options on top."""
    from ditto_core.gates.settings import GateSettings, project_gate

    given = context.params
    settings = project_gate(Path.cwd(), given["name"]) if given["name"] else GateSettings()
    suite, baseline = given["suite"], given.get("baseline")
    return settings.over(
        options=dict(key_value(text, "--option") for text in given["option"] or []),
        profile=dict(dimension(text) for text in given["profile"] or []),
        limits=dict(limit_of(text) for text in given.get("limit") or []),
        suite=str(Path(suite).absolute()) if Path(suite).is_file() else suite,
        baseline=str(baseline.absolute()) if baseline else None,
        **{name: given.get(name) for name in PLAIN},
    )


def limit_of(text: str) -> tuple[str, str]:
    """Split ``METRIC=BOUND``."""
    name, equals, bound = text.partition("=")
    if not (name and equals and bound):
        raise UsageError(f"--limit got {text!r}, expected METRIC=BOUND such as kl_mean=0.01")
    return name, bound
