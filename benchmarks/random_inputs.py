"""How often a healthy engine leaves its tolerance on random short inputs: ``python benchmarks/random_inputs.py [N]``.

A tiny float32 Llama on ONNX Runtime, one or two rows of 1 to 6 random tokens, two steps. Prints quantiles of the worst
error of each run over its bound, and the runs that are out.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec


def llama() -> Any:
    """A tiny Llama."""
    return tiny_decoder("llama")


def main(runs: int, seed: int = 5) -> None:
    """Measure and print."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        spec = EngineSpec.of(llama, outputs="model.layers.*")
        pair = Pair(Workspace(Cache(Path(folder))), spec, PairOptions(observer=False))
        margins = []
        for _ in range(runs):
            rows = [[chance.randrange(256) for _ in range(chance.randint(1, 6))] for _ in range(chance.randint(1, 2))]
            worst = max(pair.generate(rows, max_new_tokens=2).results, key=lambda result: result.verdict.margin)
            margins.append(worst.verdict.margin)
            pair.comparisons.clear()
            if not worst.ok:
                print(f"{rows}: {worst.site}, step {worst.step}: {worst.verdict}")
        pair.close()
    margins.sort()
    for share in (0.5, 0.95, 0.99, 0.999, 1.0):
        print(f"{share:.1%}: {margins[min(runs - 1, int(share * runs))]:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1500)
