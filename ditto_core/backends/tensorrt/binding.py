"""Addresses for an execution context: every one is checked before TensorRT may touch it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ditto_core.backends.tensorrt.library import Library, Messages
from ditto_core.backends.tensorrt.runtime import Loaded
from ditto_core.errors import RunError, UsageError

ALIGNMENT = 256
INT32_MAX = 2**31 - 1


class Binder:
    """Binds inputs and output buffers of one context.

    Buffers of outputs grow and are used again by the next step. An output in ``alternating`` (the KV cache) has two,
    which take turns, so that it can be an input of the next step; one in ``fresh`` (logits) gets its own memory each
    time, since callers keep it.
    """

    def __init__(
        self,
        library: Library,
        loaded: Loaded,
        messages: Messages,
        device: torch.device,
        *,
        alternating: Collection[str] = (),
        fresh: Collection[str] = (),
    ) -> None:
        self._messages, self.device = messages, device
        self._alternating, self._fresh = frozenset(alternating), frozenset(fresh)
        self._engine, self._context = loaded.engine, loaded.context
        mode = library.module.TensorIOMode
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self._inputs = [n for n in names if self._engine.get_tensor_mode(n) == mode.INPUT]
        self._outputs = [n for n in names if self._engine.get_tensor_mode(n) == mode.OUTPUT]
        self._dtypes = {n: getattr(torch, library.torch_dtype(self._engine.get_tensor_dtype(n))) for n in names}
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._bound: dict[str, torch.Tensor] = {}
        self._nothing = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self._profile = 0

    def use_profile(self, index: int, stream: Any) -> None:
        """Switch the context to an optimization profile, on the stream that runs the engine."""
        if index == self._profile:
            return
        if not self._context.set_optimization_profile_async(index, stream.cuda_stream):
            raise RunError(f"TensorRT refuses profile {index}: {self._messages.last()}")
        self._profile = index

    def bind(self, feed: Mapping[str, torch.Tensor], turn: int) -> dict[str, torch.Tensor]:
        """Set all shapes and addresses; return the output tensors, by name, that the next execution fills.

        Raises :class:`UsageError` for an input of wrong dtype or device, :class:`RunError` when TensorRT refuses a
        shape or an address.
        """
        self._bound = {name: self._fitting(name, feed[name]) for name in self._inputs}
        for name, tensor in self._bound.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise RunError(f"TensorRT refuses shape {list(tensor.shape)} of {name!r}: {self._messages.last()}")
            self._set_address(name, tensor)
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self._bound.items())
            raise RunError(f"TensorRT cannot infer shapes from {shapes}: {self._messages.last()}") from error
        if missing:
            raise RunError(f"TensorRT still lacks shapes or values of {', '.join(missing)}")
        outputs = {name: self._output(name, turn) for name in self._outputs}
        for name, tensor in outputs.items():
            self._set_address(name, tensor)
        return outputs

    def release(self) -> None:
        """Forget all buffers."""
        self._bound.clear()
        self._buffers.clear()
        del self._engine, self._context

    def _fitting(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        expected = self._dtypes[name]
        if tensor.device != self.device:
            raise UsageError(f"input {name!r} is on {tensor.device}, expected {self.device}")
        if tensor.dtype == torch.int64 and expected == torch.int32:
            if tensor.numel() and int(tensor.abs().max()) > INT32_MAX:
                raise UsageError(f"input {name!r} holds {int(tensor.abs().max())}, beyond the engine's int32")
            tensor = tensor.to(torch.int32)
        if tensor.dtype != expected:
            raise UsageError(f"input {name!r} is {short(tensor.dtype)}, the engine takes {short(expected)}")
        return tensor.contiguous()

    def _output(self, name: str, turn: int) -> torch.Tensor:
        shape = tuple(self._context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            raise RunError(f"output {name!r} has shape {list(shape)}, which depends on data; that is not supported")
        if name in self._fresh:
            return torch.empty(shape, dtype=self._dtypes[name], device=self.device)
        key, count = (name, turn % 2 if name in self._alternating else 0), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            size = count if buffer is None else max(count, 2 * buffer.numel())
            buffer = self._buffers[key] = torch.empty(size, dtype=self._dtypes[name], device=self.device)
        return buffer[:count].view(shape)

    def _set_address(self, name: str, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr() if tensor.numel() else self._nothing.data_ptr()  # empty tensors need one too
        if not address or not self._context.set_tensor_address(name, address):
            raise RunError(f"TensorRT refuses the address {address:#x} of {name!r}: {self._messages.last()}")


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix."""
    return str(dtype).removeprefix("torch.")
