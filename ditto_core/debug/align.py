"""The good graph in the names of the failing one, where their exporters named values differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx

from ditto_core.align.graphs import beside, counterparts, exact_counterparts
from ditto_core.align.matching import TOLERANCES
from ditto_core.debug.evaluate import capture
from ditto_core.debug.oracle import Reference, main_dtype
from ditto_core.errors import BuildError, RunError
from ditto_core.graphs.files import subgraphs
from ditto_core.graphs.graph import Arrays, Graph
from ditto_core.graphs.precision import fitted

NEAR = 1e-4
"""Rel-L2 up to which two float32 values are the same; of 16-bit files it is the tolerance of their dtype."""


def named_alike(failing: Graph, feed: Arrays, captured: Arrays, reference: Reference) -> Reference:
    """Return the reference with its model in the names of ``failing``, where it has one and the names differ."""
    good = reference.model
    if good is None or not set(failing.outputs) & set(good.producer) or alike(failing, good):
        return reference
    return replace(reference, model=in_names_of(failing, captured, good, capture(good, fitted(feed, good.inputs))))


def alike(failing: Graph, good: Graph) -> bool:
    """Tell whether most names of one graph are the other's too."""
    return 2 * sum(name in good.producer for name in failing.producer) > len(failing.producer)


def in_names_of(failing: Graph, captured: Arrays, good: Graph, values: Arrays) -> Graph:
    """Return ``good`` with the value names of ``failing``.

    Values are paired by what they hold (:mod:`ditto_core.align`), after the faults of ``failing`` are repaired.
    ``captured`` and ``values``: what each computes on the same inputs. A value without a counterpart gets a name that
    is not in ``failing``.
    """
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
    near = max(NEAR, TOLERANCES.get(main_dtype(failing), NEAR))
    try:
        return counterparts(beside(failing, [feed], good, [fitted(feed, good.inputs)], near)) | exact
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
