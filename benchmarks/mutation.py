"""Mutation testing of comparing and judging: each small change of the code must fail a unit test.

    python benchmarks/mutation.py [--only compare/verdict.py] [--sample 50 --seed 0]
    python benchmarks/mutation.py --jobs 16 --minutes 8 --results mutation.jsonl

Operators, comparisons, numbers, ``and``, ``min``, ``not`` … are changed one at a time. A mutant is loaded in a forked
process, where it takes the place of the module, and the module's unit tests are run until one fails. ``--jobs`` mutants
run at a time; after ``--minutes`` none is started. ``--results`` keeps what was found, a JSON line a mutant: a mutant
that is there is not run again unless its module or its tests have changed. Prints the counts by module, and the mutants
that survive. Exit code 1 when one survives, 2 when some were not run. Needs ``os.fork``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.abc
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FLAGS = ("frozen=", "slots=", "strict=", "keepends=")
"""Arguments that no correct program depends on: they only forbid."""
PATIENCE = 120
"""Seconds of processor time until a mutant counts as found: it may never end."""
ASLEEP = 3600
"""Seconds until one that only waits does."""

GATES = ("test_gate_numbers.py", "test_gate_statistics.py", "test_gate_result.py", "test_gate_floor.py")
MODULES: dict[str, tuple[str, ...]] = {
    "compare/verdict.py": ("test_judging_parts.py", "test_tolerance.py", "test_comparison.py", "test_report_text.py"),
    "compare/bounds.py": ("test_judging_parts.py", "test_tolerance.py", "test_rules.py"),
    "compare/tolerance.py": (
        "test_judging_parts.py",
        "test_tolerance.py",
        "test_rules.py",
        "test_comparison.py",
        "test_judging_numbers.py",
    ),
    "compare/judging.py": (
        "test_judging_results.py",
        "test_judging_parts.py",
        "test_comparison.py",
        "test_tolerance.py",
        "test_one_verdict.py",
        "test_judging_numbers.py",
    ),
    "compare/row_error.py": ("test_judging_parts.py", "test_rows.py", "test_judging_numbers.py"),
    "compare/rows.py": ("test_rows.py", "test_judging_numbers.py"),
    "compare/risk.py": ("test_risk.py",),
    "compare/tokens.py": ("test_tokens.py", "test_judging_numbers.py"),
    "compare/ulp.py": ("test_judging_numbers.py", "test_tokens.py", "test_metrics.py"),
    "stepping/lockstep.py::token_results,noise_of": ("test_judging_numbers.py",),
    "stepping/ties.py": ("test_odd_kinds.py",),
    "stepping/choices.py": ("test_choices.py",),
    "causes/evidence.py": ("test_cause_evidence.py", "test_cause_rules.py"),
    "causes/cache.py": ("test_cause_cache.py", "test_cause_rules.py"),
    "causes/guards.py::norm_overflow": ("test_cause_norm.py",),
    "gates/verdict.py": GATES,
    "gates/limits.py": GATES,
    "gates/bootstrap.py": GATES,
    "gates/statistics.py": GATES,
}
"""The modules (or some functions of one), and the files in ``tests/unit`` that have to notice."""

OPERATORS = {
    **{"<=": "<", "<": "<=", ">=": ">", ">": ">=", "==": "!=", "!=": "=="},
    **{"+": "-", "-": "+", "*": "/", "/": "*", "**": "*"},
}
WORDS = {
    "and": "or",
    "or": "and",
    "True": "False",
    "False": "True",
    "min": "max",
    "max": "min",
    "not": "",
    "any": "all",
}
UNPACKING = ("(", ",", "[", "{", "=", "lambda")
"""Tokens after which a star unpacks."""


@dataclass(frozen=True)
class Mutant:
    """A module's source with one token changed."""

    line: int
    text: str
    source: str


@dataclass(frozen=True)
class Target:
    """One of ``MODULES``."""

    name: str

    @property
    def path(self) -> Path:
        return ROOT / "ditto_core" / self.name.partition("::")[0]

    @property
    def tests(self) -> list[str]:
        return [f"tests/unit/{name}" for name in MODULES[self.name]]

    @cached_property
    def digest(self) -> str:
        """Digest of the module's tests."""
        return hashlib.sha256(b"".join((ROOT / test).read_bytes() for test in self.tests)).hexdigest()

    def key(self, mutant: Mutant) -> str:
        """Return what a result holds for: the mutant's whole source, and the tests."""
        return hashlib.sha256(f"{self.name} {self.digest} {mutant.source}".encode()).hexdigest()[:24]

    def mutants(self) -> list[Mutant]:
        """Return the mutants of the module, or of the functions that the name asks for."""
        source = self.path.read_text()
        wanted = [name for name in self.name.partition("::")[2].split(",") if name]
        if not wanted:
            return list(mutants(source))
        found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        lines = {line for name in wanted for line in range(found[name].lineno, (found[name].end_lineno or 0) + 1)}
        return [mutant for mutant in mutants(source) if mutant.line in lines]


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order of its lines."""
    lines = source.splitlines(keepends=True)
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        new = changed(token, before)
        before = token.string
        if new is None:
            continue
        (row, start), (_, end) = token.start, token.end
        line = lines[row - 1]
        if line[:start].endswith(FLAGS) or line[start:].startswith("*,"):
            continue
        wrong = f"{line[:start]}{new}{line[end:]}"
        yield Mutant(row, wrong.strip(), "".join([*lines[: row - 1], wrong, *lines[row:]]))


def changed(token: tokenize.TokenInfo, before: str) -> str | None:
    """Return what takes a token's place, None for a token that stays."""
    if token.type == tokenize.OP and not (token.string.startswith("*") and before in UNPACKING):
        return OPERATORS.get(token.string)
    if token.type == tokenize.NAME:
        return WORDS.get(token.string)
    if token.type == tokenize.NUMBER:
        return "1" if float(token.string.replace("_", "")) == 0 else f"({token.string} * 2)"
    return None


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from another source."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self, origin=str(self.path)) if name == self.name else None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def start(target: Target, mutant: Mutant, folder: Path) -> int:
    """Run the tests on a mutant in a forked process whose temporary files go to ``folder``; return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
        signal.alarm(ASLEEP)
        name = ".".join(target.path.relative_to(ROOT).with_suffix("").parts)
        sys.meta_path.insert(0, Instead(name, target.path, mutant.source))
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / str(os.getpid())}"]
        code = int(pytest.main([*options, *target.tests]))
    finally:
        os._exit(code)


def run(work: list[tuple[Target, Mutant]], jobs: int, until: float) -> Iterator[tuple[Target, Mutant, bool]]:
    """Run mutants, ``jobs`` at a time and none after ``until``; yield each with whether it survives."""
    left, running = work[::-1], dict[int, tuple[Target, Mutant]]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        while running or (left and time.monotonic() < until):
            while left and len(running) < jobs and time.monotonic() < until:
                target, mutant = left.pop()
                running[start(target, mutant, folder)] = target, mutant
            child, status = os.wait()
            shutil.rmtree(folder / str(child), ignore_errors=True)
            yield (*running.pop(child), os.waitstatus_to_exitcode(status) == 0)


def report(chosen: Mapping[Target, list[Mutant]], known: Mapping[str, bool]) -> int:
    """Print the counts of each module, and the mutants that survive; return the exit code."""
    total = alive = missing = 0
    for target, found in chosen.items():
        left = [mutant for mutant in found if known.get(target.key(mutant))]
        unknown = sum(target.key(mutant) not in known for mutant in found)
        total, alive, missing = total + len(found), alive + len(left), missing + unknown
        note = f", {unknown} not run" if unknown else ""
        print(f"{target.name}: {len(found)} mutants, {len(left)} survive{note}")
        for mutant in sorted(left, key=lambda mutant: mutant.line):
            print(f"    {mutant.line}: {mutant.text}")
    print(f"{total} mutants, {alive} survive, {missing} not run")
    return 1 if alive else 2 if missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MODULES, action="append")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import pytest  # noqa: F401  loaded once, before the processes part
    import torch  # noqa: F401

    targets = [Target(name) for name in options.only or MODULES]
    unchanged = [(target, Mutant(0, "", target.path.read_text())) for target in targets]
    for target, _, passes in run(unchanged, options.jobs, float("inf")):
        if not passes:
            raise SystemExit(f"{target.name}: its tests fail without any mutation, or there are none")
    chosen = {target: sampled(target.mutants(), options.sample, options.seed) for target in targets}
    known: dict[str, bool] = {}
    if options.results and options.results.exists():
        known = {line["key"]: line["survives"] for line in map(json.loads, options.results.open())}
    work = [(target, mutant) for target, found in chosen.items() for mutant in found]
    for target, mutant, alive in run([w for w in work if w[0].key(w[1]) not in known], options.jobs, until):
        known[target.key(mutant)] = alive
        if options.results:
            line = {"key": target.key(mutant), "module": target.name, "line": mutant.line, "text": mutant.text}
            with options.results.open("a") as file:
                file.write(json.dumps({**line, "survives": alive}) + "\n")
    return report(chosen, known)


def sampled(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return so many of the mutants, all for 0."""
    return random.Random(seed).sample(found, count) if 0 < count < len(found) else found


if __name__ == "__main__":
    sys.exit(main())
