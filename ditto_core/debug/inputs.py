"""Real inputs of a graph, from a file of tensors or from a recorded trace. Nothing is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ditto_core.dumps import open_dump
from ditto_core.errors import UsageError
from ditto_core.graphs.graph import Graph
from ditto_core.graphs.precision import fitted

PREFIXES = ("", "input:", "output:")
"""How a trace may call what the graph calls by its bare name."""


def read_arrays(path: Path, step: int = 0) -> dict[str, Any]:
    """Return the arrays of one step of a file or trace, by name; ``input:`` of traces is taken off.

    Raises :class:`~ditto_core.errors.TraceError` when the file cannot be read or has no such step.
    """
    dump = open_dump(path)
    arrays = {}
    for name in dump.names(step):
        tensor = dump.load(step, name)
        bare = next(name.removeprefix(p) for p in reversed(PREFIXES) if name.startswith(p))
        arrays[bare] = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return arrays


def read_inputs(path: Path, graph: Graph, step: int = 0) -> dict[str, Any]:
    """Return what the graph takes, in its dtypes. In step 0 an absent KV cache is the empty one.

    Raises :class:`UsageError` for inputs that the file lacks, and for integers where the graph takes none.
    """
    arrays = read_arrays(path, step)
    feed = fitted({name: arrays[name] for name in graph.inputs if name in arrays}, graph.inputs)
    batch = next((array.shape[0] for array in feed.values() if array.ndim), 1)
    for name, value in graph.inputs.items():
        if name not in feed and name.startswith("past_key_values.") and step == 0:
            feed[name] = empty_past(value, batch)
    missing = [name for name in graph.inputs if name not in feed]
    if missing:
        names = ", ".join(missing[:5])
        raise UsageError(
            f"{path} lacks {len(missing)} of {len(graph.inputs)} inputs of the graph in step {step}: {names}"
        )
    for name, value in graph.inputs.items():
        expected = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if feed[name].dtype != expected:
            raise UsageError(f"input {name!r} of {path} is {feed[name].dtype}, the graph takes {expected}")
    return feed


def empty_past(value: onnx.ValueInfoProto, batch: int) -> Any:
    """Return a cache of length zero: [batch, kv_head, 0, head_dim]."""
    tensor = value.type.tensor_type
    _, heads, _, size = (dim.dim_value for dim in tensor.shape.dim)
    return np.zeros((batch, heads, 0, size), helper.tensor_dtype_to_np_dtype(tensor.elem_type))
