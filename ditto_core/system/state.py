"""The state behind Python values as plain data: tensors by their bytes, functions by bytecode, closure and globals."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OWN = "ditto_core"
PLAIN = (bool, int, float, complex, str, bytes, range, slice, type(None), type(Ellipsis))
UNSTATED = (
    *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__qualname__", "__slots__"),
    *("__firstlineno__", "__static_attributes__", "_abc_impl"),
)
"""What a class holds that computes nothing."""
CLOSED = ("logging", "threading", "weakref", "io", "os", "asyncio", "multiprocessing", "_pytest", "pytest", "unittest")
"""Packages whose objects hold the whole process."""


def state_of(*values: Any) -> list[Any]:
    """Return what values hold as nested lists of text and numbers, the same for the same values in every process.

    Followed: containers, modules with their hooks and patched methods, attributes and slots of objects, classes of the
    user's, functions with what they close over and the globals that they name. Not followed: the globals of installed
    packages (their versions are in the cache's keys), files, environment variables, and what only C code can see.
    """
    state = State()
    return [[state.of(value) for value in values], *state.descriptions()]


class State:
    """Numbers values as it meets them and describes each once: cycles end, and each tensor is read once."""

    def __init__(self, *, in_set: bool = False) -> None:
        self.in_set = in_set
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []  # kept: an id is one value's only while the value lives

    def of(self, value: Any) -> Any:
        """Return a plain value as text, and another's number."""
        if isinstance(value, enum.Enum):
            return [name_of(type(value)), value.name]
        if isinstance(value, PLAIN):
            return [type(value).__name__, repr(value)]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._met)
            self._met.append(value)
        return self._numbers[id(value)]

    def descriptions(self) -> Iterator[Any]:
        """Yield what the values are, in the order of their numbers; values that are met on the way come later."""
        done = 0
        while done < len(self._met):
            value = self._met[done]
            yield name_of(type(value)) if is_closed(value) else self._described(value)
            done += 1

    def _described(self, value: Any) -> Any:
        return next(describe(self, value) for kind, describe in kinds() if isinstance(value, kind))

    def each(self, values: Iterable[Any]) -> list[Any]:
        """Describe several values."""
        return [self.of(value) for value in values]

    def named(self, values: Mapping[Any, Any]) -> list[Any]:
        """Describe a mapping, in its own order."""
        return [[self.of(key), self.of(value)] for key, value in values.items()]


def _sequence(state: State, value: Iterable[Any]) -> Any:
    return [name_of(type(value)), state.each(value)]


def _set(state: State, value: Iterable[Any]) -> Any:
    """Describe a set in the order of its values' own states; in the state of such a value, by their names alone."""

    def order(item: Any) -> str:
        if state.in_set:
            return repr(item) if isinstance(item, PLAIN) else name_of(item)
        alone = State(in_set=True)
        return json.dumps([alone.of(item), *alone.descriptions()])

    return [name_of(type(value)), state.each(sorted(value, key=order))]


def _mapping(state: State, value: Mapping[Any, Any]) -> Any:
    return [name_of(type(value)), state.named(value)]


def _tensor(state: State, value: torch.Tensor) -> Any:
    if hasattr(value, "__tensor_flatten__"):  # a subclass that is made of others, as torchao's
        names, context = value.__tensor_flatten__()
        return [name_of(type(value)), state.named({name: getattr(value, name) for name in names}), state.of(context)]
    return [str(value.dtype), list(value.shape), str(value.layout), tensor_bytes(value)]


def _array(state: State, value: Any) -> Any:
    import numpy as np

    content = state.each(value.reshape(-1).tolist()) if value.dtype.hasobject else _sha(np.ascontiguousarray(value))
    return [str(value.dtype), list(value.shape), content]


def _module(state: State, value: torch.nn.Module) -> Any:
    """Describe a module's class and attributes. Hooks lie under handles that a process counts: they have no key."""
    attributes = {
        name: list(held.values()) if "_hooks" in name and isinstance(held, Mapping) else held
        for name, held in sorted(vars(value).items())
        if not name.startswith(("_backward", "_full_backward", "_is_full", "_state_dict", "_load_state_dict"))
    }
    return [state.of(type(value)), state.named(attributes)]


def _function(state: State, value: FunctionType) -> Any:
    code, names = value.__code__, sorted(set(_names(value.__code__)))
    held = value.__globals__
    found = {} if installed(value) else {name: held[name] for name in names if name in held}
    cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
    inside = [_attributes(state, module, names) for module in found.values() if isinstance(module, ModuleType)]
    defaults = [value.__defaults__ or (), value.__kwdefaults__ or {}]
    return [name_of(value), state.of(code), state.each(cells), state.each(defaults), state.named(found), inside]


def _attributes(state: State, module: ModuleType, names: Iterable[str]) -> Any:
    """Describe what a function may read from a module of the user's."""
    if installed(module):
        return None
    return state.named({name: vars(module)[name] for name in names if name in vars(module)})


def _code(state: State, value: CodeType) -> Any:
    return [hashlib.sha256(value.co_code).hexdigest(), value.co_names, value.co_varnames, state.each(value.co_consts)]


def _method(state: State, value: MethodType) -> Any:
    return [state.of(value.__self__), state.of(value.__func__)]


def _partial(state: State, value: functools.partial[Any]) -> Any:
    return [state.of(value.func), state.each(value.args), state.named(value.keywords)]


def _class(state: State, value: type) -> Any:
    """Describe a class's own and inherited attributes; of an installed one the functions' code alone."""
    return [[name_of(base), _held(state, base)] for base in value.__mro__ if base.__module__ not in ("builtins", "abc")]


def _held(state: State, cls: type) -> list[Any]:
    held = {name: member for name, member in sorted(vars(cls).items()) if name not in UNSTATED}
    if cls.__module__ in ("torch.nn.modules.module", "typing"):
        return []
    if installed(cls):
        held = {name: member for name, member in held.items() if isinstance(_bare(member), FunctionType)}
    return state.named({name: _bare(member) for name, member in held.items()})


def _bare(member: Any) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return (member.fget, member.fset) if isinstance(member, property) else member


def _named(state: State, value: Any) -> Any:
    return name_of(value)


def _object(state: State, value: Any) -> Any:
    """Describe an object by its class and attributes; a wrapped function by what it wraps."""
    if hasattr(value, "__wrapped__"):
        return [name_of(type(value)), state.of(value.__wrapped__)]
    if callable(getattr(value, "to_dict", None)) and installed(type(value)):  # a configuration of transformers
        return [name_of(type(value)), state.of(value.to_dict())]
    slots = {name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)}
    held = {name: getattr(value, name) for name in slots} | dict(getattr(value, "__dict__", {}))
    kind = name_of(type(value)) if installed(type(value)) else state.of(type(value))
    return [kind, state.named(dict(sorted(held.items())))]


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if name not in UNSTATED)


@cache
def kinds() -> tuple[tuple[Any, Callable[[State, Any], Any]], ...]:
    """Return what describes a value, by its type; the first that fits is taken."""
    import numpy as np
    import torch

    return (
        (torch.Tensor, _tensor),
        ((np.ndarray, np.generic), _array),
        (torch.nn.Module, _module),
        (Mapping, _mapping),
        ((set, frozenset), _set),
        ((list, tuple), _sequence),
        (FunctionType, _function),
        (CodeType, _code),
        (MethodType, _method),
        (functools.partial, _partial),
        (type, _class),
        ((ModuleType, BuiltinFunctionType), _named),
        ((torch.dtype, torch.device, torch.layout, torch.Size, Path), lambda state, value: str(value)),
        (object, _object),
    )


def tensor_bytes(tensor: torch.Tensor) -> str:
    """Return the SHA-256 (hex) of a tensor's elements in row-major order; of a meta tensor, that it is one."""
    import torch

    if tensor.is_meta:
        return "meta"
    if tensor.is_quantized or tensor.layout != torch.strided:
        tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _sha(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and those inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_empty(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def name_of(value: Any) -> str:
    """Return ``module.qualname`` of a class, function or module."""
    inside = getattr(value, "__module__", None) or ""
    return f"{inside}.{getattr(value, '__qualname__', None) or getattr(value, '__name__', type(value).__name__)}"


def is_closed(value: Any) -> bool:
    """Tell whether a value's attributes are about the process, not about the model."""
    return type(value).__module__.partition(".")[0] in CLOSED


def installed(value: Any) -> bool:
    """Tell whether a class, function or module belongs to Python, to an installed package or to this one."""
    inside = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return _installed(inside)


@cache
def _installed(module: str) -> bool:
    top = module.partition(".")[0]
    if top in (OWN, "builtins") or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
