"""`ditto run`: generate with a built engine, and dump every step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ditto_core.cli.engine_options import InputIds, InputText, Trust, parse_ids
from ditto_core.system.files import check_kept
from ditto_core.visible import lines, visible

if TYPE_CHECKING:
    import torch

    from ditto_core.engines.engine import Engine


def command(
    engine_dir: Annotated[Path, typer.Option(help="Engine directory, as `ditto build` printed it.")],
    input_text: InputText = None,
    input_ids: InputIds = None,
    max_output_len: Annotated[int, typer.Option(help="New tokens.")] = 10,
    dump_dir: Annotated[
        Path | None, typer.Option(help="Write step{i}.safetensors, step{i}.txt, manifest.json.")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="safetensors of what an encoder-decoder encodes, by name, in place of prompts."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model directory for the tokenizer, where the engine's has moved.")] = "",
    trust_remote_code: Trust = False,
) -> None:
    """Run an engine step by step. Step 0 is the prefill."""
    from ditto_core.cli.model_argument import load_engine, model_path
    from ditto_core.stepping.solo import generate

    check_kept({"--inputs": inputs}, {"--dump-dir": dump_dir})  # a trace that is there is replaced
    check_kept({"--dump-dir": dump_dir}, {"model": model_path(model) if model else None})
    engine = load_engine(engine_dir, {"--dump-dir": dump_dir}, trust_remote_code)
    check_kept({"--dump-dir": dump_dir}, {"engine's model": model_path(engine.spec.model.location)})
    check_model(engine, model)
    prompts: list[str | list[int]] = [*(input_text or []), *(parse_ids(text) for text in input_ids or [])]
    given = tensors_of(inputs)
    for text in generate(engine, prompts, steps=max_output_len, dump=dump_dir, tokenizer_from=model, inputs=given):
        typer.echo(lines(text))


def check_model(engine: Engine, given: str) -> None:
    """Look whether the model that the tokenizer comes from is what an engine was built of, where its files are here.

    Says so for one that is ``given``. Raises :class:`UsageError` for the engine's own.
    """
    from ditto_core.cli import screen
    from ditto_core.engines.origin import another_model
    from ditto_core.errors import ModelError, UsageError

    source = replace(engine.spec.model, location=given, revision="") if given else engine.spec.model
    problem = ""
    if Path(source.location).exists():
        with suppress(ModelError):  # a tokenizer needs no weights beside it
            problem = another_model(engine, source, screen.workspace(None).digest)
    if problem and not given:
        raise UsageError(f"{problem}, or give --model DIR for the tokenizer")
    if problem:
        typer.echo(visible(f"ditto: {problem}"), err=True)


def tensors_of(path: Path | None) -> Mapping[str, torch.Tensor] | None:
    """Read inputs by name from a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from ditto_core.errors import UsageError
    from ditto_core.system.files import regular

    try:
        return None if path is None else load_file(regular(path))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--inputs got {str(path)!r}, expected a safetensors file: {error}") from error
