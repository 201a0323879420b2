"""Run ONNX models on arrays: with ONNX Runtime, or node by node in numpy where it has no kernel for a dtype."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ditto_core.backends.onnxruntime import LEVELS, load_library
from ditto_core.errors import RunError, UsageError, first_line, nearest
from ditto_core.graphs.files import LARGEST, save
from ditto_core.graphs.graph import Arrays, Graph
from ditto_core.graphs.outputs import with_outputs
from ditto_core.graphs.precision import in_numpy, widened

WIDE = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
"""The precisions in which a reference can be evaluated."""


@dataclass(frozen=True)
class OnnxRuntime:
    """How ONNX Runtime loads a model: optimization ``level``, ``provider``, ``threads``."""

    level: str = "all"
    provider: str = "CPUExecutionProvider"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            known = ", ".join(LEVELS)
            raise UsageError(
                f"unknown optimization level {self.level!r}, expected {known}{nearest(self.level, LEVELS)}"
            )

    def load(self, model: onnx.ModelProto, optimized: Path | None = None) -> Any:
        """Return an InferenceSession; ``optimized`` receives the optimized model. Raises :class:`RunError`."""
        library = load_library()
        options = library.SessionOptions()
        options.log_severity_level = 3 if optimized is None else 4
        options.intra_op_num_threads = self.threads
        options.graph_optimization_level = getattr(library.GraphOptimizationLevel, f"ORT_{LEVELS[self.level]}")
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        try:
            if model.ByteSize() < LARGEST:
                return library.InferenceSession(model.SerializeToString(), options, providers=[self.provider])
            with tempfile.TemporaryDirectory(prefix="ditto-debug-") as folder:
                path = Path(folder) / "model.onnx"
                save(model, path)
                return library.InferenceSession(str(path), options, providers=[self.provider])
        except Exception as error:
            raise RunError(f"onnxruntime refuses the model: {first_line(error)}") from error

    def run(self, model: onnx.ModelProto, feed: Arrays, outputs: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the model's outputs by name. Raises :class:`RunError`."""
        return run_session(self.load(model), feed, outputs)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


PLAIN = OnnxRuntime(level="disable")
"""ONNX Runtime without fusions: one kernel an operator."""


def run_session(session: Any, feed: Arrays, outputs: Sequence[str] | None = None) -> dict[str, Any]:
    """Run an InferenceSession with those arrays of ``feed`` that it takes. Raises :class:`RunError`."""
    names = list(outputs or (value.name for value in session.get_outputs()))
    taken = {value.name: feed[value.name] for value in session.get_inputs() if value.name in feed}
    try:
        return dict(zip(names, session.run(names, taken), strict=True))
    except Exception as error:
        raise RunError(f"onnxruntime failed: {first_line(error)}") from error


def capture(graph: Graph, feed: Arrays, engine: OnnxRuntime = PLAIN) -> dict[str, Any]:
    """Run once with every value as an output (mark-all); return inputs and values. Raises :class:`RunError`."""
    values = engine.run(with_outputs(graph.model, graph.producer), feed)
    return {**feed, **{name: array for name, array in values.items() if isinstance(array, np.ndarray)}}


def evaluate(model: onnx.ModelProto, feed: Arrays, outputs: Sequence[str]) -> dict[str, Any]:
    """Return ``outputs`` of a model without fusions; where a kernel is missing, node by node (numpy for those).

    An output that cannot be computed at all is left out.
    """
    try:
        return PLAIN.run(with_outputs(model, outputs), feed)
    except RunError:
        return node_by_node(Graph(model), feed, outputs)


def node_by_node(graph: Graph, feed: Arrays, outputs: Sequence[str]) -> dict[str, Any]:
    """Evaluate every node as a separate model; a node whose inputs are missing or that fails has no result."""
    values = dict(feed)
    for i in range(len(graph.nodes)):
        if all(name in values for name in graph.reads[i] if name not in graph.weights):
            values.update(one_node(graph, i, values))
    return {name: values[name] for name in outputs if name in values}


def one_node(graph: Graph, index: int, values: Arrays) -> dict[str, Any]:
    """Return the outputs of one node, by ONNX Runtime or else by onnx's own numpy implementation."""
    node = graph.nodes[index]
    inputs = [graph.typed(name, values) for name in graph.reads[index] if name not in graph.weights]
    names = [name for name in node.output if name]
    model = graph.with_graph(
        [node], inputs, [onnx.ValueInfoProto(name=name) for name in names], graph.weights_of([index])
    )
    feed = {value.name: values[value.name] for value in inputs}
    with suppress(RunError):
        return PLAIN.run(model, feed)
    with suppress(Exception):  # whatever the other raises, this value is not known, and callers count those
        return dict(zip(names, in_numpy(model, feed), strict=True))
    return {}


def widen(graph: Graph, dtype: str) -> Graph:
    """Return the same graph with every floating-point value in ``dtype`` (float32 or float64)."""
    if dtype not in WIDE:
        raise UsageError(f"unknown precision {dtype!r}, expected {' or '.join(WIDE)}{nearest(dtype, WIDE)}")
    return Graph(widened(graph.model, WIDE[dtype]))
