"""Kills, fuzzing, full disks, crashes, hangs and interrupts: what docs/reliability.md reports.

python benchmarks/reliability.py --results FILE [--only fuzz,kill,disk,crash,interrupt,ctrl-c,once] [--fuzz 240]
    [--count 100]
python benchmarks/reliability.py --results FILE --table

A line of JSON a trial; what stands in FILE is not done again. Exit code 1 when a trial did not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reliability_trials import HERE, trials

CHUNK = 60
"""Mutations in one line of the results."""
KINDS = ("kill", "disk", "crash", "interrupt", "ctrl-c", "once", "fuzz")
FUZZ = [sys.executable, str(HERE / "reliability_fuzz.py")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--fuzz", type=int, default=240, help="mutations of each format")
    parser.add_argument("--count", type=int, default=100, help="trials of each kind that is drawn at random")
    parser.add_argument("--table", action="store_true", help="print what the results hold")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if not options.table:
        for found in done(wanted, options, {line["trial"] for line in read(options.results)}):
            with options.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{found['trial']}: {'ok' if found['ok'] else json.dumps(found)[:600]}", flush=True)
    lines = read(options.results)
    print(table(lines))
    sys.exit(not all(line["ok"] for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def done(wanted: list[str], options: argparse.Namespace, known: set[str]) -> Iterator[dict[str, Any]]:
    """Do the trials that are not known and yield what each found."""
    for name, trial in trials(options.count):
        if name not in known and name.split()[0] in wanted:
            with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
                start = time.perf_counter()
                found = trial(Path(folder))
            yield {"trial": name, **found, "seconds": round(time.perf_counter() - start, 2)}
    if "fuzz" in wanted:
        yield from fuzzed(options.fuzz // CHUNK, known)


def fuzzed(chunks: int, known: set[str]) -> Iterator[dict[str, Any]]:
    """Mutate files in a child process; a chunk that kills it is reported, and the next ones get a new process."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        work = f"{folder}/work"
        listed = subprocess.run([*FUZZ, work], capture_output=True, text=True, check=True)
        names = json.loads(listed.stdout.splitlines()[-1])
        left = [f"{name}:{i}:{CHUNK}" for i in range(chunks) for name in names]
        left = [chunk for chunk in left if f"fuzz {chunk}" not in known]
        while left:
            with subprocess.Popen([*FUZZ, work, *left], stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    if line.startswith("{"):
                        found = json.loads(line)
                        left.pop(0)
                        yield {**found, "ok": not found["bad"]}
            if child.returncode and left:
                yield {"trial": f"fuzz {left.pop(0)}", "ok": False, "count": 0, "ended": child.returncode}


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Return the results as Markdown: how many trials of each kind there were, and how many held."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        rows[line["trial"].split()[0]].append(line)
    text = ["| kind | trials | held |", "| --- | --- | --- |"]
    for kind, found in rows.items():
        total = sum(line.get("count", 1) for line in found)
        bad = sum(max(len(line.get("bad", ())), not line["ok"]) for line in found)
        text.append(f"| {kind} | {total} | {total - bad} |")
    return "\n".join(text)


if __name__ == "__main__":
    main()
