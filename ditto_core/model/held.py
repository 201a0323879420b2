"""Inputs that a model's code reads as Python numbers, such as the grid of an image's patches.

``torch.export`` cannot trace what depends on them. An export holds them at the example's values: what is computed from
them alone is computed while the model is traced, and the graph has the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from ditto_core.model.tape import writes

READ = frozenset(
    getattr(torch.Tensor, name) for name in ("tolist", "item", "__int__", "__bool__", "__index__", "__float__")
)
"""What makes Python numbers of a tensor."""
MADE = frozenset((torch.arange, torch.tensor))
"""What makes a tensor of Python numbers."""

SYMBOLIC = (torch.Tensor, torch.SymInt, torch.SymFloat)


class Following(TorchFunctionMode):
    """Follows what is computed from some integer inputs alone."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        counted = {n: t for n, t in inputs.items() if not t.is_floating_point() and not t.is_complex()}
        self._known = {id(tensor): (tensor, frozenset([name])) for name, tensor in counted.items()}

    def origin(self, args: Any, kwargs: Any) -> frozenset[str]:
        """Return the inputs that arguments were computed from; nothing where another tensor is among them."""
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        known = [self._known.get(id(tensor)) for tensor in tensors]
        return frozenset().union(*(found[1] for found in known if found)) if known and all(known) else frozenset()

    def forget(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        """Follow a tensor no further that other tensors are written into, nor what shares its memory."""
        held = self._known.get(id(args[0])) if args and writes(getattr(func, "__name__", "")) else None
        if held is not None:
            memory = held[0].untyped_storage()._cdata
            same = [key for key, (t, _) in self._known.items() if t.untyped_storage()._cdata == memory]
            for key in same:
                del self._known[key]

    def follow(self, value: Any, names: frozenset[str]) -> Any:
        """Remember where a result comes from, and return it."""
        for each in tree_iter(value):
            if isinstance(each, torch.Tensor):
                self._known[id(each)] = each, names
        return value


class Reading(Following):
    """Notes the inputs whose numbers are read; ``names`` has them."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__(inputs)
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        origin = self.origin(args, kwargs)
        if origin and func in READ:
            self.names |= origin
        if not origin:
            self.forget(func, args)
        value = func(*args, **(kwargs or {}))
        return self.follow(value, origin) if origin else value


class Holding(Following):
    """Computes what depends on held inputs alone with real numbers, though all else is traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, outside of the trace where it has held arguments only, or plain numbers."""
        origin = self.origin(args, kwargs)
        if func in MADE and not any(isinstance(each, SYMBOLIC) for each in tree_iter((args, kwargs))):
            origin = frozenset(["numbers"])
        if not origin:
            self.forget(func, args)
            return func(*args, **(kwargs or {}))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return self.follow(func(*args, **(kwargs or {})), origin)


def inputs_read(
    run: Callable[[dict[str, torch.Tensor]], object], inputs: Mapping[str, torch.Tensor], but: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return those of the inputs by name that ``run`` reads as Python numbers, ``but`` some that are not looked at."""
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    with Reading({name: tensor for name, tensor in given.items() if name not in but}) as reading:
        run(given)
    return {name: tensor for name, tensor in inputs.items() if name in reading.names}
