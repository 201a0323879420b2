"""Our own traces as dumps: taps by their site, inputs and outputs as ``input:…`` and ``output:…``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ditto_core.dumps.base import Dump, Format, Lazy, Tensors
from ditto_core.trace import Trace
from ditto_core.trace.manifest import FORMAT, MANIFEST


def claims(path: Path) -> bool:
    """Tell whether a folder is a trace, even one with a damaged manifest."""
    manifest = path / MANIFEST
    return manifest.is_file() and (FORMAT.encode() in manifest.read_bytes() or any(path.glob("step*.safetensors")))


def open_trace(path: Path) -> Dump:
    """Open a trace."""
    trace = Trace.open(path)
    info = {"session": trace.info.label, "dtype": trace.info.judged_as}
    notes = () if trace.manifest.complete else (f"{path} is incomplete: its run ended after {trace.steps} whole steps",)
    steps = [partial(open_step, trace, i) for i in range(trace.steps)]
    complete = trace.manifest.complete
    return Dump(path, "trace", steps, info, notes, taps=trace.taps, kernels=trace.info.kernels, complete=complete)


def open_step(trace: Trace, index: int) -> Tensors:
    """Open one step: inputs, taps in topological order, outputs."""
    data = trace.step(index)
    groups = {"input": data.inputs, "tap": data.taps, "output": data.outputs}
    where = {t.key: (t.kind, t.name) for t in trace.meta(index).tensors}
    order = {tap.site: i for i, tap in enumerate(trace.taps)}
    keys = sorted(where, key=lambda key: (list(groups).index(where[key][0]), order.get(where[key][1], 0)))
    return Lazy(keys, lambda key: groups[where[key][0]][where[key][1]])


FORMATS = (Format("trace", claims, open_trace),)
