"""`ditto gate`: run an accuracy gate, merge its shards, check a result. Exit code 0: passed, 1: failed, 2: unusable."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ditto_core.cli import gate_options as shared
from ditto_core.cli import screen
from ditto_core.cli.engine_options import BuildOption, Profile, Trust
from ditto_core.cli.results import writable
from ditto_core.errors import UsageError
from ditto_core.system.files import check_kept
from ditto_core.system.sizes import format_age, parse_age
from ditto_core.visible import lines

if TYPE_CHECKING:
    from ditto_core.gates import Baseline, GateResult
    from ditto_core.gates.settings import GateSettings

app = typer.Typer(no_args_is_help=True, help="Run, merge and check accuracy gates.")

Output = Annotated[Path, typer.Option("--output", help="Write the result (JSON) here.", callback=writable)]
RESULT = Path("gate.json")


@app.command("run")
def run(
    context: typer.Context,
    name: shared.Name = "",
    model: shared.Model = "",
    backend: shared.Backend = "",
    dtype: shared.Dtype = "",
    option: BuildOption = None,
    profile: Profile = None,
    suite: shared.SuiteName = "",
    samples: shared.Samples = None,
    reference: shared.Reference = "",
    limit: shared.Limit = None,
    alpha: shared.Alpha = None,
    beta: shared.Beta = None,
    seed: shared.Seed = None,
    max_new_tokens: shared.NewTokens = None,
    device: shared.Device = None,
    threads: shared.Threads = None,
    batch: shared.Batch = None,
    baseline: shared.BaselineFile = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Run the reference and write the baseline anew.")
    ] = False,
    shard: Annotated[str, typer.Option(help="NUMBER/COUNT: run this share only, for `ditto gate merge`.")] = "1/1",
    jobs: shared.Jobs = 1,
    cluster: shared.Cluster = "",
    trust_remote_code: Trust = False,
    output: Output = RESULT,
    cache_dir: shared.CacheDir = "",
) -> None:
    """Run a gate. What it can detect is printed first; an interrupted run goes on where it stopped."""
    from ditto_core.engines.workers import executor_of
    from ditto_core.gates.gate import run_gate
    from ditto_core.gates.shards import Shard
    from ditto_core.gates.text import plan
    from ditto_core.system.files import check_writable

    settings = shared.settings_of(context)
    settings.check_kept(output, update=update_baseline)
    gate, part, execute = settings.gate(trust=trust_remote_code), Shard.parse(shard), executor_of(jobs, cluster)
    known = baseline_of(settings, update_baseline, part)
    if update_baseline and settings.baseline:
        check_writable(settings.baseline)
    for line in plan(gate.suite, gate.policy, gate.dtype):
        typer.echo(line, err=True)
    workspace = screen.workspace(cache_dir)
    on_sample = screen.counter(gate.suite.name)
    result = run_gate(gate, workspace, shard=part, baseline=known, run=execute, on_sample=on_sample)
    result.save(output)
    if update_baseline and settings.baseline:
        save_baseline(result, settings.baseline)
    finish(result, output)


@app.command("merge")
def merge_shards(
    shards: Annotated[list[Path], typer.Argument(help="Results of all shards.")], output: Output = RESULT
) -> None:
    """Put shards together and judge them. A sample that none of them has is a failure."""
    from ditto_core.gates.result import GateResult, merge

    check_kept({"--output": output}, {f"shard {path}": path for path in shards})
    result = merge([GateResult.load(path) for path in shards])
    result.save(output)
    finish(result, output)


@app.command("check")
def check(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[NAME] RESULT", help="Result of `ditto gate run` or `merge`, and the gate it is of."),
    ],
    max_age: Annotated[str, typer.Option(help="Refuse what is older, for instance 7d.")] = "",
    commit: Annotated[str, typer.Option(help="Refuse what another commit produced.")] = "",
    gpu: Annotated[str, typer.Option(help="Refuse what ran on no GPU whose name holds this.")] = "",
) -> None:
    """Check a result of another machine. Is it whole, unchanged, fresh, and passed by its own records?

    With NAME, also: is it of the suite, model, engine and limits of [tool.ditto_core.gates.NAME]?
    """
    from ditto_core.gates.result import GateResult
    from ditto_core.gates.settings import project_gate

    if len(words) > 2:
        raise UsageError(f"gate check got {len(words)} arguments, expected a result, or a gate's name and a result")
    oldest, path = parse_age(max_age) if max_age else None, Path(words[-1])
    gate = project_gate(Path.cwd(), words[0]).gate() if len(words) == 2 else None
    result = GateResult.load(path)
    for line in receipt_lines(result):
        typer.echo(lines(line))
    strange = gate.differences(result) if gate else []
    for problem in [*strange, *objections(result, oldest, commit, gpu)]:
        typer.echo(lines(f"ditto: {path}: {problem}"), err=True)
        raise typer.Exit(1)
    show(result)
    raise typer.Exit(0 if result else 1)


def baseline_of(settings: GateSettings, update: bool, shard: Any) -> Baseline | None:
    """Load the baseline that a run compares with. Raises :class:`UsageError`."""
    from ditto_core.gates.baseline import Baseline

    if update and (settings.baseline is None or str(shard)):
        raise UsageError("--update-baseline needs --baseline FILE, and a run of all shards")
    return Baseline.load(settings.baseline) if settings.baseline and not update else None


def save_baseline(result: GateResult, path: Path) -> None:
    """Write the reference's results of a run as a baseline."""
    from ditto_core.gates.baseline import Baseline

    Baseline.of(result).save(path)
    typer.echo(f"{len(result.ids)} samples in {path}: review and commit it", err=True)


def finish(result: GateResult, output: Path) -> None:
    """Show a result and exit as it says; a shard alone is not judged."""
    for note in result.notes:
        typer.echo(lines(f"ditto: warning: {note}"), err=True)
    if result.shard:
        typer.echo(f"shard {result.shard}: {len(result.records)} of {len(result.ids)} samples in {output}")
        return
    show(result)
    typer.echo(f"result in {output}", err=True)
    raise typer.Exit(0 if result else 1)


def show(result: GateResult) -> None:
    """Print verdict and table."""
    from ditto_core.gates.text import table

    typer.echo(lines(result.summary))
    if text := table(result):
        typer.echo(lines(text))


def receipt_lines(result: GateResult) -> list[str]:
    """Return a line about each run that the result came from."""
    now = time.time()
    return [f"{format_age(now - receipt.created)} ago, {receipt.summary}" for receipt in result.receipts]


def objections(result: GateResult, max_age: float | None, commit: str, gpu: str) -> list[str]:
    """Return what speaks against a result before its numbers are looked at."""
    found = [] if result.receipts else ["it has no receipt"]
    for receipt in result.receipts:
        age = time.time() - receipt.created
        if max_age is not None and not -300 <= age <= max_age:
            found.append(f"it is {format_age(age)} old, expected at most {format_age(max_age)}")
        if commit and not (receipt.commit and receipt.commit.startswith(commit)):
            found.append(f"it is of commit {receipt.commit or 'unknown'}, expected {commit}")
        if commit and receipt.commit.endswith("+"):
            found.append(f"files differed from commit {receipt.commit[:12]} when it was made")
        if gpu and gpu.lower() not in receipt.machine.get("gpu", "").lower():
            found.append(f"it ran on gpu {receipt.machine.get('gpu', 'none')}, expected {gpu}")
    return found
