"""Watch a torch module run: every module's inputs and outputs, and tensors named with :func:`tap`, by site."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

OnTensor = Callable[[str, torch.Tensor, nn.Module], None]

_recorder: ContextVar[Recorder | None] = ContextVar("ditto_recorder", default=None)


def tap(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Name a tensor inside eager code, so that engines built from the module can show it; return it unchanged.

    Called in the forward of the module ``model.layers.0.mlp``, ``tap("inter", x)`` makes the site
    ``model.layers.0.mlp:inter``. It survives ``torch.export`` and costs nothing outside of a recording.
    """
    recorder = _recorder.get()
    if recorder is not None:
        recorder.tapped(name, tensor)
    return tensor


class Recorder:
    """Forward hooks on every module below ``root``; each tensor is handed to ``on_tensor`` as soon as it exists.

    Sites: the first output tensor of a module is the default port, others are ``:out.<key>``; the first input is
    ``:in``, others ``:in.<name>``. The second call of a module in one step is ``path@1``. ``root`` itself has no site.
    """

    def __init__(self, root: nn.Module, on_tensor: OnTensor) -> None:
        self._root = root
        self._on_tensor = on_tensor
        self._calls: Counter[str] = Counter()
        self._stack: list[tuple[str, nn.Module]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one forward pass of the root module."""
        self._calls.clear()
        self._stack.clear()
        handles = [h for path, module in self._root.named_modules() if path for h in self._hook(path, module)]
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)
            for handle in handles:
                handle.remove()

    def tapped(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor that :func:`tap` names, as a port of the module that is running."""
        path, module = self._stack[-1] if self._stack else ("", self._root)
        self._on_tensor(f"{path}:{name}", tensor, module)

    def _hook(self, path: str, module: nn.Module) -> list[Any]:
        parameters = list(inspect.signature(module.forward).parameters)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = self._calls[path]
            self._calls[path] += 1
            site = f"{path}@{call}" if call else path
            self._stack.append((site, module))
            named = dict(zip(parameters, args, strict=False)) | kwargs
            for i, (key, tensor) in enumerate(tensors_in(named)):
                self._on_tensor(f"{site}:in" if i == 0 else f"{site}:in.{key}", tensor, module)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            site, _ = self._stack.pop()
            for i, (key, tensor) in enumerate(tensors_in(output)):
                self._on_tensor(site if i == 0 else f"{site}:out.{key}", tensor, module)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]


def tensors_in(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested tuples, lists and dicts, with its path of keys joined by dots."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif type(value) in (tuple, list):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{prefix}.{i}" if prefix else str(i))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{prefix}.{key}" if prefix else str(key))
