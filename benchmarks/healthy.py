"""Healthy engines: random configurations, dtypes and prompts; no site may be flagged and no fault named.

    python benchmarks/healthy.py --count 50 --seed 0 --cache DIR

Prints one line an engine, the largest local error in units of the local floor, and the totals. Exit code 1 when
anything was flagged or named.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto_core.cache import Cache
from ditto_core.compare.blame import Localization
from ditto_core.engines.workspace import Workspace
from ditto_core.localize import EVERYTHING
from ditto_core.model.tiny import FAMILIES, tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec


@dataclass(frozen=True)
class Healthy:
    """One engine and what it is run on."""

    family: str
    dtype: str
    config: dict[str, Any]
    prompts: list[list[int]]
    steps: int
    attention: str

    def factory(self) -> Any:
        return tiny_decoder(self.family, **self.config)

    def __str__(self) -> str:
        lengths = [len(prompt) for prompt in self.prompts]
        return f"{self.family} {self.dtype} {self.attention} {self.config} prompts {lengths} steps {self.steps}"


def engines(count: int, seed: int) -> Iterator[Healthy]:
    """Draw engines; every family and dtype occurs."""
    draw = random.Random(seed)
    families = sorted(FAMILIES)
    for i in range(count):
        family = families[i % len(families)]
        heads = draw.choice([2, 4, 8])
        config: dict[str, Any] = {"seed": draw.randrange(1000), "layers": draw.choice([1, 2])}
        if family == "gpt2":
            config |= {"n_head": heads, "n_embd": draw.choice([32, 64])}
        else:
            config |= {
                "num_attention_heads": heads,
                "num_key_value_heads": draw.choice([h for h in (1, 2, 4) if h <= heads]),
            }
            config |= {"intermediate_size": draw.choice([64, 96, 160])}
            config |= {"rope_theta": draw.choice([1e4, 5e5])}
        prompts = [
            [draw.randrange(3, 256) for _ in range(draw.randrange(1, 24))] for _ in range(draw.choice([1, 1, 2, 3]))
        ]
        dtype = draw.choice(["float32", "float32", "float16"])
        yield Healthy(family, dtype, config, prompts, draw.choice([2, 3, 5]), draw.choice(["eager", "eager", "sdpa"]))


def localize(workspace: Workspace, engine: Healthy) -> Localization:
    """Run one engine."""
    spec = EngineSpec.of(engine.factory, dtype=engine.dtype, outputs=EVERYTHING, attention=engine.attention)
    pair = Pair(workspace, spec)
    found = pair.generate(engine.prompts, max_new_tokens=engine.steps, localize=True).localization
    pair.close()
    assert found is not None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    worst: dict[str, float] = {}
    bad = sites = 0
    start = time.perf_counter()
    for number, engine in enumerate(engines(options.count, options.seed)):
        found = localize(Workspace(Cache(options.cache)), engine)
        top = max(found.results, key=lambda r: r.ratio)
        ratio = top.metrics.rel_l2 / top.floor
        worst[engine.dtype] = max(worst.get(engine.dtype, 0.0), ratio)
        sites += len(found.results)
        wrong = bool(found.blamed) or any(cause.fault for cause in found.causes)
        bad += wrong
        print(
            f"{number:3} {'FLAGGED' if wrong else 'ok':8} {ratio:5.2f} x floor at {top.site} step {top.step}: {engine}"
        )
        for line in (*found.blamed[:3], *found.causes):
            print(f"      {line}", flush=True)
    print(f"{options.count} engines, {sites} local errors, {bad} flagged or named; largest in units of the floor:")
    print(", ".join(f"{dtype} {ratio:.2f}" for dtype, ratio in sorted(worst.items())))
    print(f"{time.perf_counter() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
