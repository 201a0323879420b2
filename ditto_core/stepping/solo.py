"""Step one session by itself: greedy generation, with a trace on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.engines.staged import LATER, open_copy
from ditto_core.errors import ModelError, UsageError, first_line
from ditto_core.model.checkpoint import CHOOSING_FILE, gguf_in, load_tokenizer, locate
from ditto_core.model.forward import DECODED
from ditto_core.model.own_code import model_class
from ditto_core.stepping.choosing import allowed_tokens, first_ids
from ditto_core.stepping.prompts import Prompt, SourceBatch, TokenBatch, encode, likeliest

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine
    from ditto_core.session import Session
    from ditto_core.spec import ModelSource


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    steps: int,
    dump: Path | None = None,
    tokenizer_from: str = "",
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """Generate greedily from each prompt and return the texts (token ids where there is no tokenizer).

    An encoder-decoder encodes the prompts, or ``inputs`` by name where it takes other ones.
    Raises :class:`UsageError` for an empty prompt, too few steps, or sizes beyond the engine's profile.
    """
    encodes = (engine.directory / LATER).is_dir()
    if not engine.decoder and not encodes:
        raise UsageError(
            "nothing to generate: this engine runs once (an encoder-decoder: ditto build MODEL OUTPUT_DIR)"
        )
    if steps < 1:
        raise UsageError(f"the output length is {steps}, expected at least 1")
    source = engine.spec.model
    if tokenizer_from:
        source = replace(source, location=tokenizer_from, revision="")
    tokenizer = tokenizer_for(prompts, source)
    batch: TokenBatch | SourceBatch
    if encodes:
        batch = source_batch(source, prompts, tokenizer, inputs, steps)
    else:
        batch = encode(prompts, tokenizer=tokenizer)
        check_profile(engine, batch, steps)
    session = open_copy(engine) if encodes else engine.open()
    try:
        tokens = run(session, batch, steps=steps, dump=dump)
    finally:
        session.close()
    decode: Callable[[list[int]], Any] = tokenizer.decode if tokenizer is not None else str
    return [str(decode(row)) for row in tokens]


def check_profile(engine: Engine, batch: TokenBatch, steps: int) -> None:
    """Raise :class:`UsageError` for sizes beyond the engine's profile."""
    longest = batch.input_ids.shape[1]
    engine.spec.profile.check(batch.rows, longest, 0)
    if steps > 1:
        engine.spec.profile.check(batch.rows, 1, longest + steps - 2)


def source_batch(
    source: ModelSource,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    inputs: Mapping[str, torch.Tensor] | None,
    steps: int,
) -> SourceBatch:
    """Return what an encoder-decoder encodes, and what its configurations say of its tokens.

    Raises :class:`ModelError` for one that is damaged: other tokens would be generated.
    """
    import transformers

    where, revision = source.location, source.revision or "main"
    trust = source.trust_remote_code
    config = transformers.AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trust)
    try:
        settings = transformers.GenerationConfig.from_pretrained(where, revision=revision)
    except OSError as error:  # transformers says so of a file that is damaged, too
        if (locate(source) / CHOOSING_FILE).exists():
            raise ModelError(f"{CHOOSING_FILE} of {source.label} cannot be read: {first_line(error)}") from error
        settings = transformers.GenerationConfig.from_model_config(config)
    takes = getattr(model_class(source, config), "main_input_name", "input_ids")
    encoded, texts = dict(inputs or {}), tuple[str, ...]()
    if not encoded and takes != "input_ids":
        raise UsageError(f"this engine encodes {takes}: give --inputs FILE, safetensors with a tensor of this name")
    if not encoded:
        tokens = encode(prompts, tokenizer=tokenizer, pad=config.pad_token_id or 0, left=False)
        encoded, texts = {"input_ids": tokens.input_ids, "attention_mask": tokens.mask}, tokens.texts
    start = encoded.pop(DECODED, None)
    if start is None:
        start = first_ids(config, settings, next(iter(encoded.values())).shape[0])
    return SourceBatch(encoded, start, texts, allowed_tokens(settings, start.shape[1], steps))


def run(session: Session, batch: TokenBatch | SourceBatch, *, steps: int, dump: Path | None = None) -> list[list[int]]:
    """Step a session ``steps`` times on its own greedy tokens and return them, one list a row."""
    from ditto_core.trace import TraceWriter

    writer = TraceWriter(dump, session.info, session.taps, prompts=batch.texts) if dump else None
    sequencer = batch.sequencer()
    session.start(batch.rows)
    rows: list[list[int]] = [[] for _ in range(batch.rows)]
    for _ in range(steps):
        inputs = sequencer.inputs()
        if writer is None:
            outputs = session.step(inputs, lambda site, tensor: None)
            new = likeliest(sequencer.scores(outputs["logits"])).tolist()
        else:
            with writer.step(inputs) as step:
                outputs = session.step(inputs, step.tap)
                new = likeliest(sequencer.scores(outputs["logits"])).tolist()
                step.finish(outputs, new)
        for row, token in zip(rows, new, strict=True):
            row.append(token)
        sequencer.advance(torch.tensor(new))
    if writer is not None:
        writer.close()
    return rows


def tokenizer_for(prompts: Sequence[Prompt], source: ModelSource) -> Any:
    """Load the tokenizer of a model directory or Hub id; None when no prompt is text and there is none."""
    location, path = source.location, Path(source.location)
    where = (gguf_in(path) if path.is_dir() else None) or location
    tokenizer = load_tokenizer(where, source.trust_remote_code, source.revision)
    if tokenizer is None and any(isinstance(prompt, str) and prompt for prompt in prompts):
        raise UsageError(f"no tokenizer at {location!r}: give --model DIR, or --input-ids")
    return tokenizer
