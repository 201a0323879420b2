"""The backend: checks a spec, builds in a child process, opens sessions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ditto_core.backends.base import BuildReport, BuildRequest, EngineLayer, Inspection
from ditto_core.backends.tensorrt.build import Order, build_engine
from ditto_core.backends.tensorrt.layers import load_layers, modules_of
from ditto_core.backends.tensorrt.library import load_library
from ditto_core.backends.tensorrt.manifest import EngineManifest
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
BUILD_LOG = "build.log"


class TensorRTBackend:
    """Engines of TensorRT 10, 11 or TensorRT-RTX; settings are
    :class:`~ditto_core.backends.tensorrt.tensorrt_options.TensorrtOptions`."""

    name = "tensorrt"
    dtypes = ("float32", "float16", "bfloat16")

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

    def check_runs(self) -> None:
        """Raise :class:`BackendError` without a GPU."""
        from ditto_core.backends.tensorrt.session import require_gpu

        require_gpu(load_library())

    def inspect(self, directory: Path) -> Inspection:
        """Describe a built engine from what stands beside it; no GPU is needed."""
        manifest, (layers, graph) = EngineManifest.load(directory), load_layers(directory)
        described = tuple(
            EngineLayer(layer.name, layer.kind, layer.kernel, tuple(modules_of(layer, graph))) for layer in layers
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
