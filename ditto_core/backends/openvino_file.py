"""An existing OpenVINO IR as an engine: it is compiled unchanged and shows its outputs."""

from __future__ import annotations

import shutil
from pathlib import Path

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.given_file import check_options, not_there
from ditto_core.backends.openvino import OpenVinoSession, configuration, dtype_of, load_library
from ditto_core.backends.outputs_file import write_outputs
from ditto_core.errors import BuildError, UsageError, first_line, nearest
from ditto_core.graphs.files import read_graph
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

ENGINE_FILE = "engine.xml"
OPTIONS = ("file", "threads", "config")


class IrBackend:
    """Runs a ``.xml`` file with its ``.bin`` beside it, on the CPU. Options: ``file`` (the marker's ``engine=``), and
    those of the backend ``openvino``.

    Inputs and outputs have the names of the exported model: those of an ONNX file that was converted.
    """

    name = "ir-file"
    dtypes = ("float32", "float16", "bfloat16")

    def check(self, spec: EngineSpec) -> None:
        """Raise when openvino or the file is missing, or an option is unknown."""
        library = load_library()
        check_options(spec, OPTIONS, "an IR", "model.xml")
        for path in files(spec):
            if not path.is_file():
                raise not_there(path, "a .xml file with its .bin beside it")
        configuration(library, spec)

    def versions(self) -> dict[str, str]:
        """OpenVINO compiles when it loads a file, so its version decides the bits."""
        return {"openvino": load_library().__version__}

    def content(self, spec: EngineSpec) -> dict[str, str]:
        """Return the digests of the file and its weights. Part of the cache key."""
        from ditto_core.system.fingerprint import hash_file

        return {path.name: hash_file(path) for path in files(spec)}

    def build(self, request: BuildRequest) -> BuildReport:
        """Copy the file and its weights. Raises :class:`BuildError` when it is not one of this model."""
        spec = request.spec
        for path in files(spec):
            shutil.copyfile(path, request.directory / f"engine{path.suffix}")
        check_ports(request, files(spec)[0].name)
        write_outputs(request.directory, request.outputs)
        taps = tuple(tap for tap in request.taps if tap.value in request.outputs)
        refused = {tap.site: "an IR shows its outputs only" for tap in request.taps if tap not in taps}
        return BuildReport(taps, refused, {"file": spec.option("file"), **self.content(spec)}, partial=True)

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> OpenVinoSession:
        """Compile the file. Raises :class:`BuildError` when OpenVINO refuses it."""
        return OpenVinoSession(spec, directory, taps, ENGINE_FILE)


def files(spec: EngineSpec) -> tuple[Path, Path]:
    """Return the file and its weights."""
    path = Path(spec.option("file"))
    return path, path.with_suffix(".bin")


def check_ports(request: BuildRequest, name: str) -> None:
    """Raise :class:`BuildError` when an input or output of the model is missing, or another dtype was given."""
    try:
        model = load_library().Core().read_model(str(request.directory / ENGINE_FILE))
    except RuntimeError as error:
        raise BuildError(f"openvino refuses {name}: {first_line(error)}") from error
    graph = read_graph(request.onnx_path).graph
    for what, ports, values in (("input", model.inputs, graph.input), ("output", model.outputs, graph.output)):
        known = {each for port in ports for each in port.get_names()}
        for value in values:
            if value.name not in known:
                raise BuildError(
                    f"{name} has no {what} {value.name!r}{nearest(value.name, known)}, which the model has"
                )
    final = next(port for port in model.outputs if request.outputs[0] in port.get_names())
    dtype = str(dtype_of(final)).removeprefix("torch.")
    if dtype != request.spec.dtype:
        raise UsageError(f"{name} gives {dtype}, not {request.spec.dtype}: give dtype={dtype!r}")
