"""An ONNX file of any origin: its inputs and outputs, and a session of ONNX Runtime that shows any of its values."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ditto_core.align.exact import exact_graph, readable_graph
from ditto_core.backends.given_file import not_there
from ditto_core.backends.onnxruntime import load_library
from ditto_core.errors import BuildError, UsageError, first_line
from ditto_core.graphs.files import file_digests, place_weights, read_graph, weights_files
from ditto_core.graphs.nodes import shape_of, unshare_names
from ditto_core.system.files import parse_json, read_text

if TYPE_CHECKING:
    import onnx

CONFIG = "genai_config.json"
SUMS = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
"""Operators whose optional fourth output is the sum of their inputs."""
GROUPED = "GroupQueryAttention"
OTHERS = {
    ".xml": "OpenVINO IR",
    ".plan": "a TensorRT plan",
    ".engine": "a TensorRT plan",
    ".pte": "an ExecuTorch program",
    ".gguf": "a GGUF file",
}
"""What files are called that are engines and cannot be aligned."""
SOFTMAX = 2
"""Value of GroupQueryAttention's attribute ``qk_output`` that asks for the scores after the softmax."""
QUANTIZED = {"MatMulNBits": "int4", "GatherBlockQuantized": "int4", "MatMulBnb4": "int4"}
INTEGER = (
    *("MatMulInteger", "DynamicQuantizeMatMul", "QLinearMatMul", "MatMulIntegerToFloat", "DequantizeLinear"),
    *("ConvInteger", "QLinearConv"),
)


ROUNDING = ("DynamicQuantize", "QuantizeLinear", "QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger")
"""How the names of operators begin that round activations, or compute on rounded ones."""


@dataclass(frozen=True)
class Port:
    """An input or output of the graph: numpy's dtype name, sizes or names of its dimensions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} ({self.dtype} [{', '.join(map(str, self.shape))}])"

    @property
    def floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return "float" in self.dtype


class OnnxFile:
    """An ONNX file, read without its weights. Raises :class:`UsageError` when there is none at ``path``."""

    def __init__(self, path: Path | str) -> None:
        self.path = locate(Path(path))
        self.model = read(self.path)
        unshare_names(self.model.graph)
        for name in self.weights:
            if not (self.path.parent / name).is_file():
                raise UsageError(f"{self.path.name} keeps its weights in {name!r}, which is not beside it")
        known = {tensor.name for tensor in self.model.graph.initializer}
        self.inputs = tuple(port(value) for value in self.model.graph.input if value.name not in known)
        self.outputs = tuple(port(value) for value in self.model.graph.output)

    @property
    def folder(self) -> Path:
        """Where the file and its weights lie."""
        return self.path.parent

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """The files beside it that hold its weights, relative to its folder."""
        return tuple(sorted(weights_files(self.model)))

    @cached_property
    def digest(self) -> dict[str, str]:
        """SHA-256 (hex) of the file and of its weights, by name."""
        return file_digests(self.path, self.model)

    @cached_property
    def quantization(self) -> str:
        """``int4`` or ``int8`` where the weights are quantized, else an empty string."""
        operators = {node.op_type for node in self.model.graph.node}
        if found := operators & set(QUANTIZED):
            return QUANTIZED[found.pop()]
        return "int8" if operators & set(INTEGER) else ""

    @property
    def rounds(self) -> bool:
        """Whether operators round what they read; after :meth:`exact` those that it does not know."""
        return any(node.op_type.startswith(ROUNDING) for node in self.model.graph.node)

    @cached_property
    def dtype(self) -> str:
        """The dtype that the file computes in: that of most of its floating weights, else of its outputs."""
        import onnx

        count: dict[str, int] = {}
        for tensor in self.model.graph.initializer:
            name = onnx.TensorProto.DataType.Name(tensor.data_type)
            if name in FLOATS:
                count[FLOATS[name]] = count.get(FLOATS[name], 0) + elements(tensor)
        if count:
            return max(count, key=lambda name: count[name])
        return next((port.dtype for port in self.outputs if port.floating), "float32")

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """onnxruntime-genai's configuration of the decoder, empty where there is none, or another file's, beside it."""
        found = decoder_settings(self.path.parent)
        return found if PurePath(str(found.get("filename") or self.path.name)).name == self.path.name else {}

    def copy(self) -> onnx.ModelProto:
        """Return the graph to be changed; the weights are still where they were."""
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return model

    def exact(self) -> OnnxFile:
        """Return the file with operators that do not round what they read."""
        made = copy.copy(self)
        made.model = exact_graph(self.model)
        return made

    def readable(self) -> OnnxFile:
        """Return the file with what the integers of its activations stand for in their place; it computes the same."""
        made = copy.copy(self)
        made.model = readable_graph(self.model)
        return made

    def place(self, model: onnx.ModelProto, directory: Path, name: str, *, copy: bool = False) -> Path:
        """Write a changed graph into a folder, with links to the weights beside it. Returns the new file.

        ``copy`` the weights where the folder stays: onnx's loader refuses the user's file while it has other links.
        """
        import onnx

        place_weights(model, self.path.parent, directory, copy=copy)
        onnx.save(model, str(directory / name))
        return directory / name

    def session(self, model: onnx.ModelProto, level: str = "DISABLE_ALL") -> Any:
        """Open a changed graph with ONNX Runtime on the CPU. Raises :class:`BuildError` when it refuses."""
        with tempfile.TemporaryDirectory(prefix="ditto-align-") as folder:
            return inference_session(self.place(model, Path(folder), "model.onnx"), level)


FLOATS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "DOUBLE": "float64"}


def inference_session(path: Path, level: str = "ENABLE_ALL", threads: int = 1) -> Any:
    """Open a file with ONNX Runtime on the CPU. Raises :class:`BuildError` when it refuses."""
    runtime = load_library()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, f"ORT_{level}")
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BuildError(f"onnxruntime refuses {path.name}: {first_line(error)}") from error


def inference_session_of(model: onnx.ModelProto) -> Any:
    """Open a small model with ONNX Runtime on the CPU, unoptimized. Raises :class:`BuildError` when it refuses."""
    with tempfile.TemporaryDirectory(prefix="ditto-align-") as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return inference_session(path, "DISABLE_ALL")


def read(path: Path) -> onnx.ModelProto:
    """Read a graph without its weights. Raises :class:`UsageError` for a file that is no ONNX."""
    if kind := OTHERS.get(path.suffix):
        raise UsageError(
            f"engine file {path.name} is {kind}, expected an ONNX file: give the one that it was made from, or let "
            "ditto build the engine (backend=…)"
        )
    return read_graph(path)


def locate(path: Path) -> Path:
    """Return the ONNX file at a path: itself, or a folder's. Raises :class:`UsageError` for none or several."""
    path = path.expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise not_there(path, "an ONNX file or a folder with one")
    named = str(decoder_settings(path).get("filename", ""))
    if named and (path / named).is_file():
        return path / named
    found = sorted(path.glob("*.onnx"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise UsageError(f"folder {str(path)!r} holds {len(found)} ONNX files ({names}): name the one to test")
    return found[0]


def decoder_settings(folder: Path) -> Mapping[str, Any]:
    """Return onnxruntime-genai's configuration of the decoder in a folder, empty where there is none.

    Raises :class:`UsageError` for a file that is damaged.
    """
    path = folder / CONFIG
    try:
        found: Mapping[str, Any] = parse_json(read_text(path), last=True).get("model", {}).get("decoder", {})
        return dict(found)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no configuration of onnxruntime-genai: {first_line(error)}") from error


def port(value: Any) -> Port:
    """Read a graph input or output."""
    import onnx

    kind = value.type.tensor_type
    return Port(value.name, str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), shape_of(value))


def elements(tensor: Any) -> int:
    """Return the number of elements of an initializer."""
    total = 1
    for size in tensor.dims:
        total *= size
    return total


def expose(model: onnx.ModelProto) -> None:
    """Make every value of a graph an output."""
    show(model, [name for node in model.graph.node if node.op_type != "Constant" for name in node.output if name])


def show(model: onnx.ModelProto, names: Iterable[str]) -> None:
    """Add values to the graph's outputs; ONNX Runtime infers their types."""
    import onnx

    present = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)


def ask_fused(model: onnx.ModelProto, only: Sequence[str] | None = None) -> None:
    """Let fused operators show more: all that can, or those whose added value is among ``only``."""
    import onnx

    for node in model.graph.node:
        if node.op_type in SUMS and wanted(f"{node.output[0]}::sum", only) and not (node.output[3:] and node.output[3]):
            node.output.extend([""] * (4 - len(node.output)))
            node.output[3] = f"{node.output[0]}::sum"
        ring = any(attribute.name == "sliding_window_cache" and attribute.i for attribute in node.attribute)
        name = f"{node.output[0]}::softmax"
        if node.op_type == GROUPED and len(node.output) == 3 and not ring and wanted(name, only):
            node.output.append(name)
            node.attribute.append(onnx.helper.make_attribute("qk_output", SOFTMAX))


def wanted(name: str, only: Sequence[str] | None) -> bool:
    """Tell whether an added value is asked for."""
    return only is None or name in only
