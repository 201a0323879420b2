"""The backend: checks a spec, builds in a child process, opens sessions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.backends.base import BuildReport, BuildRequest, EngineLayer, FreshBuild, Inspection
from ditto_core.backends.tensorrt.build import Order, build_engine
from ditto_core.backends.tensorrt.layers import load_layers, modules_of
from ditto_core.backends.tensorrt.library import load_library
from ditto_core.backends.tensorrt.manifest import ENGINE_FILE, EngineManifest
from ditto_core.backends.tensorrt.tensorrt_options import TensorrtOptions
from ditto_core.errors import BackendError
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.system.gpus import describe_gpu
from ditto_core.system.isolate import run_isolated

if TYPE_CHECKING:
    from ditto_core.backends.tensorrt.session import TensorRTSession

TARGET = "ditto_core.backends.tensorrt.build:build_engine"
ARTIFACTS_TARGET = "ditto_core.backends.tensorrt.build:explain_engine"
FRESH_TARGET = "ditto_core.backends.tensorrt.fresh:build_fresh"
BUILD_LOG = "build.log"
SETTLED: Mapping[str, str] = {
    "taps": "the model's outputs are compared",
    "profiles": "an engine is built for the shapes of the inputs",
    "timing_cache": "each build begins with an empty one",
    "isolate": "each build runs in its own process",
    "probe": "no kernel is measured",
}
"""Options that mean nothing to a build from nothing, with the reason."""


class TensorRTBackend:
    """Engines of TensorRT 10, 11 or TensorRT-RTX; settings are
    :class:`~ditto_core.backends.tensorrt.tensorrt_options.TensorrtOptions`."""

    name = "tensorrt"
    dtypes = ("float32", "float16", "bfloat16")
    fresh_suffix = ".engine"
    fresh_settled = SETTLED

    def check(self, spec: EngineSpec) -> None:
        """Raise when TensorRT is missing, lacks the dtype or a feature, or an option is unknown."""
        library = load_library()
        options = TensorrtOptions.of(spec)
        if spec.dtype not in self.dtypes:
            raise BackendError(f"tensorrt has no {spec.dtype} kernels, expected {', '.join(self.dtypes)}")
        if options.cuda_graphs and not library.rtx:
            raise BackendError("cuda_graphs needs TensorRT-RTX, which captures them itself; leave the option out")

    def versions(self) -> dict[str, str]:
        """Library, GPU and driver. A TensorRT-RTX engine does not depend on the GPU, but its kernels do."""
        library = load_library()
        return {library.label: library.version, **describe_gpu()}

    def build(self, request: BuildRequest) -> BuildReport:
        """Build in a child process, so that a crash of the builder is a :class:`BuildError` with its log's tail."""
        order = order_of(request)
        if order.options.isolate:
            log = request.directory / BUILD_LOG
            data = run_isolated(TARGET, order.to_json(), timeout=order.options.timeout, log=log)
        else:
            data = build_engine(**order.to_json())
        manifest = EngineManifest.from_json(data)
        return BuildReport(manifest.taps, manifest.refused, manifest.facts, partial=order.options.taps == "unfused")

    def write_artifacts(self, request: BuildRequest) -> None:
        """Write what a build writes for people, from an engine that is built and its ONNX file."""
        order = order_of(request)
        run_isolated(ARTIFACTS_TARGET, order.to_json(), timeout=order.options.timeout)

    def fresh_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of a build from nothing."""
        return TensorrtOptions.parse({**options, "probe": False}).to_json()

    def build_fresh(self, onnx_path: Path, directory: Path, options: Mapping[str, Any]) -> FreshBuild:
        """Build in a child process with an empty timing cache."""
        arguments = {"onnx_path": str(onnx_path), "directory": str(directory), "options": dict(options)}
        made = run_isolated(FRESH_TARGET, arguments, timeout=options["timeout"])
        return FreshBuild(directory / ENGINE_FILE, **made)

    def check_runs(self) -> None:
        """Raise :class:`BackendError` without a GPU."""
        from ditto_core.backends.tensorrt.session import require_gpu

        require_gpu(load_library())

    def inspect(self, directory: Path) -> Inspection:
        """Describe a built engine from what stands beside it; no GPU is needed."""
        manifest, (layers, graph) = EngineManifest.load(directory), load_layers(directory)
        described = tuple(
            EngineLayer(
                layer.name,
                layer.kind,
                layer.kernel,
                tuple(modules_of(layer, graph)),
                tuple(dict.fromkeys(tensor.dtype for tensor in layer.outputs if tensor.dtype)),
            )
            for layer in layers
        )
        facts = {"library": f"{manifest.library} {manifest.version}", **manifest.options, **manifest.facts}
        return Inspection(manifest.inputs, manifest.outputs, described, manifest.profiles, facts)

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> TensorRTSession:
        """Load the engine on the current GPU. Raises :class:`BackendError` without one, :class:`RunError` otherwise."""
        from ditto_core.backends.tensorrt.session import open_session

        return open_session(spec, directory, taps)


def order_of(request: BuildRequest) -> Order:
    """Return what a request means to the child process."""
    return Order(
        request.onnx_path,
        request.directory,
        request.taps,
        request.decoder,
        request.spec.dtype,
        request.spec.profile,
        TensorrtOptions.of(request.spec),
        request.artifacts,
    )
