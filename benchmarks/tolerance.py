"""Which multiple of the noise floor do healthy engines need? Prints the table of benchmarks/tolerance.md.

Every tiny family in float32 and float16, ONNX Runtime with and without graph optimization, several seeds, batches and
prompt lengths: the ratio of each site's error to its floor, for three estimators of the floor. Then the same with the
weight of one projection multiplied by 1.01: how often the faulty projection itself exceeds each candidate factor.

    python benchmarks/tolerance.py [--seeds 4] [--cache DIR]
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from ditto_core.cache import Cache
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.tolerance import EPSILON
from ditto_core.engines.workspace import Workspace
from ditto_core.model.tiny import FAMILIES, tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, ModelSource

FACTORS = (2, 3, 4, 5, 6, 8)


def scaled(family: str, seed: int, factor: float) -> object:
    """Return a tiny model whose layer 1 has its MLP's output projection scaled."""
    model = tiny_decoder(family, seed=seed)
    layer = model.transformer.h[1].mlp.c_proj if family == "gpt2" else model.model.layers[1].mlp.down_proj
    layer.weight.data.mul_(factor)
    return model


def runs(workspace: Workspace, seeds: int) -> Iterator[tuple[str, str, Comparison]]:
    """Yield healthy comparisons with their family and dtype."""
    for family in FAMILIES:
        for seed in range(seeds):
            source = ModelSource(factory=partial(scaled, family, seed, 1.0))
            rng = random.Random(seed)
            prompts = [[rng.randrange(3, 256) for _ in range(rng.choice((1, 5, 17, 40)))] for _ in range(1 + seed % 3)]
            for dtype in ("float32", "float16"):
                for level in ("all", "disable"):
                    spec = EngineSpec.of(source, dtype=dtype, outputs=("**", "**:*"), options={"level": level})
                    pair = Pair(workspace, spec, PairOptions(observer=False))
                    yield family, dtype, pair.generate(prompts, max_new_tokens=8)
                    pair.close()


def ratios(run: Comparison) -> Iterator[tuple[float, float, float]]:
    """Yield error / floor of every result for three estimators: one sample; at least eps / 2; and its median too."""
    eps = EPSILON[run.engine.dtype]
    floors: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for r in run.results:
        floors[r.site, r.step == 0].append(r.floor or 0.0)
    for r in run.results:
        error, floor = r.metrics.rel_l2, r.floor or 0.0
        median = float(np.median(floors[r.site, r.step == 0]))
        if error:
            yield error / max(floor, 1e-30), error / max(floor, eps / 2), error / max(floor, median, eps / 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--cache", type=Path, default=Path(".demo/tolerance-cache"))
    options = parser.parse_args()
    workspace = Workspace(Cache(options.cache))
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    count: dict[str, int] = defaultdict(int)
    for family, dtype, run in runs(workspace, options.seeds):
        found[f"{family} {dtype}"] += list(ratios(run))
        count[f"{family} {dtype}"] += 1
    print(
        "| engines | runs | results | estimator | median | 99.9 % | max |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        sep="\n",
    )
    names = ("one sample", "one sample, at least eps/2", "and median over steps")
    for key, rows in found.items():
        table = np.array(rows)
        for i, name in enumerate(names):
            column = table[:, i]
            p999, top = np.quantile(column, 0.999), column.max()
            print(
                f"| {key} | {count[key]} | {len(column)} | {name} | {np.median(column):.2f} | {p999:.2f} | {top:.3g} |"
            )


if __name__ == "__main__":
    main()
