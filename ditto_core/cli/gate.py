"""`ditto gate`: run an accuracy gate, merge its shards, check a result. Exit code 0: passed, 1: failed, 2: unusable."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ditto_core.errors import UsageError
from ditto_core.units import format_age, parse_age

if TYPE_CHECKING:
    from ditto_core.gates import Baseline, Gate, GateResult
    from ditto_core.gates.settings import GateSettings

app = typer.Typer(no_args_is_help=True, help="Accuracy gates: run, merge shards, check a result.")

Output = Annotated[Path, typer.Option("--output", help="Write the result (JSON) here.")]
RESULT = Path("gate.json")


@app.command("run")
def run(
    name: Annotated[str, typer.Argument(help="A gate of pyproject.toml: [tool.ditto_core.gates.NAME].")] = "",
    model: Annotated[str, typer.Option(help="Hub id, model directory or GGUF file.")] = "",
    backend: Annotated[str, typer.Option(help="Engine to build for [default: onnxruntime].")] = "",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 [default: float32].")] = "",
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the backend; repeatable.")] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="DIM=MIN,OPT,MAX for batch, length or past; repeatable.")
    ] = None,
    suite: Annotated[str, typer.Option(help="JSONL file, classics or classics-choice [default: classics].")] = "",
    samples: Annotated[int | None, typer.Option(help="Only the first N samples.")] = None,
    reference: Annotated[
        str, typer.Option(help="eager, eager:DTYPE, or a backend (without --option) [default: eager].")
    ] = "",
    limit: Annotated[list[str] | None, typer.Option(help="METRIC=BOUND, or METRIC=none; repeatable.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Chance that a healthy engine fails [default: 0.05].")] = None,
    beta: Annotated[float | None, typer.Option(help="Chance to miss the smallest effect [default: 0.2].")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the bootstrap [default: 0].")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="After each prompt [default: 16].")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Take the reference's results from this file.")] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Run the reference and write the baseline anew.")
    ] = False,
    shard: Annotated[str, typer.Option(help="NUMBER/COUNT: run this share only, for `ditto gate merge`.")] = "1/1",
    jobs: Annotated[int, typer.Option(help="Local processes.")] = 1,
    cluster: Annotated[str, typer.Option(help="Run on the Dask cluster at this address, tcp://host:8786.")] = "",
    output: Output = RESULT,
    cache_dir: Annotated[str, typer.Option(help="Cache directory, or fsspec URL (or DITTO_CACHE_DIR).")] = "",
) -> None:
    """Run a gate. What it can detect is printed first; an interrupted run goes on where it stopped."""
    from ditto_core.cli import screen
    from ditto_core.cli.build import pair, sizes
    from ditto_core.executor import executor_of
    from ditto_core.gates.gate import run_gate
    from ditto_core.gates.shards import Shard
    from ditto_core.gates.text import plan

    settings = settings_of(name).over(
        model=model,
        backend=backend,
        dtype=dtype,
        options=dict(pair(text, "--option") for text in option or []),
        profile=dict(sizes(text) for text in profile or []),
        suite=str(Path(suite).absolute()) if Path(suite).is_file() else suite,
        samples=samples,
        reference=reference,
        limits=dict(limit_of(text) for text in limit or []),
        alpha=alpha,
        beta=beta,
        seed=seed,
        max_new_tokens=max_new_tokens,
        baseline=str(baseline.absolute()) if baseline else None,
    )
    gate, part = settings.gate(), Shard.parse(shard)
    known = baseline_of(settings, update_baseline, part)
    for line in plan(gate.suite, gate.policy):
        typer.echo(line, err=True)
    result = run_gate(
        gate,
        screen.workspace(cache_dir),
        shard=part,
        baseline=known,
        run=executor_of(jobs, cluster),
        on_sample=progress(gate),
    )
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

    result = merge([GateResult.load(path) for path in shards])
    result.save(output)
    finish(result, output)


@app.command("check")
def check(
    path: Annotated[Path, typer.Argument(metavar="RESULT", help="Result of `ditto gate run` or `merge`.")],
    max_age: Annotated[str, typer.Option(help="Refuse what is older, for instance 7d.")] = "",
    commit: Annotated[str, typer.Option(help="Refuse what another commit produced.")] = "",
    gpu: Annotated[str, typer.Option(help="Refuse what ran on no GPU whose name holds this.")] = "",
) -> None:
    """Check a result that another machine produced: whole, unchanged, fresh, and passed by its own records."""
    from ditto_core.gates.result import GateResult

    result = GateResult.load(path)
    for line in receipt_lines(result):
        typer.echo(line)
    for problem in objections(result, parse_age(max_age) if max_age else None, commit, gpu):
        typer.echo(f"ditto: {path}: {problem}", err=True)
        raise typer.Exit(1)
    show(result)
    raise typer.Exit(0 if result else 1)


def settings_of(name: str) -> GateSettings:
    """Return the settings of a gate of the project, none without a name."""
    from ditto_core.gates.settings import GateSettings, project_gate

    return project_gate(Path.cwd(), name) if name else GateSettings()


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


def limit_of(text: str) -> tuple[str, str]:
    """Split ``METRIC=BOUND``."""
    name, equals, bound = text.partition("=")
    if not (name and equals and bound):
        raise UsageError(f"--limit got {text!r}, expected METRIC=BOUND such as kl_mean=0.01")
    return name, bound


def progress(gate: Gate) -> Callable[[int, int], None]:
    """Return what shows how far a run is: a line that is rewritten on a terminal, else a line each tenth."""
    console = Console(stderr=True)

    def on_sample(done: int, total: int) -> None:
        text = f"{gate.suite.name}: {done} of {total} samples"
        if console.is_terminal:
            console.print(text, end="\n" if done == total else "\r", highlight=False)
        elif done == total or done % max(1, total // 10) == 0:
            console.print(text, highlight=False)

    return on_sample


def finish(result: GateResult, output: Path) -> None:
    """Show a result and exit as it says; a shard alone is not judged."""
    for note in result.notes:
        typer.echo(f"ditto: warning: {note}", err=True)
    if result.shard:
        typer.echo(f"shard {result.shard}: {len(result.records)} of {len(result.ids)} samples in {output}")
        return
    show(result)
    typer.echo(f"result in {output}", err=True)
    raise typer.Exit(0 if result else 1)


def show(result: GateResult) -> None:
    """Print verdict and table."""
    from ditto_core.gates.text import table

    typer.echo(result.summary)
    if text := table(result):
        typer.echo(text)


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
