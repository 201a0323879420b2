"""ONNX Runtime: the embedded default, on the CPU or any of its execution providers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.backends.base import Arrays, BuildReport, BuildRequest, EngineLayer, EngineTensor, Inspection
from ditto_core.backends.onnxruntime_crash import refuse_crashing
from ditto_core.backends.onnxruntime_provider import check_provider, on_cpu, open_session
from ditto_core.backends.outputs_file import read_outputs, write_outputs
from ditto_core.backends.registry import import_package
from ditto_core.errors import BackendError, BuildError, RunError, UsageError, first_line, nearest
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

ENGINE_FILE = "engine.onnx"
LEVELS = {"all": "ENABLE_ALL", "extended": "ENABLE_EXTENDED", "basic": "ENABLE_BASIC", "disable": "DISABLE_ALL"}
OPTIONS = ("level", "threads", "provider", "provider_options", "plugin", "session", "quantize")
QUANTIZE = ("int8",)
OPERATORS_TEST = """

def test_the_operators_by_themselves():
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.{level}
    path, providers = str(HERE / "model.onnx"), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(path, options, providers=providers)
    (actual,) = session.run(None, load_file(HERE / "inputs.safetensors"))
    check(actual)
"""


class OnnxRuntimeBackend:
    """Builds an ONNX file whose extra outputs are the taps. Options: ``level``, ``threads``, ``provider``
    (``cuda``, or in full), ``provider_options``, ``plugin`` (the package of a plugin provider), ``session`` (its
    configuration entries), ``quantize`` (``int8``: onnxruntime's dynamic quantization of every matrix product's
    weights)."""

    name = "onnxruntime"
    dtypes = ("float32", "float16", "float64")

    def check(self, spec: EngineSpec) -> None:
        """Raise when onnxruntime is missing, lacks the dtype, or an option is unknown."""
        library = load_library()
        if spec.dtype not in self.dtypes:
            raise BackendError(
                f"onnxruntime has no {spec.dtype} kernels on its CPU provider, expected {', '.join(self.dtypes)}; "
                f"or a backend that has it: 'inductor' or 'openvino' on a CPU, 'tensorrt' on a GPU"
            )
        for name, _ in spec.options:
            if name not in OPTIONS:
                raise UsageError(
                    f"onnxruntime has no option {name!r}{nearest(name, OPTIONS)} (known: {', '.join(OPTIONS)})"
                )
        spec.threads()
        level = spec.option("level", "all")
        if level not in LEVELS:
            raise UsageError(
                f"unknown optimization level {level!r}, expected {', '.join(LEVELS)}{nearest(level, LEVELS)}"
            )
        check_provider(library, spec)
        quantize = spec.option("quantize", QUANTIZE[0])
        if quantize not in QUANTIZE:
            raise UsageError(f"onnxruntime cannot quantize to {quantize!r}, expected {', '.join(QUANTIZE)}")

    def versions(self) -> dict[str, str]:
        """ONNX Runtime optimizes when it loads a file, so its version decides the bits."""
        return {"onnxruntime": load_library().__version__}

    def build(self, request: BuildRequest) -> BuildReport:
        """Write the graph with the taps as outputs; the weights are linked, not copied."""
        from ditto_core.backends.onnx_file import write_tapped

        # The quantizer reads weights through onnx, which refuses files with several hard links.
        copy = bool(request.spec.option("quantize"))
        model = write_tapped(request, request.directory / ENGINE_FILE, copy=copy)
        if copy:
            refuse_linked(model, request.spec.dtype)
            quantize_weights(request.directory)
        if on_cpu(request.spec):
            refuse_crashing(request.directory / ENGINE_FILE, request.spec.dtype, request.spec.option("level", "all"))
        write_outputs(request.directory, request.outputs)
        return BuildReport(request.taps, facts={"nodes": len(model.graph.node)})

    def inspect(self, directory: Path) -> Inspection:
        """Describe the ONNX file: its nodes are the layers, as they are before ONNX Runtime optimizes them."""
        from ditto_core.graphs.graph import Graph

        graph = Graph.read(directory / ENGINE_FILE)
        tensors = {name: EngineTensor(name, graph.dtype(name), shape) for name, shape in graph.shapes.items()}
        layers = (
            EngineLayer(
                n.name,
                n.operator,
                modules=(n.module,) if n.module else (),
                dtypes=tuple(dict.fromkeys(graph.dtype(name) for name in n.outputs if name in graph.declared)),
            )
            for n in graph.written
        )
        inputs, outputs = (tuple(tensors[name] for name in names) for names in (graph.inputs, graph.outputs))
        return Inspection(inputs, outputs, tuple(layers))

    def graph_file(self, directory: Path) -> Path:
        """Return the engine itself."""
        return directory / ENGINE_FILE

    def run_operators(self, spec: EngineSpec, graph: bytes, inputs: Arrays) -> npt.NDArray[Any]:
        """Run operators on the CPU at the engine's optimization level."""
        library = load_library()
        options = session_options(library, spec)
        session = library.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        result: npt.NDArray[Any] = session.run(None, dict(inputs))[0]
        return result

    def operators_test(self, spec: EngineSpec) -> str:
        """Return a test that runs operators as :meth:`run_operators` does."""
        return OPERATORS_TEST.format(level=optimization(spec))

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> OnnxRuntimeSession:
        """Load the engine. Raises :class:`BuildError` when ONNX Runtime refuses the graph."""
        return OnnxRuntimeSession(spec, directory, taps)


def load_library() -> Any:
    """Import onnxruntime, or say how to get it."""
    return import_package("onnxruntime")


def optimization(spec: EngineSpec) -> str:
    """Return ONNX Runtime's name of a spec's optimization level."""
    return f"ORT_{LEVELS[spec.option('level', 'all')]}"


def session_options(library: Any, spec: EngineSpec) -> Any:
    """Return what a spec means to an InferenceSession."""
    options = library.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = spec.threads()
    options.graph_optimization_level = getattr(library.GraphOptimizationLevel, optimization(spec))
    return options


class OnnxRuntimeSession:
    """One InferenceSession and the KV cache of the sequence that it is stepping."""

    def __init__(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> None:
        self._ort = load_library()
        options = session_options(self._ort, spec)
        self._session, where = open_session(self._ort, str(directory / ENGINE_FILE), spec, options)
        self.taps = taps
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._past_names = [name for name in self._inputs if name.startswith("past_key_values.")]
        self._past: dict[str, Any] = {}
        self._finals = read_outputs(directory, self._outputs, taps)
        facts = {"onnxruntime": self._ort.__version__, **where, "level": spec.option("level", "all")}
        dtype = spec.option("quantize") or spec.dtype
        self.info = SessionInfo(f"onnxruntime {dtype}", "onnxruntime", dtype, "cpu", spec.model.label, facts)

    @property
    def past(self) -> dict[str, torch.Tensor]:
        """The KV cache that the next step reads, by the names of the graph's inputs."""
        return {name: torch.from_numpy(value) for name, value in self._past.items()}

    def start(self, batch: int) -> None:
        """Give every layer an empty past [batch, kv_head, 0, head_dim], or zeros where a state has a fixed size."""
        import numpy as np

        for name in self._past_names:
            _, *sizes = self._inputs[name].shape
            shape = (batch, *(0 if isinstance(size, str) else size for size in sizes))
            self._past[name] = np.zeros(shape, numpy_dtype(self._inputs[name].type))

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.backends.base.Session`."""
        feed = {name: self._feed(name, tensor) for name, tensor in inputs.items() if name in self._inputs}
        try:
            values = dict(zip(self._outputs, self._session.run(None, feed | self._past), strict=True))
        except Exception as error:
            raise RunError(f"onnxruntime failed: {first_line(error)}") from error
        for name in self._past_names:
            self._past[name] = values[name.replace("past_key_values", "present")]
        for tap in self.taps:
            sink(tap.site, torch.from_numpy(values[tap.value]))
        return {name: torch.from_numpy(values[name]) for name in self._finals}

    def close(self) -> None:
        """Release the engine."""
        self._past.clear()
        del self._session

    def _feed(self, name: str, tensor: torch.Tensor) -> Any:
        return tensor.detach().cpu().numpy().astype(numpy_dtype(self._inputs[name].type), copy=False)


def refuse_linked(model: onnx.ModelProto, dtype: str) -> None:
    """Raise :class:`BuildError` for weights in a checkpoint's own files: the quantizer would pass them by, since the
    engine transposes them."""
    from ditto_core.graphs.files import weights_files

    if len(weights_files(model)) > 1:
        raise BuildError(f"onnxruntime cannot quantize a large checkpoint that is stored in {dtype}: dtype='float32'")


def quantize_weights(directory: Path) -> None:
    """Replace the engine by its int8 form; values keep their names, so taps stay where they are.

    Weights are unsigned: signed ones saturate in the kernels of x86 CPUs without VNNI (two products share 16 bits).
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path, plain = directory / ENGINE_FILE, directory / "plain.onnx"
    path.rename(plain)
    options = {"EnableSubgraph": False, "MatMulConstBOnly": True}
    with without_hints():
        unsigned = QuantType.QUInt8
        quantize_dynamic(plain, path, weight_type=unsigned, use_external_data_format=True, extra_options=options)
    for leftover in (plain, *directory.glob("*.onnx.data")):
        if leftover.name != f"{ENGINE_FILE}.data":
            leftover.unlink()


@contextmanager
def without_hints() -> Iterator[None]:
    """Keep the quantizer's advice for other models off the screen: it logs at the root, and would set that up."""
    root, handler = logging.getLogger(), logging.NullHandler()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def numpy_dtype(type_name: str) -> str:
    """Translate ONNX Runtime's type (``tensor(float16)``) to numpy's."""
    name = type_name.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)
