"""A stand-in for an engine that TensorRT would run on a GPU: the same ONNX file, run by ONNX Runtime on the CPU.

It reads its inputs from, and writes its outputs to, the addresses that it was given, so that what the session binds
is tested for real: addresses, dtypes, shapes, the turns of the KV cache. What it cannot show is TensorRT's arithmetic.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import torch

from ditto_core.backends.tensorrt.library import load_library
from ditto_core.backends.tensorrt.runtime import Loaded
from ditto_core.graphs.files import read_graph
from ditto_core.graphs.outputs import add_outputs


class StandInEngine:
    """What a binder asks of an ``ICudaEngine``."""

    def __init__(self, onnx_path: Path, taps: list[str], dtypes: dict[str, str] | None = None) -> None:
        import onnxruntime

        model = read_graph(onnx_path)
        add_outputs(model, taps)
        with tempfile.TemporaryDirectory() as folder:  # the export is an entry of a cache: nothing else belongs there
            copied = shutil.copytree(onnx_path.parent, Path(folder) / "export")
            onnx.save(model, str(copied / "stand_in.onnx"))
            self.session = onnxruntime.InferenceSession(
                str(copied / "stand_in.onnx"), providers=["CPUExecutionProvider"]
            )
        self.inputs = {i.name: numpy_name(i.type) for i in self.session.get_inputs()} | (dtypes or {})
        self.outputs = {o.name: numpy_name(o.type) for o in self.session.get_outputs()}
        self.num_io_tensors = len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str):
        mode = load_library().module.TensorIOMode
        return mode.INPUT if name in self.inputs else mode.OUTPUT

    def get_tensor_dtype(self, name: str):
        library, wanted = load_library(), {**self.inputs, **self.outputs}[name]
        return next(t for t in library.module.DataType.__members__.values() if library.torch_dtype(t) == wanted)


class StandInContext:
    """What a session asks of an ``IExecutionContext``."""

    def __init__(self, engine: StandInEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.results: dict[str, np.ndarray] = {}
        self.profiles: list[int] = []
        self.fails = False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profiles.append(index)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return bool(address)

    def infer_shapes(self) -> list[str]:
        feed = {name: read(self.addresses[name], self.shapes[name], kind) for name, kind in self.engine.inputs.items()}
        wanted = {i.name: numpy_name(i.type) for i in self.engine.session.get_inputs()}
        feed = {name: array.astype(wanted[name]) for name, array in feed.items()}
        names = list(self.engine.outputs)
        self.results = dict(zip(names, self.engine.session.run(names, feed), strict=True))
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.results[name].shape

    def execute_async_v3(self, stream: int) -> bool:
        for name, array in self.results.items():
            data = np.ascontiguousarray(array.astype(self.engine.outputs[name], copy=False))
            ctypes.memmove(self.addresses[name], data.ctypes.data, data.nbytes)
        return not self.fails


class StandInStreams:
    """The CPU has no streams."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing runs behind our back."""

    @contextmanager
    def use(self):
        yield self


def stand_in(onnx_path: Path, taps: list[str], dtypes: dict[str, str] | None = None) -> Loaded:
    engine = StandInEngine(onnx_path, taps, dtypes)
    return Loaded(None, engine, StandInContext(engine))


def read(address: int, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Copy an array out of memory."""
    count, dtype = math.prod(shape), np.dtype(kind)
    raw = ctypes.string_at(address, count * dtype.itemsize) if count else b""
    return np.frombuffer(raw, dtype).reshape(shape)


def numpy_name(onnx_type: str) -> str:
    name = onnx_type.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


CPU = torch.device("cpu")
