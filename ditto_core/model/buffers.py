"""What a forward leaves in its module: every step of an exported graph begins with what was there at first."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import nn

from ditto_core.model.traced import version

KEYED = (dict, OrderedDict, defaultdict)
CONTAINERS = (*KEYED, list, set, deque)
PLAIN = (bool, int, float, str, type(None), torch.Tensor, nn.Parameter)
TABLES = vars(nn.Module()).keys() - {"_buffers"}
"""What every module has: tables that a stream of weights writes into, and no forward. A recorder, which writes beside
them what a module is called by, begins inside of :meth:`Buffers.kept`."""


class Buffers:
    """What a module remembers: a counter, an average over the steps, a norm's statistics in training.

    Numbers, lists and objects beside its buffers belong to them: a dynamic RoPE keeps the length that its frequencies
    were made for.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._versions = [version(buffer) for buffer, _ in self._held]
        self._memory = {buffer.untyped_storage()._cdata for buffer, _ in self._held}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give back what a step wrote into, replaced, added or took away. Containers keep their identity."""
        before = [(each, each.copy()) for each in self._containers]
        try:
            yield
        finally:
            for each, own in before:
                give_back(each, own)
            for (buffer, content), seen in zip(self._held, self._versions, strict=True):
                if version(buffer) != seen:
                    buffer.copy_(content)
            self._versions = [version(buffer) for buffer, _ in self._held]

    @cached_property
    def _containers(self) -> list[Any]:
        return [*containers(self._module)]

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result of a step as it is now: a copy where it lies in a buffer, which is given back."""
        return tensor.clone() if tensor.untyped_storage()._cdata in self._memory else tensor


def containers(module: nn.Module) -> Iterator[Any]:
    """Yield what the attributes of all parts lie in, and the containers in them, also those in objects of the same
    package. Containers of other classes may be immutable."""
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(vars(part), package(part)) for part in filter(may_write, module.modules())]
    while waiting:
        each, home = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each) in CONTAINERS:
            yield each
        for value in [v for name, v in each.items() if name not in TABLES] if isinstance(each, dict) else each:
            kind = type(value)
            if kind in PLAIN:
                continue
            if kind in CONTAINERS or kind is tuple:
                waiting.append((value, home))
            elif home != "torch" and package(value) == home and holds(value):
                waiting.append((vars(value), home))


def may_write(part: nn.Module) -> bool:
    """Tell whether a forward may leave something in a module: torch's own write into buffers, or by a hook."""
    hooked = part._buffers or part._forward_pre_hooks or part._forward_hooks
    return bool(hooked) or not type(part).__module__.startswith("torch.nn.")


def holds(value: Any) -> bool:
    """Tell whether a value has attributes of its own; modules are looked at by themselves."""
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, nn.Module)


def package(value: Any) -> str:
    """Return the package of a value's class."""
    return type(value).__module__.partition(".")[0]


def give_back(each: Any, own: Any) -> None:
    """Let a container hold what its copy holds."""
    same = len(each) == len(own) and all(map(is_, each, own))
    if same and (type(each) not in KEYED or all(map(is_, each.values(), own.values()))):
        return
    each.clear()
    each.extend(own) if isinstance(each, list | deque) else each.update(own)
