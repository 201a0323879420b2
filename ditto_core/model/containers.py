"""Tensors in nested tuples, lists, mappings and dataclasses: what a module takes and returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

import torch


def tensors_in(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested tuples, lists, dicts and dataclasses, with its path of keys joined by dots."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
        return
    for key, item in (items_in(value) or {}).items():
        yield from tensors_in(item, f"{prefix}.{key}" if prefix else key)


def items_in(value: Any) -> dict[str, Any] | None:
    """Return what a container holds by key; None for anything that is no container."""
    if value is None:  # what most modules hand on beside a tensor
        return None
    if isinstance(value, tuple | list):
        return {str(i): item for i, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def map_tensors(value: Any, replace: Callable[[str, torch.Tensor], torch.Tensor | None], prefix: str = "") -> Any:
    """Replace tensors where ``replace(path, tensor)`` returns one; without any, the very object comes back."""
    if isinstance(value, torch.Tensor):
        other = replace(prefix, value)
        return value if other is None else other
    items = items_in(value)
    if items is None:
        return value
    mapped = {key: map_tensors(item, replace, f"{prefix}.{key}" if prefix else key) for key, item in items.items()}
    return value if all(map(is_, mapped.values(), items.values())) else rebuilt(value, mapped)


def rebuilt(value: Any, items: Mapping[str, Any]) -> Any:
    """Return a container of the kind of ``value`` that holds other items, in the same order."""
    if isinstance(value, Mapping):
        named = dict(zip(value, items.values(), strict=True))
        return named if type(value) is dict else type(value)(**named)
    if isinstance(value, tuple | list):
        return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(items.values())
    changed = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(changed, name, item)
    return changed
