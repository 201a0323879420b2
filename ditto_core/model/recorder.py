"""Watch a torch module run: every module's inputs and outputs, and tensors named with :func:`tap`, by site."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ditto_core.model.branches import branching
from ditto_core.model.code_lines import running_frame
from ditto_core.model.containers import map_tensors, tensors_in
from ditto_core.model.listener import Listener
from ditto_core.sites import is_operator

OnTensor = Callable[[str, torch.Tensor, nn.Module], "torch.Tensor | None"]
"""Receives ``(site, tensor, module)``. A tensor that it returns takes the place of the one it was given."""

_recorder: ContextVar[Recorder | None] = ContextVar("ditto_recorder", default=None)


def tap(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Name a tensor inside eager code, so that engines built from the module can show it; return it unchanged.

    Called in the forward of the module ``model.layers.0.mlp``, ``tap("inter", x)`` makes the site
    ``model.layers.0.mlp:inter``. It survives ``torch.export`` and costs nothing outside of a recording.
    """
    if torch.compiler.is_dynamo_compiling():  # it breaks the graph at a context variable
        return tensor
    recorder = _recorder.get()
    return tensor if recorder is None or not recorder.hears_taps else recorder.tapped(name, tensor)


def running() -> nn.Module | None:
    """Return the module whose forward runs, where what :func:`tap` names in it is recorded; else None."""
    if torch.compiler.is_dynamo_compiling():
        return None
    recorder = _recorder.get()
    return None if recorder is None or not recorder.hears_taps else recorder.running()


class Recorder:
    """Listens to the calls of the modules below ``root``; each tensor is handed to ``on_tensor`` as soon as it exists.

    With ``wanted``, only modules that have one of these sites are listened to; without it, all are.
    Sites: the first output tensor of a module is the default port, others are ``:out.<key>``; the first input is
    ``:in``, others ``:in.<name>``. The second call of a module in one step is ``path@1``; a
    call with a text argument is ``path@text`` (Gemma's rotary embedding: ``@sliding_attention``). ``root`` itself has
    no site. With ``operators``, or where one is ``wanted``, also what the code of modules with children computes by
    itself: ``path.function:line operator``, ``@1`` for the second at that line.
    """

    def __init__(
        self, root: nn.Module, on_tensor: OnTensor, wanted: Iterable[str] | None = None, *, operators: bool = False
    ) -> None:
        wanted = None if wanted is None else tuple(wanted)
        self._root = root
        self._inputs = None if wanted is None else frozenset(map(module_of, filter(is_input, wanted)))
        self._listeners: list[Listener] = []
        self._listening = False
        self._paths = None if wanted is None else heard_paths(wanted)
        self.hears_taps = self._paths is None
        """Whether what :func:`tap` names is wanted: attention and caches name tensors in each layer."""
        sites = None if operators else [site for site in wanted or () if is_operator(site)]
        self._operators = None if sites is None else frozenset(map(operator_of, sites))
        self._on_tensor = on_tensor
        self._exporting = False
        self._calls: dict[str, int] = {}
        self._stack: list[tuple[str, nn.Module]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one forward pass of the root module."""
        self._exporting = torch.compiler.is_exporting()
        self._calls.clear()
        self._stack.clear()
        if not self._listeners:
            modules = self._root.named_modules()
            heard = ((path, module) for path, module in modules if path and self._heard(path))
            self._listeners = [Listener(self, path, module, read=self._read(path)) for path, module in heard]
        token, fast = _recorder.set(self), torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # it calls no module inside of nn.TransformerEncoder
            for listener in self._listeners:
                listener.start()
            self._listening = True
            operators = nullcontext() if self._operators == frozenset() else Operators(self, self._operators)
            with branching(self._branch), operators:
                yield
        finally:
            self._listening = False
            for listener in self._listeners:
                listener.stop()
            torch.backends.mha.set_fastpath_enabled(fast)
            _recorder.reset(token)

    def tapped(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Take a tensor that :func:`tap` names, as a port of the module that is running; return what goes on.

        A name that the module's call gives again is numbered, as calls are.
        """
        path = self._stack[-1][0] if self._stack else ""
        other = self._on_tensor(self._numbered(f"{path}:{name}"), tensor, self.running())
        return tensor if other is None else other

    def running(self) -> nn.Module:
        """Return the module whose forward runs, of those that are listened to."""
        return self._stack[-1][1] if self._stack else self._root

    def computed(self, operator: str, result: Any) -> Any:
        """Take what an operator returned; return what goes on. Code that is torch's own is a module's inside."""
        path, module = self._stack[-1] if self._stack else ("", self._root)
        if self._operators is not None and (path.partition("@")[0], operator) not in self._operators:
            return result
        if type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is None:
            return result
        frame = running_frame()
        if frame is None:
            return result
        site = self._numbered(f"{path}.{frame.f_code.co_name}:{frame.f_lineno} {operator}".removeprefix("."))
        return self._visit(result, site, site, "out", module)

    def unseen(self) -> bool:
        """Tell whether a branch of ``torch.cond`` runs, or becomes a graph: what is computed in it stays in it."""
        if torch.compiler.is_dynamo_compiling():
            return self._exporting
        return not self._listening

    def begin(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Take a call of a module as it begins; return its name."""
        site = self._site(path, args, kwargs)
        self._stack.append((site, module))
        return site

    def given(
        self, site: str, module: nn.Module, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand over what a module is called with; return what it gets."""
        named = dict(zip(parameters, args, strict=False)) | kwargs
        changed = self._visit(named, site, f"{site}:in", "in", module)
        if changed is named:
            return args, kwargs
        positional = [changed[name] for name in parameters[: len(args)]]
        return (*positional, *args[len(positional) :]), {name: changed[name] for name in kwargs}

    def end(self, site: str, module: nn.Module, output: Any) -> Any:
        """Hand over what a module returns; return what goes on."""
        self._stack.pop()
        return self._visit(output, site, site, "out", module)

    def _branch(self, pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
        """Run the branch that ``torch.cond`` takes, unseen; what it returns is seen, as an operator's result is."""
        token, self._listening = _recorder.set(None), False
        try:
            result = (true_fn if pred else false_fn)(*operands)
        finally:
            _recorder.reset(token)
            self._listening = True
        return self.computed("cond", result)

    def _heard(self, path: str) -> bool:
        return self._paths is None or path in self._paths

    def _read(self, path: str) -> bool:
        return self._inputs is None or path in self._inputs

    def _site(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Name a call. The order of calls is no name where the code walks a set: a text argument tells them apart."""
        name = path
        for value in (*args, *kwargs.values()):
            if isinstance(value, str):
                name = f"{path}@{value}" if value else path
                break
        return self._numbered(name)

    def _numbered(self, name: str) -> str:
        """Add the number of the call in this step, but to the first."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return f"{name}@{call}" if call else name

    def _visit(self, value: Any, site: str, first: str, direction: str, module: nn.Module) -> Any:
        """Hand over the tensors of a module's inputs or outputs; return them with replacements, if there were any."""
        if isinstance(value, torch.Tensor):
            other = self._on_tensor(first, value, module)
            return value if other is None else other
        handed: set[str] = set()

        def hand(key: str, tensor: torch.Tensor) -> torch.Tensor | None:
            name = f"{site}:{direction}.{key}" if handed else first
            handed.add(key)
            return self._on_tensor(name, tensor, module)

        return map_tensors(value, hand)


# fmt: off
MOVES = frozenset((
    "__get__", "__getitem__", "alias", "chunk", "clone", "contiguous", "cpu", "cuda", "detach", "double", "expand",
    "expand_as", "flatten", "float", "half", "movedim", "narrow", "permute", "ravel", "requires_grad_", "reshape",
    "select", "split", "squeeze", "swapaxes", "t", "tensor_split", "to", "transpose", "type", "type_as", "unbind",
    "unflatten", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real",
))
# fmt: on
"""Operators that compute no numbers: views, copies and casts."""


class Operators(TorchFunctionMode):
    """Shows a recorder what operators compute from tensors: those ``wanted`` (module and operator), all for None.

    It is called for whatever torch does, thousands of times a step: what is not wanted goes by quickly.
    """

    def __init__(self, recorder: Recorder, wanted: frozenset[tuple[str, str]] | None) -> None:
        super().__init__()
        self._recorder = recorder
        self._names = None if wanted is None else frozenset(operator for _, operator in wanted)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and hand over its result."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        name = getattr(func, "__name__", "")
        if self._recorder.unseen() or (self._names is not None and name.strip("_") not in self._names):
            return result
        if not name or name in MOVES or not any(True for _ in tensors_in((args, kwargs))):
            return result
        if not any(tensor.is_floating_point() for _, tensor in tensors_in(result)):
            return result
        return self._recorder.computed(name.strip("_"), result)


def operator_of(site: str) -> tuple[str, str]:
    """Return the module and the operator of an operator's site, ``path.function:line operator``."""
    place, _, operator = site.rpartition(" ")
    return place.partition(":")[0].rpartition(".")[0].partition("@")[0], operator.partition("@")[0]


def is_input(site: str) -> bool:
    """Tell whether a site is an input of a module."""
    return site.partition(":")[2].split(".")[0] == "in"


def module_of(site: str) -> str:
    """Return the module that a site is of."""
    return site.partition(":")[0].partition("@")[0]


def heard_paths(wanted: Iterable[str]) -> frozenset[str] | None:
    """Return the modules that have the ``wanted`` sites; None for all modules.

    All, where a site is one that ``tap`` names: which module names it is known only while every module is watched.
    """
    sites = list(wanted)
    if any(named_by_code(site) for site in sites):
        return None
    return frozenset(map(module_of, sites))


def named_by_code(site: str) -> bool:
    """Tell whether a site is one that ``tap`` names, rather than a module's input or output."""
    port = site.partition(":")[2]
    return bool(port) and port.split(".")[0] not in ("in", "out")
