"""The standing adversary at full size: wrong engines that pass, and healthy ones that fail.

    python benchmarks/adversary.py --wrong --cache DIR
    python benchmarks/adversary.py --healthy --engines 84 --runs 7 --jobs 16 --results healthy.jsonl --cache DIR

``--wrong`` puts every fault of ``tests/adversary/wrong.py`` into every path of ``tests/adversary/paths.py``.
``--healthy`` draws engines of 36 families and 6 modules (``tests/adversary/healthy.py``) and runs each on many inputs,
``--jobs`` engines at a time; 84 are all of them in two dtypes. ``--results`` keeps a JSON line an engine, and an engine
that is there is not run again. Prints a table and, as JSON, the totals. Exit code 1 when a wrong engine passed, more
than one healthy run was flagged, or an engine could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import transformers  # noqa: F401  loaded once, before the processes part

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from tests.adversary.healthy import Healthy, engines
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


def run_engine(engine: Healthy, runs: int, cache: Path) -> dict[str, Any]:
    """Run one healthy engine on many inputs; return the counts, and what was flagged.

    ``results``: tensors that were compared, ``by_floor`` of them by their noise floor; ``beyond``: those that fail a
    run; ``healed``: those that recover downstream.
    """
    torch.set_num_threads(1)
    start = time.perf_counter()
    found: dict[str, Any] = {"engine": str(engine), "family": engine.name, "dtype": engine.dtype, "runs": 0}
    found |= {"results": 0, "by_floor": 0, "beyond": 0, "healed": 0, "worst": 0.0, "flagged": [], "error": ""}
    try:
        pair = engine.open(Workspace(Cache(cache)))
        for run, comparison in engine.runs(pair, runs):
            found["runs"] += 1
            found["results"] += len(comparison)
            found["by_floor"] += comparison.risk.results if comparison.risk else 0
            found["beyond"] += len(comparison.failures)
            found["healed"] += len(comparison.healed)
            found["worst"] = max(found["worst"], *(r.verdict.margin for r in comparison if not r.healed))
            if not comparison:
                found["flagged"].append(f"{run}: {comparison!r}")
            pair.comparisons.clear()
        pair.close()
    except Exception as error:  # noqa: BLE001 - one engine that cannot be run must not end the others
        found["error"] = f"{type(error).__name__}: {error}"
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def run_healthy(options: argparse.Namespace) -> bool:
    """Run healthy engines; print a table and the totals. Return whether few were flagged."""
    chosen = list(engines(options.engines, options.seed, dtypes=tuple(options.dtypes), backend=options.backend))
    file: Path | None = options.results
    lines = map(json.loads, file.read_text().splitlines() if file and file.exists() else ())
    wanted = {str(engine) for engine in chosen}
    known = {line["engine"]: line for line in lines if line["engine"] in wanted and not line["error"]}
    for line in run_all([e for e in chosen if str(e) not in known], options):
        known[line["engine"]] = line
        if file:
            with file.open("a") as results:
                results.write(json.dumps(line) + "\n")
        for text in filter(None, (*line["flagged"], line["error"])):
            print(f"FLAGGED {line['engine']}: {text}", flush=True)
    return totals(list(known.values()), options)


def run_all(chosen: list[Healthy], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run engines, so many at a time; yield each as it is done."""
    if options.jobs == 1:
        yield from (run_engine(engine, options.runs, options.cache) for engine in chosen)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        work = [pool.submit(run_engine, engine, options.runs, options.cache) for engine in chosen]
        for done in as_completed(work):
            yield done.result()


def totals(lines: list[dict[str, Any]], options: argparse.Namespace) -> bool:
    """Print the results as a table and their totals as JSON; return whether few runs were flagged."""
    print("| family | dtype | runs | results | recovered | largest error / bound | flagged |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for line in sorted(lines, key=lambda line: (line["family"], line["dtype"])):
        cells = [line[name] for name in ("family", "dtype", "runs", "results", "healed")]
        print(f"| {' | '.join(map(str, cells))} | {line['worst']:.2f} | {len(line['flagged'])} |")
    sums = {name: sum(line[name] for line in lines) for name in ("runs", "results", "by_floor", "beyond", "healed")}
    flagged, broken = sum(len(line["flagged"]) for line in lines), [x["engine"] for x in lines if x["error"]]
    families = len({line["family"] for line in lines if line["runs"]})
    seeds = {"seed": options.seed, "engines": len(lines), "families": families}
    print(json.dumps({**seeds, **sums, "flagged": flagged, "could_not_run": broken}))
    return flagged <= FLAGGED and not broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--engines", type=int, default=84)
    parser.add_argument("--runs", type=int, default=7, help="of each engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16"])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    fine = not options.wrong or run_wrong(Workspace(Cache(options.cache)))
    fine = (not options.healthy or run_healthy(options)) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
