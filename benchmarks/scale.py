"""Memory and time of a long comparison: 1,000 sites, 8 rows, 8 to 64 steps; both sides are tensors made on the spot.

python benchmarks/scale.py [--sites 1000] [--rows 8] [--steps 8 16 32 64] [--report PAGE]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.text import headline
from ditto_core.report.write import write_report
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.stepping.lockstep import lockstep
from ditto_core.stepping.prompts import TokenBatch, encode
from ditto_core.stepping.sides import Sides

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
    parser.add_argument("--report", type=Path, help="write the last run as HTML and open it in Chromium")
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
            "results": len(found),
            "cpu_seconds": round(time.process_time() - used, 1),
            "seconds": round(time.perf_counter() - start, 1),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        print(json.dumps(facts), flush=True)
    if options.report:
        report(found, options.report)


def report(found: Comparison, path: Path) -> None:
    """Write a run as a page and open it in Chromium: what it shows when its script has run, and how long that takes."""
    start = time.perf_counter()
    write_report("html", {"": found}, path)
    written = time.perf_counter() - start
    facts = {"html_mib": round(path.stat().st_size / 2**20, 1), "written_seconds": round(written, 1)}
    browser = shutil.which("chromium")
    if browser:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom")
        start = time.perf_counter()
        done = subprocess.run([browser, *flags, path.resolve().as_uri()], capture_output=True, text=True, check=True)
        facts["opened_seconds"] = round(time.perf_counter() - start, 1)
        facts["shows_the_verdict"] = headline(found).partition(":")[0] in done.stdout
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
