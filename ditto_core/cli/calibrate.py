"""`ditto calibrate`: tolerances from what a healthy engine measures on a suite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[str, typer.Argument(help="A gate of pyproject.toml: [tool.ditto_core.gates.NAME].")] = "",
    model: Annotated[str, typer.Option(help="Hub id, model directory or GGUF file.")] = "",
    backend: Annotated[str, typer.Option(help="Engine to build for [default: onnxruntime].")] = "",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 [default: float32].")] = "",
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the backend; repeatable.")] = None,
    add_output: Annotated[
        list[str] | None, typer.Option(help="Selector of sites; repeatable [default: every module].")
    ] = None,
    suite: Annotated[str, typer.Option(help="JSONL file, classics or classics-choice [default: classics].")] = "",
    samples: Annotated[int | None, typer.Option(help="Only the first N samples.")] = None,
    reference: Annotated[str, typer.Option(help="eager, eager:DTYPE, or a backend [default: eager].")] = "",
    max_new_tokens: Annotated[int | None, typer.Option(help="After each prompt [default: 16].")] = None,
    jobs: Annotated[int, typer.Option(help="Local processes.")] = 1,
    cluster: Annotated[str, typer.Option(help="Run on the Dask cluster at this address, tcp://host:8786.")] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="TOML file of rules.")] = Path("tolerances.toml"),
    cache_dir: Annotated[str, typer.Option(help="Cache directory, or fsspec URL (or DITTO_CACHE_DIR).")] = "",
) -> None:
    """Step an engine beside its reference on every sample of a suite; write twice the worst errors as tolerances."""
    from ditto_core.cli import screen
    from ditto_core.cli.build import outputs, pair
    from ditto_core.cli.gate import progress, settings_of
    from ditto_core.compare.rules import write_rules
    from ditto_core.executor import executor_of
    from ditto_core.gates.calibration import Calibration, calibrate_suite

    settings = settings_of(name).over(
        model=model,
        backend=backend,
        dtype=dtype,
        options=dict(pair(text, "--option") for text in option or []),
        suite=str(Path(suite).absolute()) if Path(suite).is_file() else suite,
        samples=samples,
        reference=reference,
        max_new_tokens=max_new_tokens,
    )
    gate, run, workspace = settings.gate(), executor_of(jobs, cluster), screen.workspace(cache_dir)
    work = Calibration.of(gate, outputs(add_output or [], ""), workspace)
    measured = calibrate_suite(work, gate.suite, workspace, run=run, on_sample=progress(gate))
    typer.echo(f"{write_rules(measured, output)} rules in {output}: review and commit it", err=True)
