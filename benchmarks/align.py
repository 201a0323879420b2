"""How well engine files of other tools are aligned by value, and whether inserted faults are named.

python benchmarks/align.py FOLDER files [TOOL]  or  FOLDER faults  writes a Markdown table to stdout; the files below
FOLDER are made once, see align_files.py for the tools that make them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from align_faults import FAULTS, inserted
from align_files import files

from ditto_core.align.aligning import Study, concluded, study
from ditto_core.align.alignment import Alignment
from ditto_core.align.fault import faults
from ditto_core.align.file import OnnxFile
from ditto_core.align.probes import HELD_OUT, probe
from ditto_core.align.quantized import quantized
from ditto_core.align.repair import all_faults
from ditto_core.align.verify import place_errors
from ditto_core.model.loading import load_model
from ditto_core.spec import ModelSource

WRONG = 10.0
"""A site that agrees on the probes and is more than this many times the tolerance off on a held-out prompt is wrong."""


@dataclass(frozen=True)
class Row:
    """One file of the table."""

    tool: str
    family: str
    found: Alignment
    wrong: int
    faults: list[str]
    seconds: float

    def __str__(self) -> str:
        found = self.found
        total = len(found.sites) + len(found.refused)
        off = len(found.sites) - len(found.agreeing)
        numbers = (
            total,
            len(found.agreeing),
            off,
            len(found.hidden),
            len(found.absent),
            len(found.ambiguous),
            self.wrong,
        )
        cells = (self.tool, self.family, *numbers, "; ".join(self.faults) or "none", f"{self.seconds:.1f}")
        return "| " + " | ".join(map(str, cells)) + " |"


def row(tool: str, family: str, source: Path, path: Path) -> Row:
    """Align one file; its model and the imports are loaded before the clock starts."""
    model = load_model(ModelSource.of(str(source)))
    start = time.perf_counter()
    file = OnnxFile(path)
    whole = quantized(model, file) if file.quantization else None
    seen = whole.study if whole else study(model, file)
    found = concluded(seen)
    seconds = time.perf_counter() - start
    judged = faults(seen.matching) if whole is None or whole.judged else []
    named = [f"{fault.operator} `{fault.node}`" for fault in (*(whole.faults() if whole else ()), *judged)]
    return Row(tool, family, found, unconfirmed(found, seen), named, seconds)


def unconfirmed(found: Alignment, seen: Study) -> int:
    """Count the sites that agree on the probes and not on a held-out prompt."""
    errors = place_errors(found, seen.model, seen.file, probe(seen.model, seen.batches[0], HELD_OUT, seed=97))
    return sum(errors[site] > WRONG * found.tolerance for site in found.agreeing if site in errors)


def table_of_files(folder: Path, only: str = "") -> None:
    """Print a row a file, of the tools whose names begin with ``only``."""
    columns = (
        *("made by", "model", "sites", "agree", "off", "hidden", "absent", "ambiguous", "wrong"),
        *("first operators that go wrong", "s"),
    )
    print("| " + " | ".join(columns) + " |")
    print("| --- " * len(columns) + "|")
    for tool, family, source, path in files(folder, lambda text: print(f"left out: {text}", file=sys.stderr)):
        if not tool.startswith(only):
            continue
        try:
            print(row(tool, family, source, path), flush=True)
        except Exception as error:  # noqa: BLE001 - the table says what failed
            print(f"| {tool} | {family} | failed: {str(error).splitlines()[0]} |", flush=True)


def table_of_faults(folder: Path) -> None:
    """Print a row an inserted fault. It is named where the operator, or one that the cause names, is the spoilt one."""
    print("| file | fault | operator named | cause | as it should |")
    print("| --- | --- | --- | --- | --- |")
    right = 0
    for fault in FAULTS:
        source = folder / "checkpoints" / fault.family
        with inserted(folder / fault.tool / fault.family, fault) as path:
            seen = study(load_model(ModelSource.of(str(source))), OnnxFile(path))
            found = [repair.fault for repair in all_faults(seen, 1)]
        named = {name for each in found for name in (each.node, *each.involved)}
        hit = any(fault.expected in name for name in named)
        right += hit
        first = f"{found[0].operator} `{found[0].node}` | {found[0].cause}" if found else "none | "
        cells = (f"{fault.tool} {fault.family}", fault.name, first, "yes" if hit else f"NO: {fault.expected}")
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\n{right} of {len(FAULTS)} named.")


if __name__ == "__main__":
    {"files": table_of_files, "faults": table_of_faults}[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
