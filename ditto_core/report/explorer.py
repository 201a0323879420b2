"""A comparison as node data for Google's Model Explorer, and as metadata in an ONNX file for Netron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import UsageError

if TYPE_CHECKING:
    import onnx

    from ditto_core.compare.comparison import Comparison
    from ditto_core.compare.result import SiteResult

PREFIX = "ditto_"
LARGEST = 1e30
"""Stands for a margin of infinity, which JSON lacks."""

THRESHOLDS = ((0.1, "#4393c3"), (1.0, "#d1e5f0"), (10.0, "#fdb863"), (100.0, "#e08214"), (LARGEST, "#b35806"))
"""Colours up to each error / bound: blue is below the bound, orange above it. A gradient would not do, since Model
Explorer stretches it over the values that are there."""


def overlay(comparison: Comparison, model: Path) -> dict[str, Any]:
    """Return node data for Model Explorer: error / bound at each tensor's worst step, on the graph of an ONNX file.

    The ONNX adapter (``model-explorer-onnx``) calls a graph and its nodes as the file does; tensors cannot be keys,
    since it names them otherwise than Model Explorer looks for. Nodes without a name are left out: the adapter makes
    one up. Raises :class:`UsageError` when the file is not ONNX, or no node with a name computes what was compared.
    """
    graph = load(model, data=False).graph
    worst = worst_by_value(comparison)
    results = {
        node.name: {"value": min(max(r.verdict.margin for r in found), LARGEST)}
        for node in graph.node
        if node.name and (found := [worst[name] for name in node.output if name in worst])
    }
    if not results:
        raise stranger(model, len(worst))
    title = f"{comparison.engine.label} against {comparison.reference.label}: error / bound"
    thresholds = [{"value": top, "bgColor": color} for top, color in THRESHOLDS]
    return {graph.name: {"name": title, "results": results, "thresholds": thresholds}}


def write_overlay(comparison: Comparison, path: Path, model: Path) -> None:
    """Write the overlay as JSON. Raises :class:`UsageError` as :func:`overlay` does, and :class:`TraceError`."""
    from ditto_core.system.files import replace_text

    replace_text(path, json.dumps(overlay(comparison, model), indent=1, allow_nan=False) + "\n")


def worst_by_value(comparison: Comparison) -> dict[str, SiteResult]:
    """Return the worst result by name of its ONNX value."""
    found: dict[str, SiteResult] = {}
    for result in comparison:
        tap = comparison.tap_of.get(result.site)
        found.setdefault(tap.value if tap else result.site, result)
    return found


def annotate_onnx(comparison: Comparison, model: Path, path: Path) -> int:
    """Write ``model`` again with each result in the metadata of the node that computes it; return how many nodes.

    External weights are copied beside it, unless they are there already. Raises :class:`UsageError` when the file is
    not ONNX, holds none of the compared values, or other weights are there; :class:`TraceError` when it cannot be
    written.
    """
    from ditto_core.system.atomic import write_atomic
    from ditto_core.system.files import writing

    graph = load(model, data=False)
    worst = worst_by_value(comparison)
    count = 0
    for node in graph.graph.node:
        found = [worst[name] for name in node.output if name in worst]
        if found:
            annotate(node, found[0])
        count += bool(found)
    if not count:
        raise stranger(model, len(worst))
    from ditto_core.graphs.files import place_weights

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        place_weights(graph, model.parent, path.parent, copy=True)
        write_atomic(path, graph.SerializeToString())
    return count


def stranger(model: Path, count: int) -> UsageError:
    """Return the error for a model that has nothing to do with the comparison."""
    return UsageError(f"{model} computes none of the {count} tensors that were compared: is it this engine's?")


def annotate(node: onnx.NodeProto, result: SiteResult) -> None:
    """Put a result into a node's metadata, before the exporter's, which is long; an earlier one is replaced."""
    others = [(entry.key, entry.value) for entry in node.metadata_props if not entry.key.startswith(PREFIX)]
    del node.metadata_props[:]
    for key, value in (*((PREFIX + key, value) for key, value in facts(result).items()), *others):
        node.metadata_props.add(key=key, value=value)


def facts(result: SiteResult) -> dict[str, str]:
    """Return what a node's metadata says."""
    v, m = result.verdict, result.metrics
    return {
        "site": result.site,
        "status": "healed" if result.healed else v.status,
        "margin": f"{v.margin:.4g}",
        "verdict": f"step {result.step}: {v}",
        "rel_l2": f"{m.rel_l2:.4g}",
        "max_abs": f"{m.max_abs:.4g}",
        "cosine": f"{m.cosine:.8g}",
    }


def load(path: Path, *, data: bool) -> onnx.ModelProto:
    """Read an ONNX file. Raises :class:`UsageError` when it is none."""
    from ditto_core.graphs.files import read_graph, read_model

    try:
        return read_model(path) if data else read_graph(path)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{path} is not an ONNX file: {type(error).__name__}") from error
