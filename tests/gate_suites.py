"""A small suite of every kind in token ids, for the tiny models, which have no tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ditto_core.gates import Gate, Policy, Sample, Suite
from ditto_core.spec import EngineSpec
from tests.models import llama


def tiny_suite(texts: int = 6, choices: int = 6, prompts: int = 2) -> Suite:
    generator = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(256) for _ in range(count))

    samples = [Sample(f"text{i}", text=ids(12)) for i in range(texts)]
    samples += [Sample(f"choice{i}", prompt=ids(6), choices=(ids(3), ids(3)), answer=i % 2) for i in range(choices)]
    samples += [Sample(f"prompt{i}", prompt=ids(5)) for i in range(prompts)]
    samples += [Sample(f"match{i}", prompt=ids(5), answer=ids(1)) for i in range(prompts)]
    return Suite("tiny", tuple(samples))


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
