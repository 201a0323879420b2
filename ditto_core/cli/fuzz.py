"""`ditto fuzz`: look for the shortest prompt at which an engine diverges. Exit code 0: none, 1: found, 2: error."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ditto_core.cli.engine_options import Attention, Backend, CacheDir, Dtype, Trust, parse_ids
from ditto_core.errors import UsageError

if TYPE_CHECKING:
    from ditto_core.fuzz import Failure, Limits, Outcome
    from ditto_core.pair.pair import Pair


def command(
    model: Annotated[str, typer.Argument(help="Hub id, directory, GGUF file, or FILE.py:NAME of a callable.")],
    backend: Backend = "onnxruntime",
    dtype: Dtype = "float32",
    add_output: Annotated[list[str] | None, typer.Option(help="Selector of sites to compare; repeatable.")] = None,
    reference: Annotated[str, typer.Option(help="eager, eager:DTYPE, or a backend.")] = "eager",
    attention: Attention = "eager",
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    deadline: Annotated[str, typer.Option(help="Time to search, such as 90s, 10m, 2h.")] = "60s",
    corpus: Annotated[Path, typer.Option(help="Folder kept from run to run.")] = Path("fuzz-corpus"),
    max_input_len: Annotated[int, typer.Option(help="Longest prompt, in tokens.")] = 32,
    max_batch_size: Annotated[int, typer.Option(help="Most prompts in a batch.")] = 2,
    max_output_len: Annotated[int, typer.Option(help="Steps for each batch: the prefill and decode steps.")] = 3,
    tolerance_factor: Annotated[float | None, typer.Option(help="Multiple of the noise floor.")] = None,
    input_ids: Annotated[
        list[str] | None, typer.Option(help="Run this one batch instead: 1,2,3 for each row; repeatable.")
    ] = None,
    trust_remote_code: Trust = False,
    cache_dir: CacheDir = None,
) -> None:
    """Find the shortest prompt that diverges. Tries prompts against the reference, and shrinks the one that fails."""
    from ditto_core.cli import screen
    from ditto_core.cli.model_argument import model_path, read_model
    from ditto_core.fuzz import Limits, check_hypothesis
    from ditto_core.model.beside import check_model_kept
    from ditto_core.pair.pair import Pair
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.spec import ALL_SITES, EngineSpec
    from ditto_core.system.sizes import parse_age

    check_model_kept({"--corpus": corpus}, {"model": model_path(model)})
    check_hypothesis()
    seconds = parse_age(deadline)
    if min(max_input_len, max_batch_size, max_output_len) < 1:
        raise UsageError("--max-input-len, --max-batch-size and --max-output-len are at least 1")
    outputs = tuple(add_output or ALL_SITES)
    spec = EngineSpec.of(
        read_model(model, trust_remote_code), backend=backend, dtype=dtype, outputs=outputs, attention=attention
    )
    options = PairOptions(reference=reference, tolerance=tolerance_factor, observer=False)
    pair = Pair(screen.workspace(cache_dir), spec, options)
    if not pair.engine.decoder:
        raise UsageError(f"{spec.model.label} is not a decoder: there are no prompts to try")
    if input_ids:
        raise typer.Exit(replay(pair, [parse_ids(text) for text in input_ids], max_output_len))
    limits = Limits(max_batch_size, max_input_len, max_output_len)
    outcome = search(pair, limits, seed=seed, seconds=seconds, corpus=corpus)
    again = {"--backend": backend, "--dtype": dtype, "--reference": reference, "--attention": attention}
    again |= {"--tolerance-factor": str(tolerance_factor)} if tolerance_factor is not None else {}
    extra = [part for name in add_output or [] for part in ("--add-output", name)]
    extra += ["--trust-remote-code"] if trust_remote_code else []
    extra += ["--cache-dir", str(cache_dir)] if cache_dir is not None else []
    report(outcome, pair, ["ditto", "fuzz", model, *(part for item in again.items() for part in item), *extra])
    raise typer.Exit(1 if outcome.failure else 0)


def search(pair: Pair, limits: Limits, *, seed: int, seconds: float, corpus: Path) -> Outcome:
    """Search behind a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ditto_core.fuzz import Corpus, Fuzzer

    model = f"{pair.spec.model.label} ({pair.sessions.workspace.digest(pair.spec.model)[:12]})"
    identity = f"{model} {pair.spec.label} beside {pair.options.reference}"
    check_limits(pair, limits)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("fuzzing", total=seconds)

        def show(tried: int, margin: float) -> None:
            passed = progress.tasks[0].elapsed or 0.0
            progress.update(task, completed=passed, description=f"{tried} batches, last {margin:.2g} x bound")

        return Fuzzer(pair, Corpus(corpus, seed, identity), limits, show).search(seconds)


def check_limits(pair: Pair, limits: Limits) -> None:
    """Raise :class:`UsageError` when the largest batch is outside the engine's profile."""
    pair.spec.profile.check(limits.rows, limits.length, 0)
    if limits.steps > 1:
        pair.spec.profile.check(limits.rows, 1, limits.length + limits.steps - 2)


def replay(pair: Pair, rows: list[list[int]], steps: int) -> int:
    """Run one batch, print what came of it, and return the exit code."""
    from ditto_core.compare.text import summary_line
    from ditto_core.fuzz import compare, message

    comparison = compare(pair, rows, steps)
    failed = not comparison or any(token.flips for token in comparison.tokens)
    typer.echo(message(comparison) if failed else summary_line(comparison))
    return int(failed)


def report(outcome: Outcome, pair: Pair, again: list[str]) -> None:
    """Print the verdict, the prompt, and how to run it again."""
    failure = outcome.failure
    if failure is None:
        typer.echo(f"no divergence in {outcome.tried} batches; the closest came to {outcome.margin:.3g} x its bound")
        return
    typer.echo(failure.message)
    state = "shrunk to" if failure.shrunk else "out of time, shrunk so far to (run again to go on)"
    typer.echo(f"{state} {describe(failure, pair)}, after {outcome.tried} batches")
    ids = [part for row in failure.rows for part in ("--input-ids", ",".join(map(str, row)))]
    typer.echo(f"again: {shlex.join([*again, '--max-output-len', str(failure.steps), *ids])}")


def describe(failure: Failure, pair: Pair) -> str:
    """Return a batch as token ids, with its text where there is a tokenizer."""
    tokenizer = pair.tokenizer
    text = "" if tokenizer is None else f" ({', '.join(repr(tokenizer.decode(list(row))) for row in failure.rows)})"
    return f"{[list(row) for row in failure.rows]}{text}"
