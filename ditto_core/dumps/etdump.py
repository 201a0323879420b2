"""ExecuTorch's ETDump with its debug buffer and ETRecord, read by ExecuTorch's own ``Inspector``.

The Inspector can abort the process and unpickle what the ETRecord holds, so it runs in a child process in which
torch loads tensors only. The child leaves a safetensors file; see ``etdump_child.py`` for how tensors are named.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ditto_core.dumps.base import Dump, Format, Tensors, natural, starts_with
from ditto_core.dumps.files import open_safetensors
from ditto_core.errors import BackendError, TraceError, first_line
from ditto_core.sites import Tap
from ditto_core.system.isolate import run_isolated

_MAGIC = b"ED00"
_TIMEOUT = 600.0
MOST_GAPS = 12
_SEVERAL_RUNS = "Tensors Debug Data is different"


def is_etdump(path: Path) -> bool:
    """Tell by the identifier of the flatbuffer (mostly one with a size before it) whether a file is an ETDump."""
    return starts_with(path, _MAGIC, offset=8) or starts_with(path, _MAGIC, offset=4)


def check_size(path: Path) -> None:
    """Raise :class:`TraceError` when an ETDump is shorter than the size that it begins with."""
    with path.open("rb") as file:
        head = file.read(8)
    size, found = int.from_bytes(head[:4], "little") + 4, path.stat().st_size
    if head[4:8] != _MAGIC and found < size:
        raise TraceError(f"{path} is truncated: it has {found} bytes, expected {size}")


def is_etrecord(path: Path) -> bool:
    """Tell by the archive's members whether a file is an ETRecord."""
    try:
        if not path.is_file() or not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return "ETRECORD_V0" in archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):  # a damaged archive may be of any tool
        return False


def etdumps(path: Path) -> list[Path]:
    """Return the ETDumps that a path means: the file itself, or those of a folder."""
    if path.is_dir():
        return sorted((p for p in path.iterdir() if is_etdump(p)), key=lambda p: natural(p.name))
    return [path] if is_etdump(path) or path.suffix == ".etdp" else []


def open_etdump(path: Path, etrecord: Path | str | None = None, debug_buffer: Path | str | None = None) -> Dump:
    """Open an ETDump, or the folder that holds one, as a dump of one step.

    Without ``etrecord`` and ``debug_buffer`` the files beside it are looked at: an archive that is an ETRecord, and
    the one file with ``debug`` in its name, where the folder holds one ETDump. Raises :class:`TraceError` when there is
    more than one ETDump, no debug buffer, a damaged file, or when the Inspector fails; :class:`BackendError` when
    ExecuTorch is not installed.
    """
    files = located(path, etrecord, debug_buffer)
    record = files.etrecord
    notes = () if record else (f"{path} has no ETRecord beside it: tensors are named by operator, not by module",)
    return Dump(path, "etdump", [partial(inspect, files)], files.info, notes)


@dataclass(frozen=True)
class Files:
    """What belongs to one run: the ETDump, its debug buffer, and the ETRecord where there is one."""

    etdump: Path
    buffer: Path
    etrecord: Path | None

    @property
    def info(self) -> dict[str, str]:
        """The names of the files."""
        record = self.etrecord.name if self.etrecord else "none"
        return {"etdump": self.etdump.name, "debug_buffer": self.buffer.name, "etrecord": record}


def located(path: Path, etrecord: Path | str | None, debug_buffer: Path | str | None) -> Files:
    """Return the files of a run; see :func:`open_etdump`."""
    found = etdumps(path)
    if len(found) > 1:
        raise TraceError(f"{path} holds {len(found)} ETDumps ({', '.join(p.name for p in found)}), name one of them")
    check_size(found[0])
    if importlib.util.find_spec("executorch") is None:
        raise BackendError("reading an ETDump needs ExecuTorch: pip install 'pytest-ditto-engine[executorch]'")
    record = Path(etrecord) if etrecord else beside(found[0], is_etrecord)
    buffer = Path(debug_buffer) if debug_buffer else own_buffer(found[0])
    if record and not is_etrecord(record):
        raise TraceError(f"{record} is not an ETRecord, or a damaged one")
    if buffer is None:
        raise TraceError(f"{found[0]} has no debug buffer beside it: name the file with debug_buffer= (--debug-buffer)")
    if not buffer.is_file():
        raise TraceError(f"{buffer} does not exist: it should be the debug buffer of {found[0].name}")
    return Files(found[0], buffer, record)


def own_buffer(etdump: Path) -> Path | None:
    """Return the debug buffer beside an ETDump. Raises :class:`TraceError` where it may be another ETDump's."""
    buffer, others = beside(etdump, lambda p: "debug" in p.name), etdumps(etdump.parent)
    if buffer is not None and len(others) > 1:
        raise TraceError(
            f"{buffer} may be of any of {len(others)} ETDumps ({', '.join(p.name for p in others)}): name it with "
            "debug_buffer= (--debug-buffer), or give each run a folder"
        )
    return buffer


def open_pair(path: Path, etrecord: Path, debug_buffer: Path | str | None = None) -> tuple[Dump, Dump]:
    """Open an ETDump, and what the program in its ETRecord computes on the inputs that it holds, as two dumps.

    Their taps have the module's class, the eager source line and, as ``value``, the operators. The notes of the first
    name the delegated blocks and the Inspector's own distances. Raises what :func:`open_etdump` raises.
    """
    files = located(path, etrecord, debug_buffer)
    with tempfile.TemporaryDirectory(prefix="ditto-etdump-") as folder:
        output = Path(folder) / "tensors.safetensors"
        found = in_child("ditto_core.dumps.etdump_gap:pair", files, output)
        tensors = open_safetensors(output)
        ours, theirs = (
            {each["name"]: tensors[f"{side}:{each['name']}"].clone() for each in found}
            for side in ("actual", "expected")
        )
    taps = tuple(
        Tap(each["name"], ", ".join(each["operators"]), module_class=each["kind"], source=each["source"])
        for each in found
    )
    blocks = (
        f"{each['name']} is what a delegated block returns: {', '.join(each['operators'])}"
        for each in found
        if each["block"]
    )
    notes = (*blocks, *inspector_notes(found))
    run = Dump(path, "etdump", [lambda: ours], files.info, notes, taps)
    return run, Dump(etrecord, "etrecord", [lambda: theirs], files.info, (), taps)


def inspector_notes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the Inspector's distances, those of the largest first."""
    worst = sorted(found, key=lambda each: -number(each["gap"]["MSE"]))
    left = len(worst) - MOST_GAPS
    lines = [
        f"Inspector: {each['name']} " + ", ".join(f"{name} {shown(value)}" for name, value in each["gap"].items())
        for each in worst[:MOST_GAPS]
    ]
    return lines + ([f"Inspector: {left} more, with smaller MSE"] if left > 0 else [])


def number(value: float | str) -> float:
    """Return a distance; what the Inspector could not measure is the largest."""
    return math.inf if isinstance(value, str) else value


def shown(value: float | str) -> str:
    """Return a distance to six digits, as the Inspector gives it."""
    return value if isinstance(value, str) else f"{value:.6g}"


def beside(etdump: Path, wanted: Callable[[Path], bool]) -> Path | None:
    """Return the only file beside an ETDump that is wanted. Raises :class:`TraceError` when there are several."""
    files = [p for p in sorted(etdump.parent.iterdir()) if p != etdump and p.is_file() and wanted(p)]
    if len(files) > 1:
        raise TraceError(
            f"{etdump.parent} holds {len(files)} candidates ({', '.join(p.name for p in files)}), name one"
        )
    return files[0] if files else None


def inspect(files: Files) -> Tensors:
    """Run the Inspector in a child process and return the tensors that it found, in the order of execution."""
    with tempfile.TemporaryDirectory(prefix="ditto-etdump-") as folder:
        output = Path(folder) / "tensors.safetensors"
        order = in_child("ditto_core.dumps.etdump_child:convert", files, output)
        tensors = open_safetensors(output)
        # The folder goes away with this block, and tensors may be mapped from it: hold them in memory.
        return {name: tensors[name].clone() for name in order}


def in_child(target: str, files: Files, output: Path) -> Any:
    """Call a function of the files in a child process. Raises :class:`TraceError` with the Inspector's reason."""
    paths = {"etdump": files.etdump, "etrecord": files.etrecord or "", "buffer": files.buffer, "output": output}
    try:
        return run_isolated(
            target,
            {name: str(path) for name, path in paths.items()},
            timeout=_TIMEOUT,
            env={"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": ""},
            failure=TraceError,
        )
    except TraceError as error:
        raise TraceError(f"{files.etdump} cannot be read by ExecuTorch's Inspector: {reason(error)}") from error


def reason(error: TraceError) -> str:
    """Say in one line why the Inspector failed."""
    line = first_line(error)
    if _SEVERAL_RUNS in line:
        return "it holds several runs on different data, expected one run a file"
    return line.partition("child process: ")[2] or line


def open_alone(path: Path, debug_buffer: Path | str | None = None) -> Dump:
    """Refuse an ETRecord by itself: it holds a program, and tensors only where a run says which."""
    raise TraceError(f"{path} is an ETRecord, which is compared with its run: ditto compare run.etdp {path.name}")


FORMATS = (
    Format("etdump", lambda path: bool(etdumps(path)), open_etdump, options=("etrecord", "debug_buffer")),
    Format("etrecord", is_etrecord, open_alone, options=("debug_buffer",)),
)
