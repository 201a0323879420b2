"""A small suite of every kind in token ids, for the tiny models, which have no tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ditto_core.gates import Gate, Policy, Sample, Suite
from ditto_core.spec import EngineSpec
from tests.models import llama

LIKELIER = "01000011010010111110"
"""Which of two choices the tiny Llama finds likelier, in turn: a gate of accuracy needs answers that can be lost."""
NEXT = (130, 96)
"""Its greedy token after each prompt of a match."""


def tiny_suite(texts: int = 6, choices: int = 6, prompts: int = 2) -> Suite:
    samples = [Sample(f"text{i}", text=ids(f"text{i}", 12)) for i in range(texts)]
    for i in range(choices):
        drawn = ids(f"choice{i}", 12)
        answer = int(LIKELIER[i % len(LIKELIER)])
        samples.append(Sample(f"choice{i}", prompt=drawn[:6], choices=(drawn[6:9], drawn[9:]), answer=answer))
    samples += [Sample(f"prompt{i}", prompt=ids(f"prompt{i}", 5)) for i in range(prompts)]
    samples += [Sample(f"match{i}", prompt=ids(f"match{i}", 5), answer=NEXT[i : i + 1]) for i in range(prompts)]
    return Suite("tiny", tuple(samples))


def ids(name: str, count: int) -> tuple[int, ...]:
    generator = random.Random(name)
    return tuple(generator.randrange(256) for _ in range(count))


def tiny_gate(suite: Suite | None = None, reference: Any = "eager:float32", model: Any = llama, **options: Any) -> Gate:
    spec = EngineSpec.of(model, options=options)
    return Gate(spec, suite or tiny_suite(), reference, Policy(resamples=500), max_new_tokens=4)


def write_suite(path: Path, suite: Suite | None = None) -> Path:
    lines = [json.dumps(sample.to_json()) for sample in (suite or tiny_suite()).samples]
    path.write_text("\n".join(lines) + "\n")
    return path


def int8_gate(folder: Path, suite: Suite | None = None) -> Gate:
    """A gate whose two sides are engines of a model on disk: workers start fast, they load no module."""
    llama().save_pretrained(folder / "llama")
    return tiny_gate(suite, "onnxruntime", str(folder / "llama"), quantize="int8")
