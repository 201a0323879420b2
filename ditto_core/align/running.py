"""What a file computes on the probes: every floating value of its graph, unoptimized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ditto_core.align.binding import FUSED_CACHES, Binding, bindings
from ditto_core.align.exact import added
from ditto_core.align.file import OnnxFile, ask_fused
from ditto_core.align.parts import Feeds, Runnable, outputs_of, run_in_parts
from ditto_core.align.probes import BATCHES, OWN, Probe
from ditto_core.align.store import Lazy, Store
from ditto_core.align.values import Array, Value
from ditto_core.errors import BuildError, RunError
from ditto_core.graphs.outputs import COMPUTED, replace_outputs

if TYPE_CHECKING:
    import onnx

    from ditto_core.model.loading import LoadedModel

Forced = Mapping[str, Sequence[Array]]
"""Values that are given instead of computed: one array a probe, by name."""


def capture(file: Runnable, feeds: Feeds, batches: tuple[int, ...], forced: Forced | None = None) -> list[Value]:
    """Return every floating value of a file on all probes. Raises :class:`RunError` when it does not run on one."""
    try:
        return run_exposed(file, feeds, batches, forced or {}, inside=True)
    except (RunError, BuildError):  # an operator of this version cannot show what it was asked for
        return run_exposed(file, feeds, batches, forced or {}, inside=False)


def run_exposed(file: Runnable, feeds: Feeds, batches: tuple[int, ...], forced: Forced, *, inside: bool) -> list[Value]:
    """Run the file with every value exposed; see :func:`capture`."""
    model = file.copy()
    if inside:
        ask_fused(model)
    replace_outputs(model, {name: arrays[0] for name, arrays in forced.items()})
    store = Store()
    made: dict[str, Computed] = {}
    whole = [{**feed, **{name: arrays[i] for name, arrays in forced.items()}} for i, feed in enumerate(feeds)]
    skipped = of_weights(model)
    for name, arrays in run_in_parts(file, model, whole, lambda name: name not in skipped):
        if usable(arrays):
            made[name] = Computed(arrays[0].dtype.name, Lazy(store.keep(array) for array in arrays))
    return values_of(model, made, forced, batches)


def of_weights(model: onnx.ModelProto) -> set[str]:
    """Return the constants, and the values that only prepare quantized weights: no site of the model is one."""
    known = {tensor.name for tensor in model.graph.initializer}
    prepared: set[str] = set()
    unseen: set[str] = set()
    for node in model.graph.node:
        stored = all(name in known or name in prepared for name in node.input if name)
        started = node.op_type == "DequantizeLinear" or added(node.output[0])
        if node.op_type == "Constant":
            known |= set(node.output)
        elif stored and (started or any(name in prepared for name in node.input)):
            prepared |= set(node.output)
        if node.op_type == "Constant" or added(node.output[0]):
            unseen |= set(node.output)
    return prepared | unseen


@dataclass(frozen=True)
class Computed:
    """A floating value on all probes, and the dtype that it was computed in."""

    dtype: str
    arrays: Sequence[Array]


def values_of(
    model: onnx.ModelProto, made: Mapping[str, Computed], forced: Forced, batches: tuple[int, ...]
) -> list[Value]:
    """Return the floating values in the graph's order. Through integers and shapes nothing is inherited."""
    values: list[Value] = []
    origin: dict[str, tuple[int, ...]] = {}
    known = {**made, **{name: put(arrays) for name, arrays in forced.items()}}
    for name in sorted(known.keys() & {tensor.name for tensor in model.graph.initializer}):
        values.append(Value(name, "Constant", f"holding {name}", known[name].arrays, batches=batches))
    for node in model.graph.node:
        parents = tuple(sorted({i for name in node.input for i in origin.get(name, ())}))
        returned = {node.output[i] for i in FUSED_CACHES.get(node.op_type, {}).values() if i < len(node.output)}
        for output in filter(None, node.output):
            name = output.removesuffix(COMPUTED)
            if name not in known:
                origin[name] = parents
                continue
            origin[name] = (len(values),)
            inherited = () if name in forced else parents
            place = node.name or f"making {name}"
            value = Value(name, node.op_type, place, known[name].arrays, inherited, batches=batches)
            value.dtype, value.vouches = known[name].dtype, output not in returned
            values.append(value)
    return values


def put(arrays: Sequence[Array]) -> Computed:
    """Return a value that was put in a node's place."""
    return Computed(arrays[0].dtype.name, [array.astype(np.float32) for array in arrays])


def usable(arrays: Sequence[Any]) -> bool:
    """Tell whether a value is a floating tensor with elements, of one rank on all probes; a sequence is no tensor."""
    if not all(isinstance(array, np.ndarray) for array in arrays):
        return False
    floating = all(array.dtype.kind == "f" or "float" in array.dtype.name for array in arrays)
    return floating and all(array.size for array in arrays) and len({array.ndim for array in arrays}) == 1


def fed(binding: Binding, probe: Probe) -> dict[str, Any]:
    """Return the arrays of a first step on a probe."""
    inputs = {name: tensor.numpy() for name, tensor in probe.inputs.items()}
    return {**binding.feed(inputs, 0), **binding.empty(probe.batch)}


def bind(
    file: OnnxFile, model: LoadedModel, probes: Sequence[Probe], finals: Mapping[str, Value], given: Mapping[str, str]
) -> Binding:
    """Return how the file is fed: of several readings of its inputs, the one nearest to the model's outputs.

    Raises :class:`~ditto_core.errors.UsageError` when an input fits nothing, :class:`RunError` when no reading runs.
    """
    config = getattr(model.module, "config", None)
    first = probes[0].inputs
    kinds = {name: ("float" if tensor.is_floating_point() else "int", tensor.ndim) for name, tensor in first.items()}
    choices = bindings(file, list(first), kinds, config if model.decoder else None, given)
    if len(choices) == 1:
        return choices[0]
    graph = file.copy()
    names = [value.name for value in graph.graph.output]
    scores: list[tuple[float, int]] = []
    problem: RunError | None = None
    for i, choice in enumerate(choices):
        try:
            found = outputs_of(file, graph, fed(choice, probes[0]), names).values()
        except RunError as error:
            problem = error
            continue
        scores.append((nearest_error(found, finals), i))
    if not scores:
        raise problem or RunError("onnxruntime failed: the file has no inputs that the model has")
    return choices[min(scores)[1]]


def nearest_error(outputs: Iterable[Any], finals: Mapping[str, Value]) -> float:
    """Return the smallest relative L2 distance of any output to any final output of the model of the same shape."""
    distances = [1e9]
    for output in outputs:
        for value in finals.values():
            expected = value.arrays[0]
            if getattr(output, "shape", None) == expected.shape:
                distance = np.linalg.norm((output.astype(np.float64) - expected).ravel())
                distances.append(float(distance / (np.linalg.norm(expected.ravel()) + 1e-30)))
    return min(distances)


def takes(file: OnnxFile) -> tuple[int, ...]:
    """Return the batches to try: the only one that a file takes, or two; 0, the examples' own, where inputs differ."""
    inputs = [port for port in file.inputs if port.shape and not any(w in port.name for w in ("past", "cache"))]
    batches = {port.shape[0] for port in inputs}
    fixed = {size for size in batches if isinstance(size, int)}
    if not fixed:
        return BATCHES
    return (fixed.pop(),) * 2 if len(batches) == 1 else OWN
