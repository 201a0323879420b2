"""Numbers: the constants of the model's code, ids and positions, number formats, and one fitted factor or offset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import (
    Edits,
    Model,
    Mutant,
    changed,
    instead,
    is_float,
    output_or_place,
    place_of,
    with_argument,
)
from ditto_core.causes.mutants.operations import MOVING
from ditto_core.causes.rounding import QUANTIZERS
from ditto_core.causes.slices import Slice

ARITHMETIC = ("add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "pow", "rpow")
COUNTED = frozenset(("cumsum", "arange", "__add__", "add", "sub", "mul", "clamp", "abs", "long"))
ACTIVE = frozenset(("gelu", "silu", "relu"))
CASTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def constants(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield other values of each constant of the code: 0 and 1, its neighbours, those of the configuration, any."""
    configured = {float(v) for v in model.numbers.values() if isinstance(v, float)}
    for i, node in enumerate(part.nodes):
        if node.name.strip("_") not in (*ARITHMETIC, "clamp", "clip"):
            continue
        for k, own in enumerate(node.args):
            if type(own) not in (int, float) or not isinstance(part.base[i], torch.Tensor):
                continue
            yield from neighbours(part, i, k, own, configured)
        yield from index_constants(part, i)
    yield from everywhere(part)


def everywhere(part: Slice) -> Iterator[Mutant]:
    """One number that the code uses several times is another, as a soft cap that divides and multiplies."""
    uses: dict[float, list[tuple[int, int]]] = {}
    for i, node in enumerate(part.nodes):
        arithmetic = node.name.strip("_") in ARITHMETIC and "pow" not in node.name and is_float(part.base[i])
        for k, own in enumerate(node.args if arithmetic else ()):
            if type(own) in (int, float) and abs(own) not in (0, 1):
                uses.setdefault(float(own), []).append((i, k))
    for own, places in uses.items():
        if len({i for i, _ in places}) > 1:
            text = f"the constant {own:.6g} from {place_of(part, places[0][0])} on is {{}}"
            fit = partial(fitted_arguments, places)
            yield Mutant(text, 2.5, "constants", "other constant", fit=fit, starts=(own, own / 4, own * 4))


def fitted_arguments(places: Sequence[tuple[int, int]], value: float) -> Edits:
    """Edit one argument of each node."""
    return {i: with_argument(k, value) for i, k in places}


def neighbours(part: Slice, i: int, k: int, own: float, configured: set[float]) -> Iterator[Mutant]:
    """Yield other values of one constant."""
    where = place_of(part, i)
    if isinstance(own, int) and not is_float(part.base[i]):
        for shift in (-3, -2, -1, 1, 2, 3):
            # relative: a constant that is a length of this step is another number at the next
            edit = with_argument(k, partial(add, shift))
            yield Mutant(f"the constant {own} of {where} is {own + shift}", 2, "constants", "other constant", {i: edit})
        return
    near = {0.0, 1.0, own * 2, own / 2, -own, abs(own) ** 0.5, own**2, 1 / own if own else 1.0} | configured
    for new in sorted(near - {float(own)}):
        price = 1.0 if new in (0.0, 1.0) else 1.5
        text = f"the constant {own:.6g} of {where} is {new:.6g}"
        yield Mutant(text, price, "constants", "other constant", {i: with_argument(k, new)})
    if is_float(part.base[i]):
        text = f"the constant {own:.6g} of {where} is {{}}"
        starts = (own or 1e-6, own * 4 or 1e-5, own / 4 or 1e-3, 1.0)
        fit = partial(fitted_argument, i, k)
        yield Mutant(text, 3, "constants", "other constant", fit=fit, starts=starts)


def add(shift: float, x: float) -> float:
    """Return a sum."""
    return x + shift


def fitted_argument(i: int, k: int, value: float) -> Edits:
    """Edit one argument."""
    return {i: with_argument(k, value)}


def index_constants(part: Slice, i: int) -> Iterator[Mutant]:
    """Yield neighbours of a whole number that indexes."""
    node = part.nodes[i]
    if node.name != "__getitem__" or not isinstance(node.args[1], tuple):
        return
    for k, own in enumerate(node.args[1]):
        for new in sorted({0, -1, own + 1, own - 1} - {own}) if type(own) is int else ():
            index = (*node.args[1][:k], new, *node.args[1][k + 1 :])
            text = f"the index {own} of {place_of(part, i)} is {new}"
            yield Mutant(text, 1.5, "constants", "other constant", {i: with_argument(1, index)})


def ids(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield other whole numbers: positions and ids that are shifted, all zero, or count from the first."""
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
            continue
        if not value.ndim or not (node.func is None or i == part.root.node or node.name in COUNTED):
            continue
        what = output_or_place(part, i)
        for shift in (1, -1, 2, -2, 3, -3):
            # ids are not negative: what is clamped says less
            price = 2.0 if int(value.min()) + shift >= 0 else 2.7
            edit = changed(partial(shifted, shift))
            yield Mutant(f"{what} is off by {shift:+d}", price, "constants", "positions shifted", {i: edit})
        if bool(((value == 0) | (value == 1)).all()):
            flip = changed(lambda t: 1 - t)
            yield Mutant(f"{what} is inverted (0 for 1)", 1.8, "constants", "other constant", {i: flip})
        yield Mutant(f"{what} is all zero", 1.8, "constants", "other constant", {i: changed(torch.zeros_like)})


def shifted(shift: int, ids: torch.Tensor) -> torch.Tensor:
    """Add to ids, none of which become negative."""
    return (ids + shift).clamp(min=0)


def formats(part: Slice, model: Model, dtype: str) -> Iterator[Mutant]:
    """Yield narrower number formats, the engine's own left out; weights are quantized too."""
    own = getattr(torch, dtype)
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not is_float(value) or not value.ndim or node.name in MOVING:
            continue
        what, weight = output_or_place(part, i), node.label in model.tensors
        for cast in CASTS:
            if cast is not own and torch.finfo(cast).bits <= torch.finfo(own).bits:
                price = (1.5 if torch.finfo(cast).bits > 8 else 2.5) + (0.5 if node.func is not None else 0)
                text = f"{what} is cast to {str(cast).removeprefix('torch.')}"
                kind: Kind = "weights quantized" if weight else "narrow cast"
                yield Mutant(text, price, "formats", kind, {i: changed(partial(through, cast))})
        for name, of_weight, of_input in QUANTIZERS if weight and value.ndim == 2 else ():
            if of_weight is not None and of_input is None and "float" not in name:
                text = f"{what} holds {name}"
                yield Mutant(text, 2.5, "formats", "weights quantized", {i: changed(of_weight)})


def through(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Round to another dtype."""
    return tensor.float().to(dtype).to(tensor.dtype)


def fits(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield one number each: a factor, an offset, a bound, a soft cap."""
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not is_float(value) or node.name in MOVING or (node.func is None and not node.label):
            continue
        what = output_or_place(part, i)
        price = 3.0 if i == part.root.node or node.label in model.tensors else 3.3 if node.func is None else 3.5
        yield fitted(f"{what} is multiplied by {{}}", price, i, torch.mul, (1.0, 2.0, 0.3, 10.0))
        if value.ndim:
            price = 3.5 if node.label in model.tensors else 4.0
            yield fitted(f"{{}} is added to {what}", price, i, torch.add, (1e-3, 1.0, -1.0))
            finite = value[value.abs() < 1e30]
            top = float(finite.abs().max()) if finite.numel() else 1.0
            if top:
                yield fitted(f"{what} is capped softly at {{}}", 3.5, i, soft_cap, (top, 5.0, 50.0))
            actual = part.seen.actual
            yield fitted(f"{what} is cut off above {{}}", 4, i, at_most, (float(actual.max()),))
        if node.name in ACTIVE:
            yield fitted_activation(f"{what} is a leaky ReLU of {{}}", i, F.leaky_relu, (0.01, 0.2))
            yield fitted_activation(
                f"{what} is f({{}} x) / {{}}", i, partial(steeper, node.func or torch.relu), (1.1, 1.702)
            )
        if bool((value > 0).all()):
            yield fitted(f"{what} is raised to the power {{}}", 3.5, i, torch.pow, (1.0, 2.0, 0.5))


def fitted(text: str, price: float, i: int, func: Callable[..., Any], starts: tuple[float, ...]) -> Mutant:
    """Make a mutant that applies a function of a number to what a node gives."""

    def edits(number: float) -> Edits:
        return {i: changed(lambda t: func(t, number))}

    words: tuple[tuple[str, Kind], ...] = (
        ("cut off", "saturation"),
        ("multiplied", "constant factor"),
        ("softly", "softcap differs"),
    )
    kind: Kind = next((kind for word, kind in words if word in text), "other constant")
    return Mutant(text, price, "fits", kind, fit=edits, starts=starts)


def fitted_activation(text: str, i: int, func: Callable[..., Any], starts: tuple[float, ...]) -> Mutant:
    """Make a mutant that has another activation, with a number."""

    def edits(number: float) -> Edits:
        return {i: instead(lambda x, *a, **k: func(x, number))}

    return Mutant(text, 3, "fits", "activation kind", fit=edits, starts=starts)


def steeper(func: Callable[..., Any], x: torch.Tensor, number: float) -> Any:
    """f(a x) / a: SiLU with the sigmoid of a x."""
    return func(x * number) / number


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(x / cap)."""
    return cap * torch.tanh(x / cap)


def at_most(x: torch.Tensor, top: float) -> torch.Tensor:
    """Cut off above."""
    return x.clamp(max=top)


def gloss(number: float, own: float, doubt: float) -> str:
    """Say what a fitted number looks like, from a short list; empty if like nothing within its uncertainty."""
    if not own or not math.isfinite(number):
        return ""
    names = {"twice that": 2 * own, "half of that": own / 2, "its root": abs(own) ** 0.5, "its inverse": 1 / own}
    told = {name: value for name, value in names.items() if abs(value - own) > doubt * abs(own)}
    return next((f" ({name})" for name, value in told.items() if abs(number - value) <= doubt * abs(value)), "")
