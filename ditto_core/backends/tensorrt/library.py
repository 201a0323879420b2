"""Which TensorRT is installed, and what it says."""

from __future__ import annotations

import importlib
import re
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ditto_core.errors import BackendError, first_line

MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
LAYER_TABLE = "Layers:"
KEPT = 200
OWN_LOGGER = "The logger passed into"
"""How TensorRT begins to say, for each object after the first, that the global logger stays. Each has its own here."""
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
    "FP8": "float8_e4m3fn",
}
"""TensorRT's names of dtypes and torch's."""

_NOISE = re.compile(
    r"catchCudaError|While parsing node number|Begin node|End node|^Node name:|^ModelImporter.cpp:\d+: ---"
)
_PLACE = re.compile(
    r"\s*\(In [\w:~<>()]+ at /\S+?:\d+\)|\s*In [\w:~<>()]+ at /\S+?:\d+"
    r"|^\[\w+\.cpp::\w+::\d+\]\s*|^ModelImporter\.cpp:\d+:\s*"
)


@dataclass(frozen=True)
class Library:
    """The TensorRT that is used. ``module`` offers one API whichever it is; ``rtx`` compiles kernels at run time."""

    module: Any
    label: str
    version: str
    rtx: bool

    def torch_dtype(self, dtype: Any) -> str:
        """Return torch's name of a TensorRT dtype, without the prefix."""
        name = str(dtype.name)
        return DTYPES.get(name, name.lower())


def load_library(modules: Sequence[str] = MODULES) -> Library:
    """Import the first TensorRT that works. Raises :class:`BackendError` with the install command when none does."""
    broken = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # a stub wheel without its libraries
            broken.append(f"{name} is installed but does not load ({first_line(error)})")
            continue
        if hasattr(module, "Builder"):
            rtx = "rtx" in name
            return Library(module, "TensorRT-RTX" if rtx else "TensorRT", str(module.__version__), rtx)
    install = "pip install 'pytest-ditto-engine[tensorrt]', or [tensorrt-rtx], which builds without a GPU"
    raise BackendError(f"{'; '.join(broken) or 'TensorRT is not installed'}: {install}")


class Messages:
    """What TensorRT logged: the last warnings and errors, and the table of layers that a detailed build prints."""

    def __init__(self, library: Library) -> None:
        self._lines: deque[tuple[str, str]] = deque(maxlen=KEPT)
        self.layer_table = ""
        self.logger = _logger(library, self._take)

    def _take(self, severity: str, text: str) -> None:
        if text.startswith(LAYER_TABLE):
            self.layer_table = text
        if severity not in ("VERBOSE", "INFO") and OWN_LOGGER not in text:
            self._lines.append((severity, text))
            print(f"{severity}: {text}", file=sys.stderr, flush=True)  # stdout is for results

    @property
    def errors(self) -> list[str]:
        """Errors, oldest first, without source positions and without what merely accompanies another error."""
        errors = [text for severity, text in self._lines if "ERROR" in severity]
        told = [clean(text) for text in errors if not _NOISE.search(text)]
        return told or [clean(text) for text in errors]

    def last(self, count: int = 3) -> str:
        """Return the last errors in one line."""
        return "; ".join(dict.fromkeys(self.errors[-count:])) or "TensorRT logged no error"


def clean(text: str) -> str:
    """Make one line of a message of TensorRT and take the positions in its own sources off."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
    return " ".join(_PLACE.sub("", line) for line in lines or text.splitlines()).strip()


def _logger(library: Library, take: Any) -> Any:
    base: Any = library.module.ILogger

    class Logger(base):  # type: ignore[misc]  # the base is known at run time only
        def log(self, severity: Any, text: str) -> None:
            take(severity.name, text)

    return Logger()
