"""Dumps of any tool; ``open_dump(path)`` detects the format from the path.

=============  =====================================================================================================
format         what it is
=============  =====================================================================================================
``trace``      our own traces
``trtllm``     TensorRT-LLM's ``tllm_debug`` folders, of the Python runtime and of the C++ executor
``etdump``     ExecuTorch's ETDump with its debug buffer and, for names, its ETRecord
``polygraphy`` what Polygraphy's ``--save-outputs`` and ``--save-inputs`` write: a JSON file, or a folder of them
``trtexec``    the JSON of ``trtexec --exportOutput``
``steps``      a folder of ``step{i}.pt``, ``.safetensors`` or ``.npz``
``arrays``     a folder of ``.npy`` files
``file``       a single ``.safetensors``, ``.npz``, ``.npy`` or ``.pt``
=============  =====================================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ditto_core.dumps import etdump, files, polygraphy, traces, trtexec, trtllm
from ditto_core.dumps.base import Dump, Format
from ditto_core.errors import TraceError, UsageError, nearest
from ditto_core.system.files import path_of

__all__ = ["FORMATS", "Dump", "Format", "format_of", "open_dump"]

FORMATS: tuple[Format, ...] = (
    *traces.FORMATS,
    *trtllm.FORMATS,
    *etdump.FORMATS,
    *trtexec.FORMATS,
    *polygraphy.FORMATS,
    *files.FORMATS,
)
"""The formats, in the order in which they are asked whether a path is theirs."""


def open_dump(path: Path | str, **options: Any) -> Dump:
    """Open a dump of any format that this version reads.

    ``options``: ``rank`` (``trtllm``: a number, or a place such as ``PP_0/TP_1``), ``runner`` (``polygraphy``: a
    runner's name or the beginning of it), ``etrecord`` and ``debug_buffer`` (``etdump``: paths, if not found beside).

    Raises :class:`TraceError` when the path is missing, of no known format, or damaged, :class:`UsageError` for an
    option that the format does not have.
    """
    path = path_of(path, "dump")
    form = format_of(path)
    return form.open(path, **checked(form, options))


def format_of(path: Path | str) -> Format:
    """Return the format of a dump. Raises :class:`TraceError` when the path is missing or of no known format."""
    path = path_of(path, "dump")
    if not path.exists():
        raise TraceError(f"{path} does not exist")
    if not path.is_file() and not path.is_dir():  # reading it might never end
        raise TraceError(f"{path} is a pipe or a device, expected a file or a folder")
    for candidate in FORMATS:
        if candidate.claims(path):
            return candidate
    known = ", ".join(f.name for f in FORMATS)
    raise TraceError(f"{path} is not a dump of a known format (known: {known})")


def checked(form: Format, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are set. Raises :class:`UsageError` for one that the format does not take."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in form.options:
            takes = ", ".join(form.options) or "none"
            raise UsageError(
                f"a dump of format {form.name} has no option {name!r}{nearest(name, form.options)} (options: {takes})"
            )
    return given
