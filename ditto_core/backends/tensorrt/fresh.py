"""One TensorRT build from nothing, with the tactics that it chose. Runs in a child process and loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ditto_core.backends.tensorrt.build import Order, build_failure, configure, describe, read_layers
from ditto_core.backends.tensorrt.layers import Layer, save_layers
from ditto_core.backends.tensorrt.library import Library, Messages, load_library
from ditto_core.backends.tensorrt.manifest import ENGINE_FILE, EngineManifest
from ditto_core.backends.tensorrt.network import Network
from ditto_core.backends.tensorrt.tensorrt_options import TensorrtOptions, ranges
from ditto_core.errors import BuildError
from ditto_core.profile import ShapeProfile


def build_fresh(onnx_path: str, directory: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build an engine of fixed shapes with an empty timing cache and return its layers and timing-cache entries.

    The engine and its manifest are written into ``directory``. Raises :class:`BuildError`.
    """
    library = load_library()
    messages = Messages(library)
    network = Network.parse(library, messages, Path(onnx_path))
    order = Order(Path(onnx_path), Path(directory), (), False, "float32", ShapeProfile(), TensorrtOptions(**options))
    config = configure(network, order)
    cache = fresh_cache(library, config)
    engine = network.builder.build_serialized_network(network.definition, config)
    if engine is None:
        raise BuildError(build_failure(network))
    (order.directory / ENGINE_FILE).write_bytes(bytes(engine))
    layers, _, _ = read_layers(library, messages, bytes(engine), True)
    save_layers(order.directory, layers, network.graph)
    save_manifest(network, order)
    timings = timing_entries(config.get_timing_cache()) if cache else {}
    return {"library": library.label, "layers": layer_kernels(layers), "timings": timings}


def fresh_cache(library: Library, config: Any) -> bool:
    """Give the builder an empty timing cache, editable where it can be. TensorRT-RTX times nothing: it gets none."""
    if library.rtx:
        return False
    flag = getattr(library.module.BuilderFlag, "EDITABLE_TIMING_CACHE", None)
    if flag is not None:
        config.set_flag(flag)
    config.set_timing_cache(config.create_timing_cache(b""), False)
    return flag is not None


def timing_entries(cache: Any) -> dict[str, str]:
    """Return key -> tactic of an editable timing cache (TensorRT 10.10 and later), empty where it cannot be read."""
    if not hasattr(cache, "queryKeys"):
        return {}
    return {str(key): f"{cache.query(key).tacticHash:#018x}" for key in cache.queryKeys()}


def layer_kernels(layers: list[Layer]) -> dict[str, str]:
    """Return layer -> kernel; a layer without a kernel of its own has its kind."""
    return {layer.name: layer.kernel or layer.kind for layer in layers}


def save_manifest(network: Network, order: Order) -> None:
    """Write what a session needs to know of the engine."""
    EngineManifest(
        library=network.library.label,
        version=network.library.version,
        dtype=order.dtype,
        decoder=False,
        inputs=tuple(describe(network, t) for t in network.inputs()),
        outputs=tuple(describe(network, t) for t in network.outputs()),
        profiles=(ranges(order.profile),),
        taps=(),
        options=order.options.to_json(),
    ).save(order.directory)
