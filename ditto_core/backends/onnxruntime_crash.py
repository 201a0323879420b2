"""Whether ONNX Runtime survives the optimization of a graph: tried in a child process, for a crash ends its process."""

from __future__ import annotations

import signal
from pathlib import Path

from ditto_core.errors import BuildError, first_line
from ditto_core.system.isolate import SIGNALS, run_isolated

AT_RISK = "float16", "all"
"""Dtype and level of the graphs that are tried. ONNX Runtime casts to float32 what its CPU provider has no float16
kernel for, and such a cast behind a transposed dimension of size 1 ends the NCHWc pass in a segmentation fault, from
1.24 on (microsoft/onnxruntime#28392)."""
CRASHES = SIGNALS[signal.SIGSEGV], SIGNALS[signal.SIGABRT]


def refuse_crashing(path: Path, dtype: str, level: str) -> None:
    """Raise :class:`BuildError` where ONNX Runtime ends the process that loads a graph. Only a graph that is
    :data:`AT_RISK` is tried; one that it refuses in words, or that the trial lacks the memory for, passes, for whoever
    loads it says so."""
    if (dtype, level) != AT_RISK:
        return
    try:
        run_isolated("ditto_core.backends.onnxruntime_crash:load", {"path": str(path)})
    except BuildError as error:
        how = first_line(error).partition(": ")[2]
        if not how.startswith(CRASHES):
            return
        raise BuildError(
            f"onnxruntime crashes while it optimizes this {dtype} graph at level {level!r} ({how}), as it would where "
            f"the engine is deployed: give options={{'level': 'extended'}}, there too"
        ) from None


def load(path: str) -> None:
    """Load a graph at the level that crashes; the child's part."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - whatever it refuses, it did not crash
        return
