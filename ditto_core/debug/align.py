"""The good graph in the names of the failing one, where their exporters named values differently."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ditto_core.align.graphs import beside, counterparts, exact_counterparts
from ditto_core.errors import BuildError, RunError
from ditto_core.graphs.files import subgraphs
from ditto_core.graphs.graph import Arrays, Graph
from ditto_core.graphs.precision import fitted

NEAR = 1e-4
"""Rel-L2 up to which two values are the same."""


def in_names_of(failing: Graph, captured: Arrays, good: Graph, values: Arrays) -> Graph:
    """Return ``good`` with the value names of ``failing``; as it is when most names of ``failing`` are its own too.

    Values are paired by what they hold (:mod:`ditto_core.align`), after the faults of ``failing`` are repaired.
    ``captured`` and ``values``: what each computes on the same inputs. A value without a counterpart gets a name that
    is not in ``failing``.
    """
    if 2 * sum(name in good.producer for name in failing.producer) > len(failing.producer):
        return good
    kept = {name for name in (*failing.inputs, *failing.outputs) if name in {*good.inputs, *good.outputs}}
    pairs = paired(failing, captured, good, values)
    counterpart = {theirs: ours for ours, theirs in pairs.items() if not kept & {ours, theirs}}
    counterpart |= {name: name for name in kept}
    taken = {*failing.producer, *failing.weights, *failing.inputs}
    foreign = {n: f"{n}//reference" for n in (*good.producer, *good.weights) if n in taken and n not in counterpart}
    return Graph(renamed(good.model, {**counterpart, **foreign}))


def paired(failing: Graph, captured: Arrays, good: Graph, values: Arrays) -> dict[str, str]:
    """Return value -> good value; only those that are no floating tensors where a graph does not run in one piece."""
    exact = exact_counterparts(failing, captured, good, values)
    feed = {name: captured[name] for name in failing.inputs if name in captured}
    try:
        return counterparts(beside(failing, [feed], good, [fitted(feed, good.inputs)], NEAR)) | exact
    except (RunError, BuildError):
        return exact


def renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Return the model with other names of values, inside its subgraphs too."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    rename(result.graph, names)
    return result


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Give the values of a graph and of the graphs inside its nodes other names."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
        for inner in subgraphs(node):
            rename(inner, names)
