"""Mutation testing of comparing and judging: each small change of the code must fail a unit test.

    python benchmarks/mutation.py [--only compare/verdict.py] [--sample 50 --seed 0]

Operators, comparisons, numbers, ``and``, ``min``, ``not`` … are changed one at a time. A mutant is loaded in a forked
process, where it takes the place of the module, and the module's unit tests are run until one fails. Prints the mutants
that survive, and the counts. Exit code 1 when one survives. Needs ``os.fork``.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import io
import os
import random
import signal
import sys
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PATIENCE = 180
"""Seconds until a mutant counts as found: it may never end."""

GATES = ("test_gate_statistics.py", "test_gate_result.py", "test_gate_floor.py")
MODULES: dict[str, tuple[str, ...]] = {
    "compare/verdict.py": ("test_tolerance.py", "test_comparison.py", "test_report_text.py"),
    "compare/bounds.py": ("test_tolerance.py", "test_rules.py"),
    "compare/tolerance.py": ("test_tolerance.py", "test_rules.py", "test_comparison.py"),
    "compare/judging.py": ("test_comparison.py", "test_tolerance.py", "test_one_verdict.py"),
    "compare/tokens.py": ("test_tokens.py",),
    "gates/verdict.py": GATES,
    "gates/bootstrap.py": GATES,
    "gates/statistics.py": GATES,
}
"""The modules, and the files in ``tests/unit`` that have to notice."""

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


def survives(path: Path, mutant: Mutant, tests: tuple[str, ...]) -> bool:
    """Run the tests on a mutant, in a process of its own; tell whether they pass."""
    child = os.fork()
    if not child:
        code = 1
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            signal.alarm(PATIENCE)
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            sys.meta_path.insert(0, Instead(name, path, mutant.source))
            import pytest

            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/unit/{name}" for name in tests)]))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MODULES, action="append")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import pytest  # noqa: F401  loaded once, before the processes part
    import torch  # noqa: F401

    total = alive = 0
    for module in options.only or MODULES:
        path, start = ROOT / "ditto_core" / module, time.perf_counter()
        if not survives(path, Mutant(0, "", path.read_text()), MODULES[module]):
            raise SystemExit(f"{module}: its tests fail without any mutation, or there are none")
        found = list(mutants(path.read_text()))
        if 0 < options.sample < len(found):
            found = random.Random(options.seed).sample(found, options.sample)
        left = [mutant for mutant in found if survives(path, mutant, MODULES[module])]
        total, alive = total + len(found), alive + len(left)
        print(f"{module}: {len(found)} mutants, {len(left)} survive, {time.perf_counter() - start:.0f} s", flush=True)
        for mutant in sorted(left, key=lambda mutant: mutant.line):
            print(f"    {mutant.line}: {mutant.text}", flush=True)
    print(f"{total} mutants, {alive} survive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
