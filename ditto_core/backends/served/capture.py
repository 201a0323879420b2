"""Forward hooks on a server's module: outputs in Hugging Face's sense, from fused norms and residual pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ditto_core.backends.served.forcing import LOGITS

ATTENTION_PORTS = {"q_rope": 0, "k_rope": 1, "v_states": 2}
"""Ports of an attention module that are its arguments, by place; ``context`` is its output."""
CONTEXT = "context"


@dataclass(frozen=True)
class Server:
    """How a server builds its modules.

    ``head`` is the module whose output are the logits. ``next_norm`` is the attribute of a decoder layer that runs the
    next layer's norm itself; under ``shared`` attributes a layer holds modules that belong to another.
    """

    name: str
    head: str
    next_norm: str = ""
    shared: tuple[str, ...] = ()

    def runs_next_norm(self, module: nn.Module) -> bool:
        """Tell whether a decoder layer runs the next one's norm."""
        return bool(self.next_norm) and getattr(module, self.next_norm, None) is not None

    def paths(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under the path where they belong."""
        for path, each in module.named_modules(remove_duplicate=False):
            if not any(name in path.split(".") for name in self.shared):
                yield path, each


class Capture:
    """Hooks on the modules that are wanted. Tensors are copied at once: fused norms write into their inputs.

    ``wanted`` are names of :attr:`~ditto_core.backends.served.place.Place.tensor`: a module's path, and a port. After
    the head has run, ``leave`` is given the pass's tensors by these names; what it returns replaces the logits.
    """

    def __init__(
        self,
        server: Server,
        module: nn.Module,
        wanted: set[str],
        leave: Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor | None],
    ) -> None:
        self._server = server
        self._found: dict[str, torch.Tensor] = {}
        self._leave = leave
        self._handles: list[Any] = []
        modules = dict(server.paths(module))
        ports: dict[str, set[str]] = {}
        for name in wanted:
            path, _, port = name.partition(":")
            ports.setdefault(path, set()).add(port)
        for path, names in ports.items():
            if path in modules and path != server.head:
                self._watch(path, modules[path], names)
        if server.head in ports:
            self._watch(server.head, modules[server.head], ports[server.head] - {""})
        self._handles.append(modules[server.head].register_forward_hook(self._finish))

    def _watch(self, path: str, module: nn.Module, ports: set[str]) -> None:
        if ports - {"", CONTEXT}:
            before = partial(self._note_input, path, ports)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if ports & {"", CONTEXT}:
            self._handles.append(module.register_forward_hook(partial(self._note, path, ports)))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _note(self, path: str, ports: set[str], module: nn.Module, args: Any, output: Any) -> None:
        tensor = block_output(self._server, module, output)
        for port in ports & {"", CONTEXT}:
            if tensor is not None:
                self._found[f"{path}:{port}" if port else path] = tensor.detach().clone()

    def _note_input(self, path: str, ports: set[str], module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        for port in ports - {"", CONTEXT}:
            tensor = block_input(self._server, module, args, kwargs)
            if port in ATTENTION_PORTS:
                tensor = floating(args, kwargs)[ATTENTION_PORTS[port]]
            if tensor is not None:
                self._found[f"{path}:{port}"] = tensor.detach().clone()

    def _finish(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        found, self._found = self._found, {}
        logits = output.detach().clone()
        return self._leave({**found, self._server.head: logits, LOGITS: logits}, output)


def block_output(server: Server, module: nn.Module, output: Any) -> torch.Tensor | None:
    """Return a module's output in Hugging Face's sense.

    A decoder layer returns ``(hidden, residual)``. Where it runs the next layer's norm inside itself (Llama in
    TensorRT-LLM), its true output is the residual; where not, it is the sum. A norm called with a residual returns
    ``(normed, sum)`` and a parallel projection ``(output, bias)``, of which the first counts.
    """
    if isinstance(output, torch.Tensor):
        return output
    if not isinstance(output, list | tuple) or not output or not isinstance(output[0], torch.Tensor):
        return None
    if not hasattr(module, "self_attn") or len(output) < 2 or not isinstance(output[1], torch.Tensor):
        return output[0]
    hidden, residual = output[0], output[1]
    return residual if server.runs_next_norm(module) else hidden + residual


def block_input(
    server: Server, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return a module's input in Hugging Face's sense: layers and norms also get the residual, which belongs to it."""
    tensors = floating(args, kwargs)
    hidden: torch.Tensor | None = kwargs.get("hidden_states", tensors[0] if tensors else None)
    others = [tensor for tensor in tensors[1:] if hidden is not None and tensor.shape == hidden.shape]
    residual: torch.Tensor | None = kwargs.get("residual", others[0] if others else None)
    if residual is None or hidden is None:
        return hidden
    return residual if server.runs_next_norm(module) else hidden + residual


def floating(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the floating tensors among arguments, in order: positions and ids are integers."""
    return [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.is_floating_point()]
