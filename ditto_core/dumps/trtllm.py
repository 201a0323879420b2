"""TensorRT-LLM's ``tllm_debug`` folders, in the layouts of its Python runtime and of its C++ executor.

- Python: ``PP_{rank}/TP_{rank}[/CP_{rank}]/{name with / as .}-step{n}.npy``; every tensor is stored as float32.
- C++: ``PP_{size}/TP_{size}/iteration_{n}/{name}.npy``; a name may hold slashes. The folders are named after *sizes*,
  so that the ranks of one job write over each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ditto_core.dumps.base import Dump, Format, Lazy, Opener, Tensors, natural, once
from ditto_core.dumps.files import left_out, load_npy, open_arrays
from ditto_core.errors import TraceError, UsageError

_PYTHON = re.compile(r"(.+)-step(\d+)\.npy")
_CPP = re.compile(r"iteration_(\d+)")
_MOST_STEPS = 1 << 20
_LEAF = re.compile(r"PP_(\d+)/TP_(\d+)(?:/CP_(\d+))?")


def python_steps(leaf: Path) -> dict[int, dict[str, Path]]:
    """Return the files of a leaf in the Python runtime's layout: step -> name -> file.

    Raises :class:`TraceError` when two files are one tensor of one step.
    """
    found = ((m[1], int(m[2]), path) for path in leaf.iterdir() if (m := _PYTHON.fullmatch(path.name)))
    steps: dict[int, dict[str, Path]] = {}
    for name, number, path in once(leaf, ((f"{name}-step{n}", (name, n, path)) for name, n, path in found)).values():
        steps.setdefault(number, {})[name] = path
    return steps


def cpp_steps(leaf: Path) -> dict[int, Path]:
    """Return the folders of a leaf in the C++ executor's layout: iteration -> folder.

    Raises :class:`TraceError` when two folders are one iteration.
    """
    found = ((int(m[1]), path) for path in leaf.iterdir() if path.is_dir() and (m := _CPP.fullmatch(path.name)))
    return dict(once(leaf, ((f"iteration_{n}", (n, path)) for n, path in found), what="iterations").values())


def leaves(path: Path) -> dict[str, Path]:
    """Return the folders that hold one rank's tensors, by their place (``PP_0/TP_1``), in the order of global ranks.

    ``path`` is ``tllm_debug``, the folder that it lies in, or one rank's folder (whose place is then ``.``).
    """
    if not path.is_dir():
        return {}
    root = path / "tllm_debug" if (path / "tllm_debug").is_dir() else path
    found = {
        p.relative_to(root).as_posix(): p for depth in (2, 3) for p in root.glob("/".join("*" * depth)) if p.is_dir()
    }
    ranks = {place: p for place, p in found.items() if _LEAF.fullmatch(place) and holds_tensors(p)}
    if not ranks and holds_tensors(root):
        return {".": root}
    return {place: ranks[place] for place in sorted(ranks, key=global_rank)}


def global_rank(place: str) -> tuple[int, int, int]:
    """Sort key: TensorRT-LLM numbers tensor-parallel ranks fastest, then context, then pipeline."""
    match = _LEAF.fullmatch(place)
    pp, tp, cp = (int(g or 0) for g in match.groups()) if match else (0, 0, 0)
    return pp, cp, tp


def holds_tensors(leaf: Path) -> bool:
    """Tell whether a folder is one rank's, in either layout."""
    return any(_PYTHON.fullmatch(p.name) or (_CPP.fullmatch(p.name) and p.is_dir()) for p in leaf.iterdir())


def open_trtllm(path: Path, rank: int | str | None = None) -> Dump:
    """Open one rank of a ``tllm_debug`` folder: its number, or its place (``PP_0/TP_1``); by default the first.

    Raises :class:`UsageError` when there is no such rank, :class:`TraceError` when it holds both layouts, or an
    iteration or a tensor of a step twice.
    """
    ranks = leaves(path)
    place = choose(path, list(ranks), rank)
    leaf = ranks[place]
    info = {"rank": place, "ranks": ", ".join(ranks)}
    notes = []
    if rank is None and len(ranks) > 1:
        notes.append(f"{path} holds {len(ranks)} ranks ({', '.join(ranks)}); compared is {place}, choose with rank=")
    steps, iterations = python_steps(leaf), cpp_steps(leaf)
    if steps and iterations:
        raise TraceError(f"{leaf} holds steps of the Python runtime and iterations of the C++ executor: remove one")
    notes += left_out(leaf, {file for files in steps.values() for file in files.values()})
    if steps:
        info |= {"layout": "Python runtime", "stored as": "float32, whatever the engine's dtype"}
        return numbered(path, {n: partial(open_step, files) for n, files in steps.items()}, 0, info, notes)
    info["layout"] = "C++ executor"
    if place.strip(".") and place != "PP_1/TP_1":
        notes.append(f"{path} names sizes, not ranks ({place}): the ranks of this job wrote over each other's files")
    openers = {n: partial(open_arrays, folder) for n, folder in iterations.items()}
    return numbered(path, openers, min(openers), info, notes)


def numbered(path: Path, openers: Mapping[int, Opener], first: int, info: Mapping[str, str], notes: list[str]) -> Dump:
    """Return a dump whose steps stand at their numbers from ``first`` on; one that is missing is noted, and is empty.

    Raises :class:`TraceError` for numbers so far apart that they are those of no run.
    """
    steps = range(first, max(openers) + 1)
    if len(steps) > _MOST_STEPS:
        raise TraceError(f"{path} holds steps {first} to {steps[-1]}, {len(openers)} in all: too far apart for one run")
    lost = [str(n) for n in steps if n not in openers]
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        notes.append(f"{path} lacks steps {', '.join(lost[:5])}{more} of {first} to {steps[-1]}")
    return Dump(path, "trtllm", [openers.get(n, dict) for n in steps], info, tuple(notes), first=first)


def choose(path: Path, places: list[str], rank: int | str | None) -> str:
    """Return the place of a rank."""
    if rank in places:
        return str(rank)
    if rank is None or (isinstance(rank, int) and 0 <= rank < len(places)):
        return places[rank or 0]
    raise UsageError(f"{path} has no rank {rank!r}, it holds {len(places)}: {', '.join(places)}")


def open_step(files: dict[str, Path]) -> Tensors:
    """Open one step of the Python runtime's layout."""
    return Lazy(sorted(files, key=natural), lambda name: load_npy(files[name]))


FORMATS = (Format("trtllm", lambda path: bool(leaves(path)), open_trtllm, options=("rank",)),)
