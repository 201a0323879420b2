"""Memory and time of a long comparison: 1,000 sites, 8 rows, 8 to 64 steps; both sides are tensors made on the spot.

python benchmarks/scale.py [--sites 1000] [--rows 8] [--steps 8 16 32 64]
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping

import torch

from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.stepping.lockstep import Sides, lockstep
from ditto_core.stepping.prompts import TokenBatch, encode

VOCABULARY, WIDTH = 100, 64


class Made:
    """A session of random tensors: the same on both sides but for a small error on the engine's."""

    def __init__(self, label: str, sites: int, error: float) -> None:
        self.info = SessionInfo(label=label, backend=label, dtype="float32", model="made")
        names = (f"model.layers.{i // 10}.part{i % 10}" for i in range(sites))
        self.taps = tuple(Tap(name, name, axes=("batch", "length", "")) for name in names)
        self._error = error

    def start(self, batch: int) -> None:
        """Begin again with the same numbers."""
        self._chance = torch.Generator().manual_seed(0)

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        rows, length = inputs["input_ids"].shape
        for tap in self.taps:
            sink(tap.site, torch.randn(rows, length, WIDTH, generator=self._chance) * (1 + self._error))
        return {"logits": torch.randn(rows, length, VOCABULARY, generator=self._chance)}

    def close(self) -> None:
        """Hold nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 16, 32, 64])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for steps in options.steps:
        sides = Sides(Made("engine", options.sites, 1e-7), Made("eager", options.sites, 0.0))
        batch: TokenBatch = encode([[1, 2, 3]] * options.rows, vocab_size=VOCABULARY)
        start, used = time.perf_counter(), time.process_time()
        found, _ = lockstep(sides, batch, steps=steps)
        facts = {
            "steps": steps,
            "compared": len(found.sites),
            "cpu_seconds": round(time.process_time() - used, 1),
            "seconds": round(time.perf_counter() - start, 1),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "json_mib": round(len(json.dumps(found.to_json())) / 2**20, 1),
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
