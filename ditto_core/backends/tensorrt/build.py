"""Build an engine. Everything here runs in a child process, where TensorRT may crash, and loads no torch."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto_core.backends.base import EngineTensor
from ditto_core.backends.tensorrt.layers import (
    Layer,
    layers_of_sites,
    load_layers,
    named_tensors,
    parse_inspector,
    parse_log,
    save_layers,
)
from ditto_core.backends.tensorrt.library import Library, Messages, load_library
from ditto_core.backends.tensorrt.manifest import ENGINE_FILE, EngineManifest
from ditto_core.backends.tensorrt.network import Network
from ditto_core.backends.tensorrt.state import TIMING, read_state, state_file, update_state
from ditto_core.backends.tensorrt.tensorrt_options import TensorrtOptions, dimension_sizes, ranges
from ditto_core.errors import BuildError
from ditto_core.profile import ShapeProfile
from ditto_core.sites import Tap
from ditto_core.system.gpus import describe_gpu, driver_library
from ditto_core.system.sizes import parse_size

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Order:
    """What to build, in a form that travels as JSON."""

    onnx_path: Path
    directory: Path
    taps: tuple[Tap, ...]
    decoder: bool
    dtype: str
    profile: ShapeProfile
    options: TensorrtOptions
    artifacts: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`build_engine`."""
        return {
            "onnx_path": str(self.onnx_path.absolute()),
            "directory": str(self.directory.absolute()),
            "taps": [tap.to_json() for tap in self.taps],
            "decoder": self.decoder,
            "dtype": self.dtype,
            "profile": ranges(self.profile),
            "options": self.options.to_json(),
            "artifacts": str(self.artifacts.absolute()) if self.artifacts else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Order:
        """Inverse of :meth:`to_json`."""
        return cls(
            Path(data["onnx_path"]),
            Path(data["directory"]),
            tuple(Tap.from_json(tap) for tap in data["taps"]),
            data["decoder"],
            data["dtype"],
            ShapeProfile.parse(data["profile"], data["profile"]),
            TensorrtOptions(**data["options"]),
            Path(data["artifacts"]) if data["artifacts"] else None,
        )


def build_engine(**data: Any) -> dict[str, Any]:
    """Build what an :class:`Order` asks for and return its manifest as JSON. Raises :class:`BuildError`."""
    order = Order.from_json(data)
    library = load_library()
    messages = Messages(library)
    timings: dict[str, float] = {}
    with timed(timings, "parse_s"):
        network = Network.parse(library, messages, order.onnx_path)
    outputs = [tensor.name for tensor in network.outputs()]
    taps, refused = mark_taps(network, order)
    config = configure(network, order)
    with timed(timings, "build_s"):
        engine = serialize(network, config, order)
    (order.directory / ENGINE_FILE).write_bytes(engine)
    layers, source, inspected = read_layers(library, messages, engine, bool(order.artifacts))
    if order.options.taps == "unfused":
        taps, refused = unfused_taps(layers, network, order.taps)
    manifest = EngineManifest(
        library=library.label,
        version=library.version,
        dtype=order.dtype,
        decoder=order.decoder,
        inputs=tuple(describe(network, t) for t in network.inputs()),
        outputs=tuple(describe(network, t) for t in network.outputs() if t.name in outputs),
        profiles=tuple(dict(ranges(p)) for p in order.options.shape_profiles(order.profile)),
        taps=tuple(taps),
        refused=refused,
        options=order.options.to_json(),
        facts={
            **describe_gpu(),
            **{name: round(seconds, 3) for name, seconds in timings.items()},
            "network": network.graph_size(),
            "inner": network.inner(),
            "layers": len(layers),
            "layers_from": source,
            "engine_size": len(engine),
        },
    )
    manifest.save(order.directory)
    save_layers(order.directory, layers, network.graph)
    if order.artifacts:
        write_artifacts(order.artifacts, network, manifest, layers, inspected)
    return manifest.to_json()


def explain_engine(**data: Any) -> None:
    """Write the artifacts of the engine that stands in an :class:`Order`'s directory; nothing is built."""
    order = Order.from_json(data)
    library = load_library()
    messages = Messages(library)
    network = Network.parse(library, messages, order.onnx_path)
    mark_taps(network, order)
    manifest, (known, _) = EngineManifest.load(order.directory), load_layers(order.directory)
    layers, _, inspected = read_layers(library, messages, (order.directory / ENGINE_FILE).read_bytes(), True)
    if order.artifacts:
        write_artifacts(order.artifacts, network, manifest, layers or known, inspected)


def mark_taps(network: Network, order: Order) -> tuple[list[Tap], dict[str, str]]:
    """Make the taps observable in the mode that was asked for."""
    if order.options.taps == "outputs":
        return network.mark(order.taps)
    if order.options.taps == "unfused":
        network.mark_unfused()
        return [], {}
    return [], {tap.site: "the engine was built with taps='none'" for tap in order.taps}


def unfused_taps(layers: Sequence[Layer], network: Network, taps: Sequence[Tap]) -> tuple[list[Tap], dict[str, str]]:
    """Split taps into those whose value is a tensor of the built engine and those that were fused away."""
    present = set(named_tensors(layers, network.graph).values()) | set(network.graph.outputs)
    done = [tap for tap in taps if tap.value in present]
    return done, {tap.site: "it was fused away, or its name was lost" for tap in taps if tap.value not in present}


def configure(network: Network, order: Order) -> Any:
    """Make the builder configuration: flags said explicitly, profiles, detailed verbosity, limits."""
    trt, options = network.library.module, order.options
    config = network.builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    (config.set_flag if options.tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
    if options.portable and not network.library.rtx:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, parse_size(str(options.workspace)))
    for profile in options.shape_profiles(order.profile):
        add_profile(network, config, dimension_sizes(profile))
    return config


def add_profile(network: Network, config: Any, sizes: Mapping[str, tuple[int, int, int]]) -> None:
    """Add one optimization profile. Raises :class:`BuildError` for a dimension that no profile can size."""
    profile = network.builder.create_optimization_profile()
    for tensor in network.inputs():
        if tensor.name not in network.graph.inputs:  # the parser renames an input that the graph returns as it is
            raise BuildError(f"input {tensor.name.lstrip('_')!r} is an output too, expected an Identity between them")
        template = network.graph.shapes[tensor.name]
        unknown = [d for d in template if isinstance(d, str) and d not in sizes]
        if unknown:
            known = ", ".join(sizes)
            raise BuildError(
                f"input {tensor.name!r} has a dimension {unknown[0]!r} that no profile sizes (known: {known})"
            )
        shapes = [tuple(sizes[d][i] if isinstance(d, str) else d for d in template) for i in range(3)]
        try:
            profile.set_shape(tensor.name, *shapes)
        except (RuntimeError, ValueError, TypeError) as error:  # TypeError: a size beyond 64 bits
            raise BuildError(
                f"{network.library.label} refuses shapes {', '.join(map(str, map(list, shapes)))} (min, opt, max) of "
                f"input {tensor.name!r}; a size is at most {INT32_MAX}"
            ) from error
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"{network.library.label} refuses the optimization profile: {network.messages.last()}")


def serialize(network: Network, config: Any, order: Order) -> bytes:
    """Build and return the engine file's content, with the timing cache before and after."""
    with timing_cache(network, config, order):
        try:
            engine = network.builder.build_serialized_network(network.definition, config)
        except (RuntimeError, MemoryError) as error:
            raise BuildError(f"{network.library.label} cannot build: {error}; {network.messages.last()}") from error
    if engine is None:
        raise BuildError(build_failure(network))
    return bytes(engine)


def build_failure(network: Network) -> str:
    """Say why the builder returned nothing: the last errors, and the origin of the node that they name."""
    reason = network.messages.last()
    node = network.graph.mentioned(reason)
    where = f" at ONNX node {', '.join(filter(None, (f'{node.name} ({node.operator})', node.origin)))}" if node else ""
    if "out of memory" in reason.lower():
        return f"{network.library.label} ran out of GPU memory while building{where}: {reason}"
    return f"{network.library.label} {network.library.version} could not build the engine{where}: {reason}"


@contextmanager
def timing_cache(network: Network, config: Any, order: Order) -> Iterator[None]:
    """Let the builder reuse kernel timings of earlier builds. TensorRT-RTX times nothing when it builds."""
    library = network.library
    if library.rtx or not order.options.timing_cache:
        yield
        return
    gpu = describe_gpu()
    path = state_file(order.directory, TIMING, library.version, gpu["gpu"], gpu["driver"])
    if not give_timings(config, read_state(path)):
        give_timings(config, b"")
    yield

    def merge(content: bytes) -> bytes:
        cache, others = config.get_timing_cache(), config.create_timing_cache(content)
        if others is not None:
            cache.combine(others, True)
        return bytes(cache.serialize())

    update_state(path, merge)


def give_timings(config: Any, content: bytes) -> bool:
    """Give the builder the timings of earlier builds. False where it does not take them: damaged, or another GPU's."""
    cache = config.create_timing_cache(content)
    return cache is not None and bool(config.set_timing_cache(cache, False))


def read_layers(
    library: Library, messages: Messages, engine: bytes, wanted: bool
) -> tuple[list[Layer], str, dict[str, Any] | None]:
    """Return the engine's layers, where they were read, and the inspector's own JSON where there is a GPU.

    Loading an engine takes seconds, so the builder's log is preferred where nobody asked for the inspector's file.
    """
    logged = parse_log(messages.layer_table)
    if driver_library() is None or (logged and not wanted):
        return logged, "builder log", None
    runtime = library.module.Runtime(messages.logger)
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        return logged, f"builder log (this GPU does not load the engine: {messages.last()})", None
    text = loaded.create_engine_inspector().get_engine_information(library.module.LayerInformationFormat.JSON)
    return parse_inspector(text), "engine inspector", json.loads(text)


def describe(network: Network, tensor: Any) -> EngineTensor:
    """Return name, dtype and shape of a network input or output; dynamic dimensions by name."""
    named = network.graph.shapes.get(tensor.name, ())
    shape = tuple(named) if len(named) == len(tensor.shape) else tuple(tensor.shape)
    return EngineTensor(tensor.name, network.library.torch_dtype(tensor.dtype), shape)


def write_artifacts(
    folder: Path, network: Network, manifest: EngineManifest, layers: Sequence[Layer], inspected: dict[str, Any] | None
) -> None:
    """Write the readable by-products: network, engine layers, builder configuration, kernels per site."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = [*manifest.taps, *(Tap(name, name) for name in network.graph.outputs)]
    (folder / "trt_network_def.py").write_text(network.readable(manifest.taps))
    engine = inspected or {"source": "builder log", "Layers": [layer.to_json() for layer in layers]}
    builder = {"options": manifest.options, "profiles": manifest.profiles, "facts": manifest.facts}
    kernels = layers_of_sites(layers, network.graph, everything)
    for name, data in (("trt_engine", engine), ("trt_builder_config", builder), ("trt_kernels_per_site", kernels)):
        (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


@contextmanager
def timed(timings: dict[str, float], name: str) -> Iterator[None]:
    """Record how many seconds the body took."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TensorRT deprecates by warning, release by release
        yield
    timings[name] = time.perf_counter() - start
