"""One operator of a file alone: run on the probes as it is, and with an attribute, a weight or an input changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ditto_core.align.file import ask_fused, inference_session_of
from ditto_core.align.parts import run
from ditto_core.align.running import usable
from ditto_core.align.values import Array, Value
from ditto_core.errors import SelectorError
from ditto_core.graphs.cut import value_info
from ditto_core.graphs.files import read_initializer, with_data
from ditto_core.graphs.graph import Graph

if TYPE_CHECKING:
    from ditto_core.align.aligning import Sides

CHANGED = "::changed"


@dataclass(frozen=True)
class Change:
    """What is changed at an operator: ``attributes`` by name, ``inputs`` by place, one array a probe.

    ``kind`` is one word for the cause; ``text`` says what the file has and what would be right. ``involved`` are other
    operators that the cause names. ``moves`` is the operator that is to blame instead, where an input is wrong itself;
    ``put`` are the values, by name, that are then right in the place of its outputs.
    """

    kind: str
    text: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[int, Sequence[Array]] = field(default_factory=dict)
    involved: tuple[str, ...] = ()
    moves: str = ""
    put: Mapping[str, list[Array]] = field(default_factory=dict)


class Operator:
    """The operator that a study calls ``label``. What it reads are the values that the study captured.

    Raises :class:`~ditto_core.errors.SelectorError` when the file has no such operator.
    """

    def __init__(self, study: Sides, label: str) -> None:
        self.study, self.label = study, label
        self.values = {value.name: value for value in study.matching.values if value.base < 0}
        model = study.file.copy()
        ask_fused(model, [*self.values])
        self.graph = Graph(model)
        found = (i for i, node in enumerate(self.graph.nodes) if label in labels(node))
        self.index = next(found, -1)
        if self.index < 0:
            raise SelectorError(f"the file has no operator {label!r}")
        self.node = self.graph.nodes[self.index]

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the file gives."""
        from onnx import helper

        return {found.name: helper.get_attribute_value(found) for found in self.node.attribute}

    @property
    def reads(self) -> dict[int, Value]:
        """The captured values that it reads, by place."""
        return {i: self.values[name] for i, name in enumerate(self.node.input) if name in self.values}

    def weight(self, place: int) -> Array | None:
        """Return the floating weight at an input, if there is one."""
        tensor = self.graph.weights.get(self.node.input[place]) if place < len(self.node.input) else None
        array = None if tensor is None else np.asarray(read_initializer(tensor, self.study.file.folder))
        return array if array is not None and array.dtype.kind == "f" else None

    def outputs(self, change: Change) -> list[Value]:
        """Return what it computes with a change, one value an output.

        Raises :class:`~ditto_core.errors.DittoError` when ONNX Runtime refuses it.
        """
        names = [name for name in self.node.output if name in self.values]
        part, captured = self._part(change, names)
        session = inference_session_of(part)
        taken = {value.name for value in session.get_inputs()}
        runs = []
        for i, feed in enumerate(self.study.feeds):
            known = {**feed, **{name: self._given(name, i) for name in captured}}
            known |= {f"{place}{CHANGED}": arrays[i] for place, arrays in change.inputs.items()}
            runs.append(run(session, names, {name: known[name] for name in taken}))
        return [self._value(name, arrays) for name, arrays in zip(names, zip(*runs, strict=True), strict=True)]

    def _given(self, name: str, probe: int) -> Array:
        value = self.values[name]
        return value.arrays[probe].astype(value.dtype, copy=False)

    def _value(self, name: str, arrays: Sequence[Any]) -> Value:
        assert usable(arrays)
        data = [np.asarray(array, np.float32) for array in arrays]
        return Value(name, self.node.op_type, self.label, data, batches=self.values[name].batches)

    def _part(self, change: Change, names: Sequence[str]) -> tuple[Any, list[str]]:
        """Return the changed operator as a model, with what computes its uncaptured inputs; and the captured ones."""
        import onnx
        from onnx import helper

        graph, node = self.graph, onnx.NodeProto()
        node.CopyFrom(self.node)
        kept = [found for found in node.attribute if found.name not in change.attributes]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(*pair) for pair in change.attributes.items())])
        node.input.extend([""] * (max(change.inputs, default=0) + 1 - len(node.input)))
        for place in change.inputs:
            node.input[place] = f"{place}{CHANGED}"
        read = [name for name in node.input if name in graph.producer and name not in self.values]
        before = graph.upstream(read, self.values)
        nodes = [*(graph.nodes[i] for i in before), node]
        made = {name for each in nodes for name in each.output}
        needed = dict.fromkeys(name for each in nodes for name in each.input if name and name not in made)
        captured = [name for name in needed if name in self.values]
        typed = {**{name: self._given(name, 0) for name in captured}, **changed_inputs(change)}
        inputs = [value_info(name, array) for name, array in typed.items()]
        inputs += [graph.inputs[name] for name in needed if name in graph.inputs]
        folder = self.study.file.folder
        weights = [with_data(graph.weights[name], folder) for name in needed if name in graph.weights]
        ends = [onnx.ValueInfoProto(name=name) for name in names]
        return graph.with_graph(nodes, inputs, ends, weights), captured


def labels(node: Any) -> set[str]:
    """Return what a study may call a node: its name, else what it makes."""
    return {node.name} if node.name else {f"making {name}" for name in node.output}


def changed_inputs(change: Change) -> dict[str, Array]:
    """Return an example of each changed input by its name."""
    return {f"{place}{CHANGED}": arrays[0] for place, arrays in change.inputs.items()}
