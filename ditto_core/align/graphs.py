"""Two ONNX graphs of one computation: which values are the same, and where one of them goes wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ditto_core.align.aligning import Sides, measured
from ditto_core.align.feeds import fed_alike
from ditto_core.align.file import OnnxFile, inference_session_of
from ditto_core.align.layout import Layout
from ditto_core.align.matching import TOLERANCES, match
from ditto_core.align.origin import GraphOrigin
from ditto_core.align.repair import repaired
from ditto_core.align.running import capture
from ditto_core.align.values import Value
from ditto_core.errors import RunError, UsageError
from ditto_core.graphs.graph import Arrays, Graph

if TYPE_CHECKING:
    import onnx

    from ditto_core.align.parts import Feeds

MOST_FAULTS = 8
"""So many faults are repaired before what is left counts as different."""


@dataclass(frozen=True)
class Loaded:
    """A graph in memory, weights and all, as something that can be run."""

    graph: Graph
    folder: Path = Path()

    def copy(self) -> onnx.ModelProto:
        """Return the graph to be changed."""
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self.graph.model)
        return model

    def session(self, model: onnx.ModelProto) -> Any:
        """Open a changed graph, unoptimized."""
        return inference_session_of(model)


def beside(actual: Graph, feeds: Feeds, expected: Graph, others: Feeds, tolerance: float) -> Sides:
    """Run two graphs, each on its own feeds, and match their values. The second is right.

    Raises :class:`~ditto_core.errors.RunError` when one of them does not run.
    """
    batches = tuple(len(next((a for a in feed.values() if np.ndim(a)), [0])) for feed in feeds)
    sites = [replace(site, sites=(site.name,)) for site in capture(Loaded(expected), others, batches)]
    values = capture(Loaded(actual), feeds, batches)
    return Sides(Loaded(actual), feeds, match(sites, values, tolerance), GraphOrigin(expected))


def of_files(actual: OnnxFile, expected: OnnxFile, feeds: Feeds, inputs: Mapping[str, str]) -> Sides:
    """Run two files on the inputs of the second, which is right; ``inputs`` are roles of the first one's by name.

    Raises :class:`~ditto_core.errors.UsageError` when an input of the first is none of the second's,
    :class:`~ditto_core.errors.RunError` when one of them does not run.
    """
    good, graph = Graph.load(expected.path), Graph.load(actual.path)
    tolerance = max(TOLERANCES.get(file.dtype, 0.0) for file in (actual, expected))
    problem: RunError | None = None
    for own in fed_alike(actual, expected, feeds, inputs):
        try:
            return beside(graph, own, good, feeds, tolerance)
        except RunError as error:
            problem = error
    raise problem or UsageError(f"{actual.path.name} has no inputs that {expected.path.name} has")


def summary(sides: Sides, actual: str, expected: str) -> str:
    """Return what was found of two graphs as text: how many of the right values are in the other, and how."""
    matching = sides.matching
    kinds = set(matching.site_class.values())
    right = kinds & matching.agreeing
    hidden = (kinds & matching.vouched) - right
    off = {kind: found for kind, found in matching.matches.items() if kind not in right | hidden}
    lines = [
        f"{actual} against {expected}: {len(right)} of {len(kinds)} values within {matching.tolerance:.0e}, "
        f"{len(off)} off, {len(hidden)} hidden by fusion, {len(kinds - right - hidden - set(off))} not in the file"
    ]
    shown = sorted(off.items())[:MOST_FAULTS]
    lines += [f"  {matching.title(i)}: rel_l2 {m.error:.1e} in {matching.values[m.value].name}" for i, m in shown]
    return "\n".join(lines)


def lacking(sides: Sides, outputs: Collection[str]) -> list[str]:
    """Return those of the right graph's floating outputs that are nowhere in the other, right or wrong."""
    matching = sides.matching
    there = {*matching.agreeing, *matching.vouched, *matching.matches}
    kinds = {site.name: matching.site_class.get(i) for i, site in enumerate(matching.sites)}
    return [name for name in outputs if kinds.get(name) is not None and kinds[name] not in there]


def counterparts(sides: Sides) -> dict[str, str]:
    """Return value -> right value, of those that are equal as they are once every fault that is found is repaired."""
    matching = repaired(sides, MOST_FAULTS, to_the_end=True)[1].matching
    pairs: dict[str, str] = {}
    taken: set[int] = set()
    for site, found in sorted(matching.matches.items()):
        if not matching.right(found) or matching.values[found.value].base >= 0:
            continue
        ours = same_class(matching.value_class, found.value)
        theirs = same_class(matching.site_class, site)
        for j in ours:
            alike = (
                i for i in theirs if i not in taken and equal(matching.values[j], matching.sites[i], matching.tolerance)
            )
            if (i := next(alike, None)) is not None:
                taken.add(i)
                pairs[matching.values[j].name] = matching.sites[i].name
    return pairs


def same_class(classes: Mapping[int, int], member: int) -> list[int]:
    """Return the members of a class in order."""
    return [i for i, kind in classes.items() if kind == classes[member]]


def equal(value: Value, site: Value, tolerance: float) -> bool:
    """Tell whether two values agree without a change of layout."""
    if value.dims != site.dims:
        return False
    axes = tuple((f"d{i}",) for i in range(len(value.dims)))
    return measured(value, site, Layout(axes, axes)) <= tolerance


def exact_counterparts(actual: Graph, ours: Arrays, expected: Graph, theirs: Arrays) -> dict[str, str]:
    """Return the pairs of values that are no floating tensors: of one operator, with equal content, in order."""
    left = [name for name in expected.producer if is_exact(theirs.get(name))]
    pairs = {}
    for name in actual.producer:
        if not is_exact(ours.get(name)):
            continue
        kind = actual.nodes[actual.producer[name]].op_type
        same = (
            other
            for other in left
            if expected.nodes[expected.producer[other]].op_type == kind and np.array_equal(ours[name], theirs[other])
        )
        if (other := next(same, None)) is not None:
            left.remove(other)
            pairs[name] = other
    return pairs


def is_exact(array: Any) -> bool:
    """Tell whether a value is a tensor of integers or booleans."""
    return isinstance(array, np.ndarray) and array.dtype.kind in "iub"
