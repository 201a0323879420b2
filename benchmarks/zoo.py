"""Random models, nearly all tiny, of the families of transformers, each a real ONNX Runtime engine beside eager.

    python benchmarks/zoo.py [NAME …] [--dtype float16] [--directory] [--jobs N] [--results FILE] [--table docs/zoo.md]

By default every family runs in float32 from its factory and from a directory, and the main ones in float16 too;
``--dtype`` and ``--directory`` choose among all runs. Each is a child process of its own, ``--jobs`` of them at a time.
Its verdict is appended to the results, a JSON line a run, and a run that is there is not made again. ``--table`` writes
the results as a page. Exit code 1 when a healthy engine fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import DittoError
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.zoo import FAMILIES, MAIN, factory

SECONDS = 400
EXPORTER = {"helium": "a fault of the exporter: it drops the norm's epsilon of 1e-8, so left-padded rows become NaN"}
"""What was found to be wrong in torch's exporter: the engine is not healthy, and fails rightly."""
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
EVEN = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]


class Run(NamedTuple):
    """One run: a family in a dtype, from a factory or a directory."""

    family: str
    dtype: str = "float32"
    source: str = "factory"


def runs(names: list[str], dtype: str = "", *, directory: bool = False) -> Iterator[Run]:
    """Every family in float32, from its factory and from a directory; the main ones in float16 from their factory.

    ``dtype``: in this dtype alone, from the factory, or with ``directory`` from a directory alone.
    """
    source = "directory" if directory else "factory"
    if dtype or directory:
        yield from (Run(name, dtype or "float32", source) for name in names)
        return
    yield from (Run(name) for name in names)
    yield from (Run(name, dtype="float16") for name in names if name in MAIN)
    yield from (Run(name, source="directory") for name in names)


def compare(run: Run, folder: Path) -> dict[str, Any]:
    """Build and run one engine; return what came of it."""
    source: Any = factory(run.family)
    if run.source == "directory":
        FAMILIES[run.family]().save_pretrained(folder / run.family)
        source = str(folder / run.family)
    spec = EngineSpec.of(source, dtype=run.dtype, outputs="**")
    pair = Pair(Workspace(Cache(folder / "cache")), spec, PairOptions(localize_failed=0))
    model = pair.sessions.model
    if model.staged:
        found = pair.generate(model.examples, max_new_tokens=4)
    elif not model.decoder:
        found = pair.run()
    else:
        from ditto_core.model.states import has_fixed_states

        stateful = has_fixed_states(model.module)
        found = pair.generate(EVEN if stateful else PROMPTS, max_new_tokens=4)
    same = all(row.engine == row.reference for row in found.tokens)
    verdict = "pass" if found else "FAIL"
    said = "" if found else str(found)
    return {"verdict": verdict, "sites": len(found.sites), "steps": found.steps, "tokens": same, "said": said}


def child(run: Run, answer: Any) -> None:
    """Make one run, and answer what came of it or the sentence with which it was refused."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = compare(run, Path(folder))
        except DittoError as error:
            result = {"verdict": "refused", "said": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever else comes up is a fault of ours, and shows in the table
            result = {"verdict": "ERROR", "said": f"{type(error).__name__}: {error}"}
    answer.send({**run._asdict(), **result, "versions": versions(), "seconds": round(time.perf_counter() - start)})


def versions() -> str:
    """Name what a run was made with."""
    names = ("torch", "transformers", "onnxruntime")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


class Child:
    """A child process that makes one run, and the pipe on which it answers."""

    def __init__(self, run: Run) -> None:
        context = multiprocessing.get_context("fork")  # the libraries are loaded once
        self.run = run
        self.pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=child, args=(run, theirs))
        self._process.start()
        theirs.close()
        self._end = time.monotonic() + SECONDS

    @property
    def late(self) -> bool:
        """Tell whether it has had its time."""
        return time.monotonic() > self._end

    def result(self) -> dict[str, Any]:
        """Return its answer, and end it; one that crashed or took too long says so."""
        late = {"verdict": "unfinished", "said": f"over {SECONDS} s", "versions": versions()}
        try:
            found: dict[str, Any] = self.pipe.recv() if self.pipe.poll() else late
        except EOFError:
            found = {"verdict": "ERROR", "said": "the process ended", "versions": versions()}
        self._process.kill()
        self._process.join()
        return {**self.run._asdict(), **found}


def results_of(runs: list[Run], jobs: int) -> Iterator[dict[str, Any]]:
    """Make the runs, so many at a time, and yield each result as it comes."""
    waiting, going = list(runs), []
    while waiting or going:
        while waiting and len(going) < jobs:
            going.append(Child(waiting.pop(0)))
        ready = wait([each.pipe for each in going], timeout=1)
        for each in [each for each in going if each.pipe in ready or each.late]:
            going.remove(each)
            yield each.result()


def table(results: list[dict[str, Any]]) -> str:
    """Write the results as a page."""
    done = [r for r in results if r["verdict"] == "pass"]
    families = {r["family"] for r in results}
    passed = {r["family"] for r in done if (r["dtype"], r["source"]) == ("float32", "factory")}
    failed = [r for r in results if is_false_alarm(r)]
    made_with = "; ".join(sorted({r["versions"] for r in results}))
    lines = [
        "# Model families",
        "",
        f"Written by `python benchmarks/zoo.py --table docs/zoo.md` ({made_with}).",
        "Each row is a random model: tiny, or resnet50 and whisper_tiny in their real sizes (transformers' ResNet-50;",
        "torchvision's, and a step of diffusers' UNet, are tests). It is an ONNX Runtime engine with every module's",
        "output tapped, beside eager in the next higher precision: four steps of a batch, or one forward pass.",
        "",
        f"{len(passed)} of the {len(families)} families that were run pass in float32 "
        f"({len(passed) / max(1, len(families)):.0%}); {len(failed)} of {len(results)} runs of healthy engines fail.",
        f"In float16 {counted(results, dtype='float16')}; from a directory {counted(results, source='directory')}.",
        *(["", f"Not run yet: {', '.join(unseen)}."] if (unseen := [n for n in FAMILIES if n not in families]) else []),
        "",
        "| family | dtype | from | steps | sites | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted(results, key=lambda r: (list(FAMILIES).index(r["family"]), r["dtype"], r["source"])):
        known = EXPORTER.get(r["family"], "") if r["verdict"] == "FAIL" else ""
        said = f": {known or r['said'].splitlines()[0]}" if r["said"] else ""
        verdict = r["verdict"] + said.replace("|", "\\|")
        cells = [r["family"], r["dtype"], r["source"], str(r.get("steps", "")), str(r.get("sites", "")), verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def counted(results: list[dict[str, Any]], dtype: str = "float32", source: str = "factory") -> str:
    """Say how many of the runs in a dtype, from such a source, pass."""
    chosen = [r["verdict"] == "pass" for r in results if (r["dtype"], r["source"]) == (dtype, source)]
    return f"{sum(chosen)} of {len(chosen)} pass"


def is_false_alarm(result: dict[str, Any]) -> bool:
    """Tell whether an engine that nothing is known to be wrong with did not pass."""
    return result["verdict"] in ("FAIL", "ERROR") and result["family"] not in EXPORTER


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", default="", choices=["float32", "float16", "float64"])
    parser.add_argument("--directory", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    known = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    made = {Run(r["family"], r["dtype"], r["source"]) for r in known}
    wanted = runs(options.names or list(FAMILIES), options.dtype, directory=options.directory)
    for result in results_of([run for run in wanted if run not in made], options.jobs):
        known.append(result)
        print(json.dumps(result), flush=True)
        with options.results.open("a") as results:
            results.write(json.dumps(result) + "\n")
    if options.table:
        options.table.write_text(table(known))
    return 1 if any(map(is_false_alarm, known)) else 0


if __name__ == "__main__":
    sys.exit(main())
