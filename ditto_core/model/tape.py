"""What a model computed in one step, operation by operation, so that any part of it can be computed again."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ditto_core.model.elementary import ELEMENTARY

LONGEST = 90
"""Characters of a line of code that are shown."""

OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders whose code is not the model's."""


@dataclass(frozen=True)
class Ref:
    """A tensor among a node's results: the only one, or the one at ``item``."""

    node: int
    item: int | None = None


@dataclass(frozen=True)
class Node:
    """One operation, or (``func`` None) a tensor that was there before: a weight, an input, one of the engine's.

    Tensors among ``args`` and ``kwargs`` are :class:`Ref`. ``label`` names a leaf; ``origin`` is what the model had
    computed where the engine's tensor was put. ``source`` is ``file:line`` of the model's code, ``code`` that line.
    """

    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = "leaf"
    source: str = ""
    code: str = ""
    value: Any = None
    label: str = ""
    origin: Ref | None = None
    writes: bool = False

    @cached_property
    def refs(self) -> list[Ref]:
        """The tensors that it takes."""
        found: list[Ref] = []
        mapped(found.append, Ref, (self.args, self.kwargs))
        return found


def mapped(func: Callable[[Any], Any], kind: type, x: Any) -> Any:
    """Return nested arguments with ``func`` of what is of a kind in its place.

    As ``tree_map``, which takes many times as long over a few numbers: a search for a cause calls this most.
    """
    if isinstance(x, kind):
        return func(x)
    if type(x) in (tuple, list):
        return type(x)([mapped(func, kind, item) for item in x])
    if type(x) is dict:
        return {key: mapped(func, kind, item) for key, item in x.items()}
    if isinstance(x, (tuple, dict)):  # of a class of its own
        return tree_map(lambda leaf: func(leaf) if isinstance(leaf, kind) else leaf, x)
    return x


class Tape(TorchFunctionMode):
    """Records the torch functions that run under it.

    ``names``: names of tensors that are there before, by address of their data. ``wanted``: sites after the last of
    which nothing is recorded; empty for all. ``sites`` afterwards: what the model computed at each site.
    """

    def __init__(self, names: Mapping[int, str], wanted: Collection[str] = ()) -> None:
        super().__init__()
        self._waiting = set(wanted)
        self.ended = False
        self.nodes: list[Node] = []
        self.sites: dict[str, Ref] = {}
        self._names = names
        # weak: a tensor lives as long as in the model's own run, whatever the model's size
        self._known: MutableMapping[torch.Tensor, Ref] = WeakIdKeyDictionary()
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not the model's."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def ref(self, tensor: torch.Tensor) -> Ref:
        """Return where a tensor comes from; one that nothing on the tape computed becomes a leaf."""
        if tensor not in self._known:
            label = self._names.get(tensor.data_ptr(), "") if tensor.numel() else ""
            value = tensor if isinstance(tensor, torch.nn.Parameter) else tensor.clone()
            self._known[tensor] = self._add(Node(value=value, label=label))
        return self._known[tensor]

    def force(self, site: str, origin: Ref, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Say that ``tensor`` now stands at ``site`` for what ``origin`` computed; None: it is what it was."""
        self.sites[site] = origin
        if value is not None:
            self._known[tensor] = self._add(Node(value=value, label=site, origin=origin))
        if site in self._waiting:
            self._waiting.remove(site)
            self.ended = not self._waiting

    def same(self, a: str, b: str) -> bool:
        """Tell whether two sites of a finished tape are one computation, as of a module called twice on one input."""
        return self._first(self.sites[a], self._firsts) == self._first(self.sites[b], self._firsts)

    @cached_property
    def _firsts(self) -> Sequence[Ref]:
        """For each node the first one that computes the same from the same tensors."""
        known: dict[object, Ref] = {}
        found: list[Ref] = []
        for i, node in enumerate(self.nodes):
            if node.origin is not None:
                found.append(self._first(node.origin, found))
                continue
            taken = mapped(lambda ref: self._first(ref, found), Ref, (node.args, node.kwargs))
            found.append(known.setdefault((node.func, repr(taken)), Ref(i)) if node.func else Ref(i))
        return found

    def _first(self, ref: Ref, firsts: Sequence[Ref]) -> Ref:
        first = firsts[ref.node]
        return first if ref.item is None else Ref(first.node, ref.item)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and write it down."""
        kwargs = kwargs or {}
        if self._paused or self.ended:
            return func(*args, **kwargs)
        if func in ELEMENTARY:
            with self:
                return ELEMENTARY[func](*args, **kwargs)
        with self.paused():
            return self._record(func, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", str(func))
        taken, named = mapped(self.ref, torch.Tensor, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        result = args[0] if name == "__setitem__" else out
        leaves = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        written = writes(name)
        if not tensors or (not written and all(tensor in self._known for _, tensor in tensors)):
            return out
        source, code = line_of_model()
        node = self._add(Node(func, taken, named, name, source, code, writes=written)).node
        single = len(leaves) == 1 and leaves[0] is result
        for i, tensor in tensors:
            self._known[tensor] = Ref(node, None if single else i)
        return out

    def _add(self, node: Node) -> Ref:
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)


WRITING = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"))
"""Functions that change their first argument."""


def writes(name: str) -> bool:
    """Tell whether a function of this name changes its first argument."""
    return name in WRITING or (name.endswith("_") and not name.endswith("__"))


def line_of_model() -> tuple[str, str]:
    """Return ``file:line`` of the nearest caller outside of torch and this library, and what stands there."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return shown_line(frame.f_code.co_filename, frame.f_lineno)


@cache
def shown_line(path: str, number: int) -> tuple[str, str]:
    """Return ``file:line`` and what stands there, as far as there is room."""
    code = linecache.getline(path, number).strip()
    return f"{Path(path).name}:{number}", code if len(code) <= LONGEST else code[: LONGEST - 2] + " …"
