"""The standing adversary at full size: wrong engines that pass, and healthy ones that fail.

    python benchmarks/adversary.py --wrong --cache DIR
    python benchmarks/adversary.py --healthy --engines 22 --runs 25 --seed 0 --cache DIR

``--wrong`` puts every fault of ``tests/adversary/wrong.py`` into every path of ``tests/adversary/paths.py``.
``--healthy`` draws engines of the tiny families and modules (``tests/adversary/healthy.py``) and runs each on many
inputs. Exit code 1 when a wrong engine passed or more than one healthy run was flagged.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from tests.adversary.healthy import engines
from tests.adversary.paths import PATHS
from tests.adversary.wrong import WRONG

FLAGGED = 1
"""Healthy runs that may be flagged."""


def run_wrong(workspace: Workspace) -> bool:
    """Run every wrong engine; print each path's count and what passed. Return whether nothing did."""
    total = bad = 0
    for name, way in PATHS.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            passing, tried = way.passing(way.open(workspace, Path(folder)), WRONG)
        total, bad = total + tried, bad + len(passing)
        print(f"{name}: {tried} wrong, {len(passing)} passed, {time.perf_counter() - start:.0f} s", flush=True)
        for text in passing:
            print(f"    PASSED {text}")
    print(f"{total} wrong engines on {len(PATHS)} paths: {bad} passed")
    return not bad


def run_healthy(cache: Path, count: int, runs: int, seed: int) -> bool:
    """Run healthy engines; print each engine's count and what was flagged. Return whether few were."""
    total = bad = 0
    for engine in engines(count, seed):
        start = time.perf_counter()
        pair = engine.open(Workspace(Cache(cache)))
        flagged = 0
        for run, found in engine.runs(pair, runs):
            total += 1
            if not found:
                flagged += 1
                print(f"    FLAGGED {run}: {found.worst} {dict(found.missing)}", flush=True)
        pair.close()
        bad += flagged
        print(f"{engine}: {runs} runs, {flagged} flagged, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{total} healthy runs of {count} engines, seed {seed}: {bad} flagged")
    return bad <= FLAGGED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--engines", type=int, default=22)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    fine = not options.wrong or run_wrong(Workspace(Cache(options.cache)))
    fine = (not options.healthy or run_healthy(options.cache, options.engines, options.runs, options.seed)) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
