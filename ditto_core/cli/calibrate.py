"""`ditto calibrate`: tolerances from what a healthy engine measures on a suite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ditto_core.cli import gate_options as shared
from ditto_core.cli.engine_options import BuildOption, Profile, Trust
from ditto_core.cli.results import writable


def command(
    context: typer.Context,
    name: shared.Name = "",
    model: shared.Model = "",
    backend: shared.Backend = "",
    dtype: shared.Dtype = "",
    option: BuildOption = None,
    profile: Profile = None,
    add_output: Annotated[
        list[str] | None, typer.Option(help="Selector of sites; repeatable [default: every module].")
    ] = None,
    suite: shared.SuiteName = "",
    samples: shared.Samples = None,
    reference: shared.Reference = "",
    max_new_tokens: shared.NewTokens = None,
    device: shared.Device = None,
    threads: shared.Threads = None,
    jobs: shared.Jobs = 1,
    cluster: shared.Cluster = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="TOML file of rules.", callback=writable)] = Path(
        "tolerances.toml"
    ),
    trust_remote_code: Trust = False,
    cache_dir: shared.CacheDir = "",
) -> None:
    """Write tolerances measured on a suite.

    Steps an engine beside its reference on every sample; the rules are twice the worst errors.
    """
    from ditto_core.cli import screen
    from ditto_core.cli.build import outputs
    from ditto_core.compare.tolerance_files import load_tolerance, write_rules
    from ditto_core.engines.workers import executor_of
    from ditto_core.gates.calibration import Calibration, calibrate_suite

    settings = shared.settings_of(context)
    settings.check_read({"--output": output})
    gate, execute = settings.gate(trust=trust_remote_code), executor_of(jobs, cluster)
    # A file that cannot be merged with is said before the run, not after it.
    known = load_tolerance(output) if output.exists() else None
    workspace = screen.workspace(cache_dir)
    work = Calibration.of(gate, outputs(add_output or [], ""), workspace, known)
    on_sample = screen.counter(gate.suite.name)
    measured = calibrate_suite(work, gate.suite, workspace, run=execute, on_sample=on_sample)
    typer.echo(f"{write_rules(measured, output)} rules in {output}: review and commit it", err=True)
