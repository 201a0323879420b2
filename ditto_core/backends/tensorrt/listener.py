"""Tensors that TensorRT did not fuse, handed over while the engine runs; the engine stays as it was."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ditto_core.backends.tensorrt.layers import load_layers, named_tensors, parse_inspector
from ditto_core.backends.tensorrt.library import Library
from ditto_core.backends.tensorrt.runtime import Loaded
from ditto_core.errors import RunError
from ditto_core.system.gpus import driver_library


class UnfusedTensors:
    """Collects what the debug listener receives in one step and names what the inspector can name."""

    def __init__(self, library: Library, loaded: Loaded, directory: Path, device: torch.device) -> None:
        self._device = device
        _, self._graph = load_layers(directory)
        text = loaded.engine.create_engine_inspector().get_engine_information(
            library.module.LayerInformationFormat.JSON
        )
        self._names = named_tensors(parse_inspector(text), self._graph)
        self._driver = driver_library()
        self._found: dict[str, torch.Tensor] = {}
        self._failures: list[str] = []
        self._named = 0
        self._listener = _listener(library, self._take)
        loaded.context.set_debug_listener(self._listener)
        loaded.context.unfused_tensors_debug_state = True

    @property
    def summary(self) -> str:
        """How many tensors came in the last step, and how many of them have a name in the model."""
        return f"{len(self._found)} tensors delivered, {self._named} named"

    def release(self) -> None:
        """Forget the tensors of the last step. The listener and this object hold each other until Python looks."""
        self._found.clear()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect during one execution. Raises :class:`RunError` when a tensor could not be copied."""
        self._found.clear()
        self._failures.clear()
        yield
        if self._failures:
            raise RunError(f"a tensor of the debug listener could not be copied: {self._failures[0]}")

    def named(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return the collected tensors by ONNX value, in the shape that the model gives them."""
        fitted = {}
        for name, tensor in self._found.items():
            value = self._names.get(name)
            shaped = None if value is None else in_shape(tensor, self._graph.shapes.get(value, ()), sizes)
            if value is not None and shaped is not None:
                fitted[value] = shaped
        self._named = len(fitted)
        return fitted

    def _take(self, address: int, dtype: str, shape: tuple[int, ...], name: str, stream: int) -> None:
        try:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            if tensor.numel():
                copy_from(self._driver, tensor, address, stream)
            self._found[name] = tensor
        except Exception as error:  # noqa: BLE001 - it must not cross TensorRT; it is raised when the step is over
            self._failures.append(f"{name}: {error}")


def in_shape(tensor: torch.Tensor, template: tuple[int | str, ...], sizes: Mapping[str, int]) -> torch.Tensor | None:
    """Return a tensor in the shape of an ONNX value, or None when it cannot be that value.

    The compiler folds dynamic dimensions into one in an order that it does not tell (rows by position as well as
    positions by row), so a folded tensor is returned only where at most one of them is above 1.
    """
    if any(isinstance(d, str) and d not in sizes for d in template):
        return tensor if tensor.ndim == len(template) else None
    shape = [sizes[d] if isinstance(d, str) else d for d in template]
    if tensor.ndim < len(template) and sum(isinstance(d, str) and sizes[d] > 1 for d in template) > 1:
        return None
    return tensor.view(shape) if math.prod(shape) == tensor.numel() else None


def copy_from(driver: Any, tensor: torch.Tensor, address: int, stream: int) -> None:
    """Copy from an address on the host or the GPU (the driver tells which) into a tensor, and wait for it."""
    copy, wait = driver.cuMemcpyAsync, driver.cuStreamSynchronize
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    wait.argtypes = [ctypes.c_void_p]
    code = copy(tensor.data_ptr(), address, tensor.numel() * tensor.element_size(), stream) or wait(stream)
    if code:
        raise RunError(f"CUDA driver error {code}")


def capsule_address(capsule: Any) -> int:
    """Return the address in a PyCapsule, which is how TensorRT's Python API hands over a pointer."""
    if isinstance(capsule, int):
        return capsule
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return int(api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule)) or 0)


def _listener(library: Library, take: Any) -> Any:
    base: Any = library.module.IDebugListener

    class Listener(base):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            base.__init__(self)

        def process_debug_tensor(self, addr: Any, _location: Any, *tensor: Any) -> bool:
            dtype, shape, name, stream = tensor
            take(capsule_address(addr), library.torch_dtype(dtype), tuple(shape), name, int(stream))
            return True

    return Listener()
