"""How small a fault in one row of many does a run find? ``python benchmarks/smallest.py --cache DIR``

A tiny Llama of one layer and random tokens: 300 in bfloat16 on OpenVINO, 4,096 in float16 on ONNX Runtime. One row of
the layer's output, as the engine hands it over, gets an error of a random direction. Bisects the error's share of the
row's norm down to the smallest that fails the run, for some rows of each. Prints a table: the row's bound is that of
six samples of the floor, which such a failure is judged by.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from ditto_core.cache import Cache
from ditto_core.compare.comparison import Comparison
from ditto_core.engines.workspace import Workspace
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, ModelSource
from tests.adversary.sessions import Faulty, Remembered
from tests.adversary.wrong import each

LAYER = "model.layers.0"
CASES = (("openvino", "bfloat16", 300), ("onnxruntime", "float16", 4096))
ROWS = 5
HALVINGS = 12
"""The smallest share is then known to 0.2 %."""


def off(tensor: torch.Tensor, row: int, share: float) -> torch.Tensor:
    """Return ``tensor`` [1, rows, width] with one row off by a share of its norm."""
    error = torch.randn(tensor.shape[-1], generator=torch.Generator().manual_seed(row))
    wrong = tensor.clone()
    wrong[0, row] += (error / error.norm() * tensor[0, row].float().norm() * share).to(tensor.dtype)
    return wrong


class Prompt:
    """One prompt on one engine, of which every session runs once."""

    def __init__(self, workspace: Workspace, backend: str, dtype: str, length: int) -> None:
        profile = {"batch": (1, 1, 2), "length": (1, 64, 4096), "past": (0, 64, 4096)}
        source = ModelSource(factory=partial(tiny_decoder, "llama", layers=1, seed=0))
        spec = EngineSpec.of(source, backend=backend, dtype=dtype, outputs=[LAYER], profile=profile)
        self._pair = Pair(workspace, spec, PairOptions(observer=False, localize_failed=0))
        chance = torch.Generator().manual_seed(0)
        self._ids = torch.randint(3, 256, (length,), generator=chance).tolist()
        sessions = self._pair.sessions
        self._kept = {name: Remembered(getattr(sessions, name)) for name in ("engine", "reference")}

    def run(self, row: int, share: float) -> Comparison:
        """Compare with one row off."""
        fault = each(partial(off, row=row, share=share))
        sessions = {**self._kept, "engine": Faulty(self._kept["engine"], fault, [LAYER])}
        self._pair.sessions.__dict__.update(sessions)
        pair = Pair(self._pair.workspace, self._pair.spec, replace(self._pair.options), sessions=self._pair.sessions)
        return pair.generate(self._ids, max_new_tokens=1)

    def smallest(self, row: int) -> float:
        """Return the smallest share that fails."""
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.run(row, middle) else (low, middle)
        return high


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    print("| engine | dtype | rows | smallest error of a row that fails: median, largest | tensor's rel-L2 | verdict |")
    print("| --- | --- | --- | --- | --- | --- |")
    for backend, dtype, length in CASES:
        prompt = Prompt(Workspace(Cache(options.cache)), backend, dtype, length)
        assert prompt.run(0, 0.0), "the engine itself does not pass"
        shares = sorted(prompt.smallest(row) for row in range(length // 2 // ROWS, length, length // ROWS))
        failed = prompt.run(length // 2, shares[-1] * 1.1)
        (found,) = (r for r in failed.results if r.site == LAYER)
        median = shares[len(shares) // 2]
        numbers = f"{median:.1e}, {shares[-1]:.1e} | {found.metrics.rel_l2:.1e} | {found.verdict}"
        print(f"| {backend} | {dtype} | {length} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
