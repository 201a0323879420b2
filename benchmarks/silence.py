"""Healthy engines and faults of no kind: no site of the first is flagged, and of neither is a fault named.

    python benchmarks/silence.py --healthy 300 --kindless 100 --jobs 16 --cache DIR --results silence.jsonl

Engines of 27 families, their dtype, attention and prompts drawn by number; a second call goes on where the first ended.
The faults change weights and tensors by numbers at random, of which nothing true can be said. Prints the totals; exit
code 1 when anything was flagged in a healthy engine, or named in any.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

from benchmarks.cause_faults import matrices, pick, weight
from benchmarks.causes import FAMILIES
from ditto_core.cache import Cache
from ditto_core.compare.blame import Localization
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import BuildError
from ditto_core.localize import EVERYTHING
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace
from tests.zoo import factory

SEED = 31


def noisy(w: Any, draw: random.Random) -> Any:
    """Noise on each weight."""
    return w * (1 + draw.choice([1e-3, 1e-2, 0.1]) * numbers(draw).standard_normal(w.shape))


def low_rank(w: Any, draw: random.Random) -> Any:
    """A random update of rank 2, as a LoRA that was merged."""
    left, right = (numbers(draw).standard_normal(shape) for shape in ((w.shape[0], 2), (2, w.shape[1])))
    return w + 0.02 * w.std() * left @ right


def sparse(w: Any, draw: random.Random) -> Any:
    """One weight in fifty is another."""
    random_numbers = numbers(draw)
    return np.where(random_numbers.random(w.shape) < 0.02, random_numbers.standard_normal(w.shape) * w.std(), w)


def shuffled(w: Any, draw: random.Random) -> Any:
    """The inputs' order is a random one."""
    return w[numbers(draw).permutation(w.shape[0])]


def numbers(draw: random.Random) -> np.random.Generator:
    """Return numpy's generator of a draw."""
    return np.random.default_rng(draw.randrange(1 << 30))


def added(edit: Any, draw: random.Random) -> tuple[str, str]:
    """A random vector is added to what a product with a weight gives."""
    node = pick(edit, draw, lambda n: n.op_type in ("MatMul", "Gemm") and matrices(edit, n))
    weights = edit.array(node.input[matrices(edit, node)[0]])
    width = weights.shape[0 if any(a.name == "transB" and a.i for a in node.attribute) else 1]
    vector = (0.05 * numbers(draw).standard_normal(width)).astype(edit.dtype())
    edit.change_value(node.output[0], ("Add", [edit.constant(vector)], {}))
    return "random vector added", str(node.output[0])


KINDLESS: Mapping[str, Callable[[Any, random.Random], tuple[str, str]]] = {
    "noise": weight("with noise", noisy),
    "low rank": weight("with a low-rank update", low_rank),
    "sparse": weight("with random outliers", sparse),
    "shuffled": weight("with its inputs shuffled", shuffled),
    "vector": added,
}


def localized(number: int, kind: str, cache: Path) -> Localization | None:
    """Run one engine, drawn by its number; None where there is no place for the fault in this family."""
    draw = random.Random(SEED * number + len(kind))
    fields = {"dtype": draw.choice(["float32", "float32", "float16"]), "attention": draw.choice(["eager", "sdpa"])}
    spec = EngineSpec.of(factory(FAMILIES[number % len(FAMILIES)]), outputs=EVERYTHING, **fields)
    count, longest = draw.choice([1, 1, 2, 3]), draw.choice([8, 16, 24])
    prompts = [[draw.randrange(3, 120) for _ in range(draw.randrange(4, longest))] for _ in range(count)]
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fault = None if kind == "healthy" else (lambda edit: KINDLESS[kind](edit, draw))
        workspace = FaultyWorkspace(Cache(cache), fault, Path(folder)) if fault else Workspace(Cache(cache))
        pair = Pair(workspace, spec, PairOptions(observer=False))
        try:
            return pair.generate(prompts, max_new_tokens=3, localize=True).localization
        except (LookupError, BuildError):
            return None
        finally:
            pair.close()


def work(job: tuple[int, str, Path]) -> dict[str, Any]:
    """Run one engine on one thread, and say what was found."""
    torch.set_num_threads(1)
    number, kind, cache = job
    result: dict[str, Any] = {"number": number, "kind": kind, "family": FAMILIES[number % len(FAMILIES)]}
    start = time.perf_counter()
    try:
        found = localized(number, kind, cache)
    except Exception as error:  # noqa: BLE001 - one engine that fails is a finding, the others go on
        return {**result, "failed": f"{type(error).__name__}: {error}"[:300]}
    if found is None:
        return {**result, "nowhere": True}
    causes = [cause for cause in found.causes if cause.fault and not cause.rule.startswith("runs.")]
    named = [[cause.kind, cause.site, cause.confidence, cause.rule, *cause.evidence] for cause in causes]
    worst = max((r.metrics.rel_l2 / r.floor for r in found.results), default=0.0)
    blamed = [item.site for item in found.blamed]
    return {**result, "blamed": blamed, "named": named, "worst": worst, "seconds": time.perf_counter() - start}


def totals(results: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the totals as a table, and whether all is as it should be."""
    lines = ["| engines | run | blamed | named | failed | seconds, median |", "| --- | --- | --- | --- | --- | --- |"]
    good = True
    for kind in ("healthy", *KINDLESS):
        rows = [r for r in results if r["kind"] == kind and "nowhere" not in r]
        run = [r for r in rows if "failed" not in r]
        blamed, named = (sum(bool(r[name]) for r in run) for name in ("blamed", "named"))
        good = good and not named and len(run) == len(rows) and not (kind == "healthy" and blamed)
        median = sorted(r["seconds"] for r in run)[len(run) // 2] if run else 0.0
        lines.append(f"| {kind} | {len(run)} | {blamed} | {named} | {len(rows) - len(run)} | {median:.1f} |")
    return "\n".join(lines), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=300)
    parser.add_argument("--kindless", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("silence.jsonl"))
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    results = (
        [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    )
    done = {(result["number"], result["kind"]) for result in results}
    kinds = list(KINDLESS)
    jobs = [(n, "healthy") for n in range(options.healthy)]
    jobs += [(n, kinds[n % len(kinds)]) for n in range(options.kindless)]
    wanted = [(*job, options.cache) for job in jobs if job not in done]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=20) as pool:
        for result in pool.imap_unordered(work, wanted):
            results.append(result)
            if result.get("named") or result.get("failed") or (result["kind"] == "healthy" and result.get("blamed")):
                print(json.dumps(result), flush=True)
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
    text, good = totals(results)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
