"""Inside a blamed site: which of the exported graph's operators adds the error.

The engine is built once more with every value between the site and its captured inputs tapped. Each operator is then
computed alone, in float64, from the engine's own tensors, by the reference implementation that the onnx package has:
no kernel of an engine takes part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch

from ditto_core.compare.tolerance import EPSILON
from ditto_core.graphs.files import read_initializer
from ditto_core.graphs.graph import Graph
from ditto_core.graphs.nodes import Node
from ditto_core.graphs.precision import in_numpy, is_floating, set_float_type
from ditto_core.localize.local import FACTORS

if TYPE_CHECKING:
    from ditto_core.compare.blame import Blame
    from ditto_core.pair.sessions import Sessions
    from ditto_core.sites import Tap
    from ditto_core.spec import EngineSpec

FACTOR = 2.0
"""One operator may add this many times what a site of the dtype may."""


class OperatorCheck:
    """The operators between a blamed site and its inputs, and what each adds. ``reader.worst`` is the result."""

    def __init__(self, sessions: Sessions, blamed: Blame) -> None:
        self._path = sessions.export.graph_path()
        self._graph = Graph.read(self._path)
        self._spec = sessions.spec
        taps = {tap.site: tap.value for tap in sessions.built.taps}
        self._value = taps[blamed.site]
        self.step = blamed.step
        segment = self._graph.segment(self._value, set(taps.values()))
        self.operators = segment.operators
        self.values = [op.outputs[0] for op in self.operators if op.outputs[0] != self._value]

    @property
    def only(self) -> str:
        """The operator's description where there is just one."""
        return str(self.operators[-1]) if self.operators else ""

    @property
    def spec(self) -> EngineSpec:
        """What the closer engine is built from: each operator's result is a tap."""
        return replace(self._spec, outputs=(*self._spec.outputs, *(f"onnx:{value}" for value in self.values)))

    def reader(self, taps: Iterable[Tap]) -> Reader:
        """Return what measures the operators during a run of the closer engine, by its taps."""
        return Reader(self, {tap.site: tap.value for tap in taps})

    def measure(self, values: Mapping[str, Any]) -> str:
        """Return the first operator, in topological order, whose output is not what it computes from its inputs."""
        bound = FACTOR * FACTORS[self._spec.dtype] * EPSILON[self._spec.dtype]
        for operator in self.operators:
            error = operator_error(operator, values, self._graph, self._path.parent)
            if error is not None and not error <= bound:
                return f"{operator}: {error:.1e}"
        return ""


class Reader:
    """Takes the taps of the step at which the site was blamed, and measures the operators on them."""

    def __init__(self, check: OperatorCheck, values: Mapping[str, str]) -> None:
        self._check = check
        self._values = values
        self._past: dict[str, Any] = {}
        self.worst = ""
        """The operator that is to blame, empty when none is."""

    def start(self) -> None:
        """Begin a new sequence."""
        self._past.clear()

    def take(self, step: int, inputs: Mapping[str, torch.Tensor], captured: Mapping[str, torch.Tensor]) -> None:
        """Measure when the step is the one that was blamed."""
        arrays = {self._values[site]: as_array(tensor) for site, tensor in captured.items() if site in self._values}
        if step == self._check.step:
            given = {name: as_array(tensor) for name, tensor in inputs.items()}
            self.worst = self._check.measure({**self._past, **given, **arrays})
        self._past = {
            name.replace("present.", "past_key_values."): array.copy()
            for name, array in arrays.items()
            if name.startswith("present.")
        }


def as_array(tensor: torch.Tensor) -> Any:
    """Return a tensor, of any device, as an array; numpy has no bfloat16, float32 holds its values."""
    host = tensor.cpu()
    return (host.float() if host.dtype == torch.bfloat16 else host).numpy()


def operator_error(operator: Node, values: Mapping[str, Any], graph: Graph, folder: Path) -> float | None:
    """Return the rel-L2 of an operator's captured output against its own float64 result; None where it is not known."""
    actual = values.get(operator.outputs[0])
    feeds = {name: value_of(name, values, graph, folder) for name in operator.inputs}
    if actual is None or actual.dtype.kind != "f" or any(value is None for value in feeds.values()):
        return None
    expected = evaluate(graph, operator.outputs[0], feeds)
    if expected is None or expected.shape != actual.shape:
        return None
    difference = np.linalg.norm((actual.astype(np.float64) - expected).ravel())
    size = np.linalg.norm(expected.astype(np.float64).ravel())
    return float(difference / size) if size else float(difference > 0)


def value_of(name: str, values: Mapping[str, Any], graph: Graph, folder: Path) -> Any:
    """Return a value as float64 (integers as they are): captured, a constant, or computed from constants and shapes."""
    array = values.get(name)
    if array is None and name in graph.weights:
        array = read_initializer(graph.weights[name], folder)
    if array is None and name in graph.producer:
        feeds = {source: value_of(source, values, graph, folder) for source in graph.reads[graph.producer[name]]}
        return None if any(value is None for value in feeds.values()) else evaluate(graph, name, feeds)
    if array is None:
        return None
    return array.astype(np.float64) if is_floating(array) else array


def evaluate(graph: Graph, value: str, feeds: Mapping[str, Any]) -> Any:
    """Compute one operator's value in float64; None when the reference implementation cannot."""
    wide = onnx.NodeProto()
    wide.CopyFrom(graph.nodes[graph.producer[value]])
    set_float_type(wide, onnx.TensorProto.DOUBLE)
    try:
        return in_numpy(wide, feeds)[list(wide.output).index(value)]
    except Exception:  # noqa: BLE001 - the reference implementation raises anything for what it does not support
        return None
