"""A stand-in for a GPU: tensors that lie in the computer's memory, say that they are on ``cuda:0``, and behave so.

Beside a tensor of the CPU they refuse whatever a real one refuses, and so does numpy; what they compute is a GPU
tensor again; the way out is ``.cpu()``. What it cannot show is a GPU's arithmetic, its streams and its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ditto_core.backends import registry
from ditto_core.backends.tensorrt import TensorRTBackend
from ditto_core.backends.tensorrt.library import Messages, load_library
from ditto_core.backends.tensorrt.manifest import EngineManifest
from ditto_core.backends.tensorrt.runtime import Loaded
from ditto_core.backends.tensorrt.session import TensorRTSession, make_binder
from ditto_core.debug.evaluate import widen
from ditto_core.engines.workspace import Workspace
from ditto_core.graphs.files import read_model
from ditto_core.graphs.graph import Graph
from ditto_core.graphs.outputs import add_outputs
from tests.engines.tensorrt_stand_in import StandInContext, StandInEngine, StandInStreams
from tests.faults import Edit

GPU = torch.device("cuda", 0)
TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
MOVES = (torch.Tensor.to, torch.Tensor.type_as)
ACROSS = (*MOVES, torch.Tensor.copy_, torch.Tensor.__getitem__, torch._has_compatible_shallow_copy_type)
"""What takes tensors of two devices: copies, and indexing by an index that lies on the CPU."""


class OnGpuStandIn(torch.Tensor):
    """Stands in for a tensor on a GPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})


class GpuStandIn(TorchFunctionMode):
    """While it is entered, ``device="cuda"`` makes tensors on the stand-in for a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function of torch as it would run beside a GPU."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnGpuStandIn)]
    if ours and func in PROPERTIES:
        return PROPERTIES[func]
    if ours and func is torch.Tensor.__deepcopy__:
        return torch.nn.Parameter(ours[0].detach().clone(), requires_grad=ours[0].requires_grad)
    if ours and func in TO_NUMPY:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first.")
    if ours and func not in ACROSS and any(t.dim() for t in tensors if not isinstance(t, OnGpuStandIn)):
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two, cuda:0 and cpu!")
    wanted, args, kwargs = device_of(func, args, kwargs)
    first = tensors[0] if func in ACROSS and tensors else next(iter(ours), None)
    there = wanted == "cuda" if wanted else isinstance(first, OnGpuStandIn)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if args and result is args[0] and there == isinstance(result, OnGpuStandIn):
        return result
    return tree_map(lambda leaf: placed(leaf, there, crossed=bool(ours) != there), result)


def device_of(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str | None, Any, dict[str, Any]]:
    """Return the kind of device that a call names, and its arguments with the CPU in its place."""
    if func is torch.Tensor.cpu:
        return "cpu", args, kwargs
    if func is torch.Tensor.cuda:
        return "cuda", args[:1], {}
    if func in MOVES and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return ("cuda" if isinstance(args[1], OnGpuStandIn) else "cpu"), args, kwargs
    named = [kwargs.get("device"), *(args[1:] if func is torch.Tensor.to else ())]
    kinds = [torch.device(x).type for x in named if isinstance(x, (str, torch.device))]
    if not kinds:
        return None, args, kwargs
    here = tree_map(lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, (tuple(args), dict(kwargs)))
    args, kwargs = here
    if func is torch.Tensor.to:
        args = tuple("cpu" if i and isinstance(x, str) else x for i, x in enumerate(args))
    if isinstance(kwargs.get("device"), str):
        kwargs["device"] = "cpu"
    return kinds[0], args, kwargs


def placed(leaf: Any, there: bool, *, crossed: bool) -> Any:
    """Return a result as a tensor of the stand-in, or of the CPU; one that ``crossed`` over is a copy."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        leaf = leaf.clone() if crossed else leaf
        return leaf.as_subclass(OnGpuStandIn if there else torch.Tensor) if there or crossed else leaf


PROPERTIES = {torch.Tensor.device.__get__: GPU, torch.Tensor.is_cuda.__get__: True, torch.Tensor.is_cpu.__get__: False}


class WidenedEngine(StandInEngine):
    """The engine of a graph that may have a fault. For bfloat16 ONNX Runtime gets float32, rounded at the border."""

    def __init__(self, model: onnx.ModelProto, fault: Any, directory: Path) -> None:
        types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
        if onnx.TensorProto.BFLOAT16 in types.values():
            model = widen(Graph(model), "float32").model
        if fault is not None:
            fault(Edit(model, directory))
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        kinds = {name: helper.tensor_dtype_to_np_dtype(kind) for name, kind in types.items()}
        self.inputs = {i.name: kinds[i.name].name for i in self.session.get_inputs()}
        self.outputs = {o.name: kinds[o.name].name for o in self.session.get_outputs()}
        self.num_io_tensors = len(self.inputs) + len(self.outputs)


class SeenTensorRTSession(TensorRTSession):
    """A session that tells whether it was closed."""

    closed = 0

    def close(self) -> None:
        super().close()
        self.closed += 1


class TensorRTOnGpuStandIn:
    """The TensorRT backend, save that its engines are the exported ONNX files, run by ONNX Runtime.

    Their tensors lie on the stand-in for a GPU. ``fault`` edits the graphs before they are loaded.
    """

    def __init__(self, workspace: Workspace, fault: Any = None) -> None:
        self._real, self._workspace = TensorRTBackend(), workspace
        self.fault = fault
        self.opened: list[SeenTensorRTSession] = []

    def __getattr__(self, name):
        return getattr(self._real, name)

    def check_runs(self) -> None:
        """It runs here."""

    def open(self, spec, directory, taps) -> TensorRTSession:
        built = directory / "model.onnx"  # of `ditto debug build`
        model = read_model(built if built.exists() else self._workspace.export(spec).onnx_path)
        add_outputs(model, [tap.value for tap in taps])
        engine = WidenedEngine(model, self.fault, directory)
        loaded = Loaded(None, engine, StandInContext(engine))
        library, manifest = load_library(), EngineManifest.load(directory)
        messages = Messages(library)
        binder = make_binder(library, manifest, loaded, messages, device=GPU)
        session = SeenTensorRTSession(
            spec, manifest, taps, loaded=loaded, binder=binder, messages=messages, streams=StandInStreams()
        )
        self.opened.append(session)
        return session


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def __init__(self, workers: int) -> None:
        pass

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run, and return the result as a future has it."""
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


@contextmanager
def gpu_stand_in(workspace: Workspace, fault: Any = None) -> Iterator[TensorRTOnGpuStandIn]:
    """Run TensorRT engines, and eager with ``device="cuda"``, on the stand-in for a GPU."""
    backend = TensorRTOnGpuStandIn(workspace, fault)
    real = registry.get_backend
    overwritten = torch.__future__.get_overwrite_module_params_on_conversion()
    with pytest.MonkeyPatch.context() as patch, GpuStandIn():
        for module in ("engines.engine", "engines.workspace", "backends.registry", "debug.builds"):
            patch.setattr(f"ditto_core.{module}.get_backend", lambda n: backend if n == "tensorrt" else real(n))
        for module in ("pair.sessions", "gates.job"):
            patch.setattr(f"ditto_core.{module}.check_device", lambda name: None)
        patch.setattr("ditto_core.backends.eager.device_name", lambda device: f"stand-in for {device.type}")
        patch.setattr("ditto_core.gates.job.ThreadPoolExecutor", AtOnce)  # a mode of torch holds for one thread
        patch.setattr("ditto_core.model.placing.available", lambda device: None)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield backend
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwritten)
