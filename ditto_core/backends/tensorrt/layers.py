"""The layers of a built engine: from the inspector where a GPU loads it, else from the table that the builder logs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ditto_core.errors import RunError
from ditto_core.graphs.graph import Graph
from ditto_core.sites import Tap

LAYERS_FILE, GRAPH_FILE = "layers.json", "graph.onnx"

VIEWS = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten", "Cast")

_SUFFIX = re.compile(r"(\.\d+)?(_\d+)?_myl\d+$")
_LINE = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), ")
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), (?:Location: \w+, )?Dimensions: \[(?P<shape>[^\]]*)\].*?Datatype: (?P<dtype>\w+)"
)
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")


@dataclass(frozen=True)
class LayerTensor:
    """A tensor that passes between layers; dynamic dimensions are -1."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One layer of an engine: ``kernel`` runs it, ``nodes`` are the ONNX nodes that were fused into it."""

    name: str
    kind: str
    kernel: str
    nodes: tuple[str, ...]
    inputs: tuple[LayerTensor, ...]
    outputs: tuple[LayerTensor, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layer:
        """Inverse of :meth:`to_json`."""
        tensors = {
            side: tuple(LayerTensor(t["name"], t["dtype"], tuple(t["shape"])) for t in data[side])
            for side in ("inputs", "outputs")
        }
        return cls(data["name"], data["kind"], data["kernel"], tuple(data["nodes"]), **tensors)


def parse_log(table: str) -> list[Layer]:
    """Read the table that a build with detailed profiling verbosity logs, one layer a line."""
    layers = []
    for line in table.splitlines():
        head = _LINE.match(line)
        if head is None:
            continue
        sections = {name: _section(line, name) for name in ("Inputs", "Outputs")}
        tensors = {name.lower(): tuple(map(_log_tensor, _TENSOR.finditer(text))) for name, text in sections.items()}
        kernel = re.search(r"TacticName: ([^,]*)", line)
        nodes = tuple(_NODE.findall(line.rpartition("Metadata: ")[2]))
        layers.append(Layer(head["name"], head["kind"], kernel[1] if kernel else "", nodes, **tensors))
    return layers


def parse_inspector(text: str) -> list[Layer]:
    """Read the engine inspector's JSON. Engines without detailed verbosity give names only."""
    layers = []
    for item in json.loads(text or "{}").get("Layers", []):
        if isinstance(item, str):
            layers.append(Layer(item, "", "", (), (), ()))
            continue
        tensors = {side: tuple(map(_inspected_tensor, item.get(side.title(), []))) for side in ("inputs", "outputs")}
        nodes = tuple(_NODE.findall(item.get("Metadata", "")))
        layers.append(
            Layer(item.get("Name", ""), item.get("LayerType", ""), item.get("TacticName", ""), nodes, **tensors)
        )
    return layers


def layers_of_sites(layers: Sequence[Layer], graph: Graph, taps: Iterable[Tap]) -> dict[str, list[dict[str, Any]]]:
    """Return, for each site, the layers that compute it, their kernels, and the modules that are fused into them."""
    index: dict[str, list[Layer]] = {}
    for layer in layers:
        for name in (*layer.nodes, *(f"={tensor.name}" for tensor in layer.outputs)):
            index.setdefault(name, []).append(layer)
    return {tap.site: [_fused(layer, graph) for layer in _computing(tap.value, index, graph)] for tap in taps}


def _computing(value: str, index: Mapping[str, list[Layer]], graph: Graph) -> list[Layer]:
    """Find the layers of a value by its node or by its name; a view belongs to the layers of what it views."""
    node = graph.origin(value)
    named = node is not None and node.name in graph.described
    found = (index.get(node.name) if node and named else None) or index.get(f"={value}", [])
    if not found and node and node.operator in VIEWS and node.inputs:
        return _computing(node.inputs[0], index, graph)
    return found


def named_tensors(layers: Sequence[Layer], graph: Graph) -> dict[str, str]:
    """Map the engine's own tensor names to ONNX values, where the inspector's record leaves one possibility.

    A tensor that kept its name is itself (the compiler appends ``.1_myl1``). Else its layer must have one output, the
    ONNX nodes fused into it one value that others use, and no other tensor may claim that value. A value whose user is
    in no layer's record is left unnamed: the compiler has folded that user (a residual addition) into some layer
    without saying so, and the tensor may be its result. So is what a layer makes with a node whose name others share.
    """
    kept, guessed = {}, {}
    recorded = {name for layer in layers for name in layer.nodes} & graph.described.keys()
    users = {value for node in graph.written if node.name not in recorded for value in node.inputs}
    for layer in layers:
        for tensor in layer.outputs:
            value = next((v for v in (tensor.name, _SUFFIX.sub("", tensor.name)) if v in graph.producer), None)
            if value is not None:
                kept[tensor.name] = value
        nodes = [graph.positions[name] for name in layer.nodes if name in graph.positions]
        frontier = graph.leaving([place for places in nodes for place in places])
        shared = any(len(places) > 1 for places in nodes)
        if shared or len(layer.outputs) != 1 or len(frontier) != 1 or layer.outputs[0].name in kept:
            continue
        if frontier[0] not in users and same_elements(layer.outputs[0].shape, graph.shapes.get(frontier[0], ())):
            guessed[layer.outputs[0].name] = frontier[0]
    claims = Counter([*guessed.values(), *set(kept.values())])
    return kept | {name: value for name, value in guessed.items() if claims[value] == 1}


def same_elements(engine: Sequence[int], onnx: Sequence[int | str]) -> bool:
    """Tell whether two shapes can be one tensor: equal fixed sizes at the end, whatever leads is dynamic in both.

    Matrix products run on [batch * length, features], so the dynamic dimensions may be folded into one.
    """
    fixed = [tuple(takewhile(lambda size: isinstance(size, int) and size > 0, reversed(s))) for s in (engine, onnx)]
    leading = [len(shape) - len(tail) for shape, tail in zip((engine, onnx), fixed, strict=True)]
    return fixed[0] == fixed[1] != () and all(leading)


def modules_of(layer: Layer, graph: Graph) -> list[str]:
    """Return the module paths whose ONNX nodes were fused into a layer."""
    modules = dict.fromkeys(graph.described[name].module for name in layer.nodes if name in graph.described)
    return [module for module in modules if module]


def save_layers(directory: Path, layers: Sequence[Layer], graph: Graph) -> None:
    """Write layers and the ONNX graph, without weights, beside the engine."""
    (directory / LAYERS_FILE).write_text(json.dumps([layer.to_json() for layer in layers]))
    graph.save_outline(directory / GRAPH_FILE)


def load_layers(directory: Path) -> tuple[list[Layer], Graph]:
    """Inverse of :func:`save_layers`. Raises :class:`RunError` when it cannot be read."""
    from google.protobuf.message import DecodeError

    try:
        layers = [Layer.from_json(layer) for layer in json.loads((directory / LAYERS_FILE).read_text())]
        return layers, Graph.read(directory / GRAPH_FILE)
    except (OSError, ValueError, KeyError, TypeError, DecodeError) as error:
        raise RunError(f"{directory / LAYERS_FILE} or {GRAPH_FILE} cannot be read: {error}") from error


def _fused(layer: Layer, graph: Graph) -> dict[str, Any]:
    return {"layer": layer.name, "kind": layer.kind, "kernel": layer.kernel, "modules": modules_of(layer, graph)}


def _section(line: str, name: str) -> str:
    start = line.find(f"{name}: [ {{")  # an empty list is "[]"
    return line[start : line.find("}]", start) + 1] if start >= 0 else ""


def _log_tensor(match: re.Match[str]) -> LayerTensor:
    return LayerTensor(match["name"], match["dtype"], _dimensions(match["shape"].split(",")))


def _inspected_tensor(item: Mapping[str, Any]) -> LayerTensor:
    dtype = item.get("Datatype") or item.get("Format/Datatype") or item.get("Format/DataType") or ""
    return LayerTensor(item.get("Name", ""), str(dtype), _dimensions(item.get("Dimensions", [])))


def _dimensions(items: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(item) for item in items if str(item).strip())
