"""`ditto run`: generate with a built engine, and dump every step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ditto_core.visible import lines


def command(
    engine_dir: Annotated[Path, typer.Option(help="Engine directory, as `ditto build` printed it.")],
    input_text: Annotated[list[str] | None, typer.Option(help="Prompt; repeatable for a batch.")] = None,
    input_ids: Annotated[list[str] | None, typer.Option(help="Prompt as token ids: 1,2,3; repeatable.")] = None,
    max_output_len: Annotated[int, typer.Option(help="New tokens.")] = 10,
    dump_dir: Annotated[
        Path | None, typer.Option(help="Write step{i}.safetensors, step{i}.txt, manifest.json.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model directory for the tokenizer, where the engine's has moved.")] = "",
) -> None:
    """Run an engine step by step. Step 0 is the prefill."""
    from ditto_core.engines.engine import Engine
    from ditto_core.stepping.solo import generate

    engine = Engine.load(engine_dir)
    prompts: list[str | list[int]] = [*(input_text or []), *(parse_ids(text) for text in input_ids or [])]
    for text in generate(engine, prompts, steps=max_output_len, dump=dump_dir, tokenizer_from=model):
        typer.echo(lines(text))


def parse_ids(text: str) -> list[int]:
    """Read ``1,2,3``."""
    from ditto_core.errors import UsageError

    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"--input-ids got {text!r}, expected whole numbers such as 1,2,3") from error
