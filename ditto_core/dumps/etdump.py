"""ExecuTorch's ETDump with its debug buffer and ETRecord, read by ExecuTorch's own ``Inspector``.

The Inspector can abort the process and unpickle what the ETRecord holds, so it runs in a child process in which
torch loads tensors only. The child leaves a safetensors file; see ``etdump_child.py`` for how tensors are named.
"""

from __future__ import annotations

import importlib.util
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ditto_core.dumps.base import Dump, Format, Tensors, natural, starts_with
from ditto_core.dumps.files import open_safetensors
from ditto_core.errors import BackendError, TraceError, first_line
from ditto_core.system.isolate import run_isolated

_MAGIC = b"ED00"
_TIMEOUT = 600.0
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
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return "ETRECORD_V0" in archive.namelist()


def etdumps(path: Path) -> list[Path]:
    """Return the ETDumps that a path means: the file itself, or those of a folder."""
    if path.is_dir():
        return sorted((p for p in path.iterdir() if is_etdump(p)), key=lambda p: natural(p.name))
    return [path] if is_etdump(path) or path.suffix == ".etdp" else []


def open_etdump(path: Path, etrecord: Path | str | None = None, debug_buffer: Path | str | None = None) -> Dump:
    """Open an ETDump, or the folder that holds one, as a dump of one step.

    Without ``etrecord`` and ``debug_buffer`` the files beside it are looked at: an archive that is an ETRecord, and
    the one file with ``debug`` in its name. Raises :class:`TraceError` when there is more than one ETDump, no debug
    buffer, a damaged file, or when the Inspector fails; :class:`BackendError` when ExecuTorch is not installed.
    """
    found = etdumps(path)
    if len(found) > 1:
        raise TraceError(f"{path} holds {len(found)} ETDumps ({', '.join(p.name for p in found)}), name one of them")
    check_size(found[0])
    if importlib.util.find_spec("executorch") is None:
        raise BackendError("reading an ETDump needs ExecuTorch: pip install 'pytest-ditto-engine[executorch]'")
    record = Path(etrecord) if etrecord else beside(found[0], is_etrecord)
    buffer = Path(debug_buffer) if debug_buffer else beside(found[0], lambda p: "debug" in p.name)
    if record and not is_etrecord(record):
        raise TraceError(f"{record} is not an ETRecord, or a damaged one")
    if buffer is None:
        raise TraceError(f"{found[0]} has no debug buffer beside it: name the file with debug_buffer= (--debug-buffer)")
    if not buffer.is_file():
        raise TraceError(f"{buffer} does not exist: it should be the debug buffer of {found[0].name}")
    notes = () if record else (f"{path} has no ETRecord beside it: tensors are named by operator, not by module",)
    info = {"etdump": found[0].name, "debug_buffer": buffer.name, "etrecord": record.name if record else "none"}
    return Dump(path, "etdump", [partial(inspect, found[0], record, buffer)], info, notes)


def beside(etdump: Path, wanted: Callable[[Path], bool]) -> Path | None:
    """Return the only file beside an ETDump that is wanted. Raises :class:`TraceError` when there are several."""
    files = [p for p in sorted(etdump.parent.iterdir()) if p != etdump and p.is_file() and wanted(p)]
    if len(files) > 1:
        raise TraceError(
            f"{etdump.parent} holds {len(files)} candidates ({', '.join(p.name for p in files)}), name one"
        )
    return files[0] if files else None


def inspect(etdump: Path, etrecord: Path | None, buffer: Path) -> Tensors:
    """Run the Inspector in a child process and return the tensors that it found, in the order of execution."""
    with tempfile.TemporaryDirectory(prefix="ditto-etdump-") as folder:
        output = Path(folder) / "tensors.safetensors"
        paths = {"etdump": etdump, "etrecord": etrecord or "", "buffer": buffer, "output": output}
        try:
            order = run_isolated(
                "ditto_core.dumps.etdump_child:convert",
                {name: str(path) for name, path in paths.items()},
                timeout=_TIMEOUT,
                env={"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": ""},
                failure=TraceError,
            )
        except TraceError as error:
            raise TraceError(f"{etdump} cannot be read by ExecuTorch's Inspector: {reason(error)}") from error
        tensors = open_safetensors(output)
        # The folder goes away with this block, and tensors may be mapped from it: hold them in memory.
        return {name: tensors[name].clone() for name in order}


def reason(error: TraceError) -> str:
    """Say in one line why the Inspector failed."""
    line = first_line(error)
    if _SEVERAL_RUNS in line:
        return "it holds several runs on different data, expected one run a file"
    return line.partition("child process: ")[2] or line


FORMATS = (Format("etdump", lambda path: bool(etdumps(path)), open_etdump, options=("etrecord", "debug_buffer")),)
