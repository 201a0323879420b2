"""What a mutant is: a change of a site's own computation that is judged against the engine's tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ditto_core.causes.kinds import Kind
from ditto_core.causes.slices import Edit, Slice, Values
from ditto_core.model.tape import Ref

Edits = Mapping[int, Edit]
"""What changes, by place in the slice: places mean the same at every step whose slice has the same operations."""

Function = Callable[[torch.Tensor, float], torch.Tensor]
Wrap = Callable[[Callable[..., Any]], Edit]

CASTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

WORDS: Mapping[str, str] = {
    "add": "the addition",
    "sub": "the subtraction",
    "mul": "the multiplication",
    **dict.fromkeys(("truediv", "div"), "the division"),
    **dict.fromkeys(("matmul", "mm", "bmm"), "the product"),
    "neg": "the sign",
    "pow": "the power",
    "sqrt": "the root",
    "reciprocal": "the reciprocal",
    "mean": "the mean",
    "sum": "the sum",
    "amax": "the maximum",
    "exp": "the exponential",
    "cat": "the concatenation",
    "getitem": "the indexing",
    "transpose": "the transposition",
    "where": "the choice",
}
"""What an operation is called in a sentence; others are called by their torch name."""


@dataclass(frozen=True)
class Mutant:
    """One possible fault. ``text`` says what the engine does, ``price`` how far-fetched it is.

    Of a mutant with ``starts`` one number is fitted, from each of these: ``fit`` makes its edits, and ``text`` has a
    place ``{}`` for the number. ``share``: accounting for that share of the error is enough.
    ``family``: empty for that of the generator.
    """

    text: str
    price: float
    kind: Kind
    edits: Edits = field(default_factory=dict)
    fit: Callable[[float], Edits] | None = None
    starts: tuple[float, ...] = ()
    share: float = 0.0
    family: str = ""


@dataclass(frozen=True)
class Model:
    """What mutants know of the model: parameters and buffers by name, numbers of its configuration; and of the engine:
    its dtype, and whether it runs on several ranks."""

    root: nn.Module
    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, float]
    dtype: str
    parallel: bool = False

    @classmethod
    def of(cls, root: nn.Module, dtype: str, *, parallel: bool = False) -> Model:
        """Read a module and the first configuration that it holds."""
        configs: list[Any] = [getattr(module, "config", None) for module in root.modules()]
        config = next((c for c in configs if hasattr(c, "to_dict")), None)
        found: dict[str, float] = {}
        for name, value in (config.to_dict() if config is not None else {}).items():
            nested = value.items() if isinstance(value, dict) else [("", value)]
            found |= {f"{name}.{k}".strip("."): v for k, v in nested if type(v) in (int, float)}
        return cls(root, {**dict(root.named_buffers()), **dict(root.named_parameters())}, found, dtype, parallel)

    @property
    def narrower(self) -> list[torch.dtype]:
        """The formats that hold no more than the engine's dtype, which is left out."""
        own = getattr(torch, self.dtype)
        return [cast for cast in CASTS if cast is not own and torch.finfo(cast).bits <= torch.finfo(own).bits]

    @property
    def sizes(self) -> list[int]:
        """Numbers of heads and experts, and the size of a head: what a layout is made of."""
        heads = self.numbers.get("num_attention_heads") or self.numbers.get("n_head") or 0
        width = self.numbers.get("hidden_size") or self.numbers.get("n_embd") or 0
        found = {int(v) for k, v in self.numbers.items() if "head" in k or "expert" in k}
        return sorted(v for v in found | ({int(width // heads)} if heads else set()) if v > 1)


def split(tensor: torch.Tensor, axis: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Split one axis into several."""
    out: torch.Tensor = tensor.unflatten(axis, sizes)  # type: ignore[no-untyped-call]
    return out


def is_float(value: Any) -> bool:
    """Tell whether a result is a floating tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def changed(change: Callable[[torch.Tensor], Any]) -> Edit:
    """Edit what a node gives."""
    return lambda part, values, i: change(part.call(i, values))


def instead(func: Callable[..., Any]) -> Edit:
    """Compute another function of what a node takes."""
    return lambda part, values, i: part.call(i, values, func)


def argument(k: int) -> Edit:
    """Give what a node takes as its argument ``k``."""
    return lambda part, values, i: part.arguments(i, values)[0][k]


def with_argument(k: int, new: Any) -> Edit:
    """Compute a node with another argument ``k``: a number, or a function of the model's own."""

    def edit(part: Slice, values: Values, i: int) -> Any:
        args, kwargs = part.arguments(i, values)
        other = new(args[k]) if callable(new) else new
        func = part.nodes[i].func
        assert func is not None
        return func(*args[:k], other, *args[k + 1 :], **kwargs)

    return edit


def place_of(part: Slice, i: int) -> str:
    """Say where in the model's code a node stands, or which tensor it is."""
    node = part.nodes[i]
    if node.label:
        return node.label
    name = node.name.strip("_").removeprefix("r").removeprefix("i") if node.name.startswith("__") else node.name
    word = WORDS.get(name.strip("_"), f"`{name.strip('_')}`")
    return f"{word} in `{node.code}` ({node.source})" if node.code else f"{word} at {node.source}"


def output_or_place(part: Slice, i: int) -> str:
    """Say the same; the site's own node is the output."""
    return "the output" if i == part.root.node else place_of(part, i)


def operands(part: Slice, i: int) -> Sequence[tuple[int, Ref]]:
    """Return the tensors that a node takes by position."""
    return [(k, arg) for k, arg in enumerate(part.nodes[i].args) if isinstance(arg, Ref)]


def fitted(
    text: str, price: float, kind: Kind, i: int, func: Function, starts: tuple[float, ...], wrap: Wrap = changed
) -> Mutant:
    """Make a mutant that applies a function of a number to what a node gives, or (``instead``) to what it takes."""
    fit: Callable[[float], Edits] = lambda number: {i: wrap(lambda x, *_, **__: func(x, number))}  # noqa: E731
    return Mutant(text, price, kind, fit=fit, starts=starts)
