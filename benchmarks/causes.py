"""Faults drawn at random in ONNX Runtime engines of many families: first site, and whether the cause is right.

    python benchmarks/causes.py --count 250 --jobs 16 --cache DIR --results causes.jsonl [--table FILE] [--part unseen]

Fault number n is the same in every run. About half of the numbers, by a fixed seed, are *unseen*: while causes are
being changed, look at the results of the others only. A cause is judged by another run of the same engine, on other
prompts: it has to be named there again, in the same words, with numbers within 2 %; what explains by chance is
not. "wrong" are those that the other prompts contradict, and any cause of a fault of no kind (noise); "unconfirmed"
those where the other prompts show no fault, or name nothing. The results hold fault and cause in words, to be read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.cause_faults import FAULTS
from ditto_core.cache import Cache
from ditto_core.compare.blame import Cause, Localization
from ditto_core.localize import EVERYTHING
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace
from tests.zoo import factory

SEED = 19
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt2", "gpt_neo", "gpt_neox",
    "gptj", "opt", "bloom", "falcon_new", "mpt", "starcoder2", "stablelm", "olmo", "olmo2", "cohere", "granite", "glm",
    "nemotron", "smollm3", "exaone4",
)  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26]]
OTHERS = [[90, 31, 77, 12, 45, 63, 28, 101, 56, 19], [33, 8, 71, 64, 99, 52, 17, 40, 86, 23, 111, 5, 68]]
NUMBER = r"-?\d+\.?\d*(?:e[-+]?\d+)?(?![\w\])])"
"""A decimal number in a sentence, not one that ends an index."""

TRIES = 20
"""Places that are tried for a fault: some give a graph that does not run, or the very same numbers."""


def is_unseen(number: int) -> bool:
    """Tell whether a fault belongs to the half that nobody looks at."""
    return random.Random(SEED + number).random() < 0.5


def run(number: int, cache: Path) -> dict[str, Any]:
    """Put one fault into one engine and localize it on two sets of prompts."""
    names = list(FAULTS)
    kind, family = names[number % len(names)], FAMILIES[(number * 7 + number // len(names)) % len(FAMILIES)]
    result: dict[str, Any] = {"number": number, "kind": kind, "family": family, "unseen": is_unseen(number)}
    start = time.perf_counter()
    for attempt in range(TRIES):
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            try:
                found = attempted(kind, family, random.Random(SEED * number + attempt), cache, Path(folder))
            except LookupError as error:
                result["why"] = str(error)
                continue
            except Exception as error:  # noqa: BLE001 - a graph that does not run is drawn again
                result["why"] = f"{type(error).__name__}: {error}"[:200]
                continue
        if found is not None:
            result |= found
            result.pop("why", None)
            break
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


def attempted(kind: str, family: str, draw: random.Random, cache: Path, folder: Path) -> dict[str, Any] | None:
    """Return what came of one fault; None where the engine's numbers are those of the healthy one."""
    made: dict[str, Any] = {}

    def fault(edit: Any) -> None:
        made["text"], value = FAULTS[kind](edit, draw)
        made["values"] = shown_behind(edit, value)

    spec = EngineSpec.of(factory(family), outputs=EVERYTHING)
    pair = Pair(FaultyWorkspace(Cache(cache), fault, folder), spec, PairOptions(observer=False))
    try:
        first = pair.generate(PROMPTS, max_new_tokens=3, localize=True)
        if not first.localization:
            return None
        taps = {tap.value: tap.site for tap in pair.engine.taps}
        sites = sorted({taps.get(value, value) for value in made["values"]})
        second = pair.generate(OTHERS, max_new_tokens=2, localize=True)
    finally:
        pair.close()
    assert first.localization.first is not None
    blamed = first.localization.first.site
    names = {blamed, *next((tap.aliases for tap in pair.engine.taps if tap.site == blamed), ())}
    return {
        "fault": made["text"],
        "sites": sites,
        "blamed": blamed,
        "right site": bool(names & set(sites)),
        **judged(first.localization, second.localization, kind),
    }


def shown_behind(edit: Any, value: str) -> list[str]:
    """Return the graph's outputs that a value reaches first."""
    outputs = {output.name for output in edit.graph.output}
    waiting, seen, found = [value], set(), []
    while waiting:
        name = waiting.pop(0)
        if name in outputs:
            found.append(name)
            continue
        if name not in seen:
            seen.add(name)
            waiting += [out for node in edit.graph.node if name in node.input for out in node.output]
    return found


def judged(first: Localization, second: Localization | None, kind: str) -> dict[str, Any]:
    """Say what was named at the first site, and whether other prompts confirm it."""
    cause = at_first(first)
    if cause is None:
        return {"outcome": "silent", "notes": list(first.notes)}
    again = None if second is None else at_first(second)
    described = {"cause": cause.kind, "rule": cause.rule, "confidence": cause.confidence, "text": list(cause.evidence)}
    if kind == "noise":
        return {"outcome": "wrong", **described}
    if again is None or is_code(cause) != is_code(again):
        return {"outcome": "unconfirmed", **described}
    agreed = any(alike(a, b) for a in words(cause) for b in words(again))
    return {
        "outcome": "right" if agreed else "wrong",
        **described,
        "again": [again.kind, *again.evidence],
    }


def at_first(found: Localization) -> Cause | None:
    """Return the cause at the first blamed site."""
    site = found.first.site if found.first else ""
    return next(
        (cause for cause in found.causes if cause.site == site and cause.fault and "runs." not in cause.rule), None
    )


def is_code(cause: Cause) -> bool:
    """Tell whether a cause comes from the model's own code."""
    return cause.rule.startswith("mutants.")


def words(cause: Cause) -> set[str]:
    """Return what a cause says: its explanations; of a rule the kind, for its lines hold counts of this input."""
    if not is_code(cause):
        return {cause.kind}
    return {line.removeprefix("or: ") for line in cause.evidence if not line.startswith("that leaves")}


def alike(first: str, second: str) -> bool:
    """Tell whether two sentences are the same up to small differences of their decimal numbers."""
    a, b = (re.split(NUMBER, text) for text in (first, second))
    numbers = zip(re.findall(NUMBER, first), re.findall(NUMBER, second), strict=False)
    return a == b and all(abs(float(x) - float(y)) <= 0.02 * abs(float(y)) for x, y in numbers)


def table(results: Iterable[dict[str, Any]]) -> str:
    """Write the results by kind."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        if "fault" in result:
            kinds[result["kind"]].append(result)
            kinds["all"].append(result)
            kinds["all unseen" if result["unseen"] else "all seen"].append(result)
    lines = [
        "| kind | faults | first site right | named | right or equivalent | wrong | unconfirmed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in (*FAULTS, "all seen", "all unseen", "all"):
        rows = kinds[kind]
        counts = {outcome: sum(r["outcome"] == outcome for r in rows) for outcome in ("right", "wrong", "unconfirmed")}
        cells = [len(rows), sum(r["right site"] for r in rows), sum(counts.values()), *counts.values()]
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def by_rule(results: Iterable[dict[str, Any]]) -> str:
    """Write by rule how often what it names is right: what its confidence should be."""
    rules: dict[str, list[str]] = defaultdict(list)
    for result in results:
        if "rule" in result:
            several = any(line.startswith("or") for line in result["text"])
            rules[f"{result['rule']}{' (or …)' if several else ''}"].append(result["outcome"])
    lines = ["| rule | named | right or equivalent | wrong | unconfirmed |", "| --- | --- | --- | --- | --- |"]
    for rule, found in sorted(rules.items()):
        cells = (len(found), *(found.count(outcome) for outcome in ("right", "wrong", "unconfirmed")))
        lines.append(f"| {rule} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def work(job: tuple[int, Path]) -> dict[str, Any]:
    """Run one fault on one thread."""
    torch.set_num_threads(1)
    return run(*job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("causes.jsonl"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--part", choices=["all", "seen", "unseen"], default="all")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    made = {result["number"] for result in known}
    numbers = [n for n in range(options.first, options.first + options.count) if n not in made]
    numbers = [n for n in numbers if options.part == "all" or is_unseen(n) == (options.part == "unseen")]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=20) as pool:
        for result in pool.imap_unordered(work, [(n, options.cache) for n in numbers]):
            known.append(result)
            print(json.dumps({k: result.get(k) for k in ("number", "family", "fault", "outcome", "text")}), flush=True)
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
    text = f"{table(known)}\n{by_rule(known)}"
    print(text)
    if options.table:
        options.table.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
