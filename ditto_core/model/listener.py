"""How a recorder hears the calls of a module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from torch import nn

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

CALLS = "_compiled_call_impl", "_call_impl"
"""What torch calls a module by. An attribute of the module's own takes its place: a hook takes twice as long."""


class Hearer(Protocol):
    """What is told of a module's calls; :class:`~ditto_core.model.recorder.Recorder` is one."""

    def unseen(self) -> bool:
        """Tell whether a call is none of its business."""

    def begin(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> str:
        """Take a call as it begins; return its name."""

    def given(
        self, site: str, module: nn.Module, parameters: Sequence[str], args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        """Take what the module is called with; return what it gets."""

    def end(self, site: str, module: nn.Module, output: Any) -> Any:
        """Take what the module returns; return what goes on."""


class Listener:
    """Stands in a module for what torch calls it by, so that a recorder hears each call: the module's own hooks are
    inside. ``read``: it hears what the module is called with, too."""

    def __init__(self, recorder: Hearer, path: str, module: nn.Module, *, read: bool) -> None:
        self._recorder, self._path, self._module, self._read = recorder, path, module, read
        self._parameters = parameters_of(module) if read else []
        self._name = ""
        self._own: Any = None
        self._call: Callable[..., Any]

    def start(self) -> None:
        """Take the place of the module's own."""
        calls = ((name, getattr(self._module, name, None)) for name in CALLS)
        self._name, self._call = next((name, call) for name, call in calls if call is not None)
        self._own = vars(self._module).get(self._name)
        vars(self._module)[self._name] = self

    def stop(self) -> None:
        """Give the place back, unless another one has it."""
        attributes = vars(self._module)
        if attributes.get(self._name) is not self:
            return
        del attributes[self._name]
        if self._own is not None:
            attributes[self._name] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as torch would."""
        recorder, module = self._recorder, self._module
        if recorder.unseen():
            return self._call(*args, **kwargs)
        site = recorder.begin(self._path, module, args, kwargs)
        if self._read:
            args, kwargs = recorder.given(site, module, self._parameters, args, kwargs)
        return recorder.end(site, module, self._call(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Leave a copy of the module what it is called by itself."""
        return copy.deepcopy(self._call, memo)


def parameters_of(module: nn.Module) -> list[str]:
    """Return the names of the parameters of a module's forward."""
    function = getattr(module.forward, "__func__", None)
    return of_method(function) if function else list(inspect.signature(module.forward).parameters)


@lru_cache
def of_method(function: Callable[..., Any]) -> list[str]:
    """Return the names of a method's parameters but for the first. They are asked for in each layer and step."""
    return list(inspect.signature(function).parameters)[1:]
