"""Step one session by itself: greedy generation, with a trace where one is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.errors import UsageError
from ditto_core.model.checkpoint import load_tokenizer
from ditto_core.stepping.prompts import Prompt, Sequencer, TokenBatch, encode, greedy

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine
    from ditto_core.session import Session


def generate(
    engine: Engine, prompts: Sequence[Prompt], *, steps: int, dump: Path | None = None, tokenizer_from: str = ""
) -> list[str]:
    """Generate greedily from each prompt and return the texts (token ids where there is no tokenizer).

    Raises :class:`UsageError` for an empty prompt, too few steps, or sizes beyond the engine's profile.
    """
    if not engine.decoder:
        raise UsageError("this engine is no decoder, there is nothing to generate")
    if steps < 1:
        raise UsageError(f"the output length is {steps}, expected at least 1")
    source = engine.spec.model
    tokenizer = tokenizer_for(prompts, tokenizer_from or source.location, source.trust_remote_code)
    batch = encode(prompts, tokenizer=tokenizer)
    longest = batch.input_ids.shape[1]
    engine.spec.profile.check(batch.rows, longest, 0)
    if steps > 1:
        engine.spec.profile.check(batch.rows, 1, longest + steps - 2)
    session = engine.open()
    try:
        tokens = run(session, batch, steps=steps, dump=dump)
    finally:
        session.close()
    decode: Callable[[list[int]], Any] = tokenizer.decode if tokenizer is not None else str
    return [str(decode(row)) for row in tokens]


def run(session: Session, batch: TokenBatch, *, steps: int, dump: Path | None = None) -> list[list[int]]:
    """Step a session ``steps`` times on its own greedy tokens and return them, one list a row."""
    from ditto_core.trace import TraceWriter

    writer = TraceWriter(dump, session.info, session.taps, prompts=batch.texts) if dump else None
    sequencer = Sequencer(batch)
    session.start(batch.rows)
    rows: list[list[int]] = [[] for _ in range(batch.rows)]
    for _ in range(steps):
        inputs = sequencer.inputs()
        if writer is None:
            new = greedy(session.step(inputs, lambda site, tensor: None)["logits"]).tolist()
        else:
            with writer.step(inputs) as step:
                outputs = session.step(inputs, step.tap)
                new = greedy(outputs["logits"]).tolist()
                step.finish(outputs, new)
        for row, token in zip(rows, new, strict=True):
            row.append(token)
        sequencer.advance(torch.tensor(new))
    if writer is not None:
        writer.close()
    return rows


def tokenizer_for(prompts: Sequence[Prompt], location: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a model directory or Hub id; None when no prompt is text and there is none."""
    path = Path(location)
    gguf = sorted(path.glob("*.gguf")) if path.is_dir() else []
    tokenizer = load_tokenizer(location, trust_remote_code, **({"gguf_file": gguf[0].name} if gguf else {}))
    if tokenizer is None and any(isinstance(prompt, str) and prompt for prompt in prompts):
        raise UsageError(f"no tokenizer at {location!r}: give --model DIR, or --input-ids")
    return tokenizer
