"""Numbers: the constants of the model's code, ids and positions, number formats, and one fitted factor or offset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import (
    Edits,
    Function,
    Model,
    Mutant,
    changed,
    fitted,
    instead,
    is_float,
    output_or_place,
    place_of,
    with_argument,
)
from ditto_core.causes.mutants.operations import MOVING
from ditto_core.causes.slices import LARGE, Slice
from ditto_core.compare.formats import CHUNKS, QUANTIZERS, narrow_sum, round_bits

ARITHMETIC = ("add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "pow", "rpow")
ACTIVE = frozenset(("gelu", "silu", "relu"))
PRODUCTS = frozenset(("matmul", "mm", "bmm", "__matmul__"))
ROUNDED = 0.7
"""Share of an error that a rounding has to account for, whose details differ between engines."""


def constants(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield other values of each constant of the code: 0 and 1, its neighbours, those of the configuration, any."""
    configured = {float(v) for v in model.numbers.values() if isinstance(v, float)}
    for i, node in enumerate(part.nodes):
        if node.name.strip("_") not in (*ARITHMETIC, "clamp", "clip"):
            continue
        for k, own in enumerate(node.args):
            if type(own) in (int, float) and isinstance(part.base[i], torch.Tensor):
                yield from neighbours(part, i, k, own, configured)
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
            yield Mutant(text, 2.5, "other constant", fit=fit, starts=(own, own / 4, own * 4))


def fitted_arguments(places: Sequence[tuple[int, int]], value: float) -> Edits:
    """Edit one argument of each node."""
    return {i: with_argument(k, value) for i, k in places}


def neighbours(part: Slice, i: int, k: int, own: float, configured: set[float]) -> Iterator[Mutant]:
    """Yield other values of one constant."""
    where = place_of(part, i)
    if isinstance(own, int) and not is_float(part.base[i]):
        for shift in (-3, -2, -1, 1, 2, 3):
            # relative: a constant that is a length of this step is another number at the next
            edit = with_argument(k, lambda x, shift=shift: x + shift)
            yield Mutant(f"the constant {own} of {where} is {own + shift}", 2, "other constant", {i: edit})
        return
    near = {0.0, 1.0, own * 2, own / 2, -own, abs(own) ** 0.5, own**2, 1 / own if own else 1.0} | configured
    for new in sorted(near - {float(own)}):
        price = 1.0 if new in (0.0, 1.0) else 1.5
        text = f"the constant {own:.6g} of {where} is {new:.6g}"
        yield Mutant(text, price, "other constant", {i: with_argument(k, new)})
    if is_float(part.base[i]):
        text = f"the constant {own:.6g} of {where} is {{}}"
        starts = (own or 1e-6, own * 4 or 1e-5, own / 4 or 1e-3, 1.0)
        fit = partial(fitted_arguments, [(i, k)])
        yield Mutant(text, 3, "other constant", fit=fit, starts=starts)


def formats(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield narrower number formats, the engine's own left out: of tensors, of weights and of products."""
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not is_float(value) or not value.ndim or node.name in MOVING:
            continue
        what, weight = output_or_place(part, i), node.label in model.tensors
        kind: Kind = "weights quantized" if weight else "narrow cast"
        for cast in model.narrower:
            price = (1.5 if torch.finfo(cast).bits > 8 else 2.5) + (0.5 if node.func is not None else 0)
            for how, func in (("cast", through), ("cut", toward_zero)):
                text = f"{what} is {how} to {str(cast).removeprefix('torch.')}"
                yield Mutant(text, price + 0.1 * (how == "cut"), kind, {i: changed(partial(func, cast))})
        if weight and value.ndim == 2:
            yield from quantized(part, i)
        if node.name in PRODUCTS and len(node.refs) == 2:
            yield from narrow_products(part, i, model)


def quantized(part: Slice, i: int) -> Iterator[Mutant]:
    """Yield coarser weights, and coarser inputs with them."""
    inputs = [j for j, node in enumerate(part.nodes) if node.origin is not None and is_float(part.base[j])]
    for name, of_weight, of_input in QUANTIZERS:
        of_inputs = {} if of_input is None else dict.fromkeys(inputs, changed(of_input))
        text, edits = f"{output_or_place(part, i)} holds {name}", {i: changed(of_weight), **of_inputs}
        yield Mutant(text, 2.5, "weights quantized", edits, share=ROUNDED)


def narrow_products(part: Slice, i: int, model: Model) -> Iterator[Mutant]:
    """Both factors of a product are rounded, or its sum is again and again."""
    func, where = part.nodes[i].func, place_of(part, i)
    assert func is not None
    products: tuple[tuple[int, Kind], ...] = ((10, "TF32"), (7, "bfloat16 products"))
    for bits, kind in products:
        rounded = instead(lambda a, b, bits=bits: func(round_bits(a, bits), round_bits(b, bits)))
        text = f"the factors of {where} are rounded to {bits} bits of mantissa{' (float16 has as many)' * (bits == 10)}"
        yield Mutant(text, 1.9, kind, {i: rounded}, share=ROUNDED)
    own = getattr(torch, model.dtype)
    for chunk in CHUNKS if own.itemsize == 2 else ():
        sums = instead(lambda a, b, chunk=chunk: narrow_sum(a, b, own, chunk))
        text = f"the sum of {where} is rounded to {model.dtype} after every {chunk} of its products"
        yield Mutant(text, 2.2, "narrow accumulation", {i: sums}, share=0.6)


def through(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Round to another dtype."""
    return tensor.float().to(dtype).to(tensor.dtype)


def toward_zero(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Cut the bits off that another dtype does not hold."""
    nearest = through(dtype, tensor)
    # the neighbour of a value towards zero is between 0.5 and 1 epsilons of it away, relatively
    inward = through(dtype, nearest * (1 - 0.6 * torch.finfo(dtype).eps))
    return torch.where(nearest.abs() > tensor.abs(), inward, nearest)


def fits(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield one number each: a factor, an offset, a bound, a soft cap."""
    yield from clipped(part)
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not is_float(value) or node.name in MOVING or (node.func is None and not node.label):
            continue
        what, weight = output_or_place(part, i), node.label in model.tensors
        price = 2.9 if weight else 3.0 if i == part.root.node else 3.3 if node.func is None else 3.5
        yield fitted(f"{what} is multiplied by {{}}", price, "constant factor", i, torch.mul, (1.0, 2.0, 0.3, 10.0))
        if value.ndim and value.numel() <= LARGE:
            price, starts = 3.5 if weight else 4.0, (1e-3, 1.0, -1.0)
            yield fitted(f"{{}} is added to {what}", price, "other constant", i, torch.add, starts)
            finite = value[value.abs() < 1e30]
            top = float(finite.abs().max()) if finite.numel() else 1.0
            cap: Function = lambda x, most: most * torch.tanh(x / most)  # noqa: E731
            if top:
                yield fitted(f"{what} is capped softly at {{}}", 3.5, "softcap differs", i, cap, (top, 5.0, 50.0))
            least: Function = lambda x, most: x.clamp(max=most)  # noqa: E731
            top = float(part.seen.actual.max())
            yield fitted(f"{what} is cut off above {{}}", 4, "saturation", i, least, (top,))
        if node.name in ACTIVE:
            kind: Kind = "activation kind"
            yield fitted(f"{what} is a leaky ReLU of {{}}", 3, kind, i, F.leaky_relu, (0.01, 0.2), instead)
            steeper: Function = lambda x, a, own=node.func: own(x * a) / a  # type: ignore[misc]  # noqa: E731
            yield fitted(f"{what} is f({{}} x) / {{}}", 3, kind, i, steeper, (1.1, 1.702), instead)
        if value.numel() <= LARGE and bool((value > 0).all()):
            text = f"{what} is raised to the power {{}}"
            yield fitted(text, 3.5, "other constant", i, torch.pow, (1.0, 2.0, 0.5))


def clipped(part: Slice) -> Iterator[Mutant]:
    """The output is cut off at bounds that several of its numbers share."""
    actual, expected = part.seen.chosen(part.seen.actual), part.seen.chosen(part.expected.double())
    low, high = float(actual.min()), float(actual.max())
    room = part.seen.bound * max(abs(low), abs(high))
    above, below = int((expected > high + room).sum()), int((expected < low - room).sum())
    shared = int((actual == high).sum()) >= above and int((actual == low).sum()) >= below
    if above + below and shared and low < high and not part.mask:
        cut = " and ".join([f"above {high:.6g}"] * bool(above) + [f"below {low:.6g}"] * bool(below))
        edit = changed(lambda t: t.clamp(low if below else None, high if above else None))
        yield Mutant(f"the output is cut off {cut}", 1.9, "saturation", {part.root.node: edit})


def gloss(number: float, own: float, doubt: float) -> str:
    """Say what a fitted number looks like, from a short list; empty if like nothing within its uncertainty."""
    if own in (0, 1) or not math.isfinite(number):
        return ""
    names = {"twice that": 2 * own, "half of that": own / 2, "its root": abs(own) ** 0.5, "its inverse": 1 / own}
    told = {name: value for name, value in names.items() if abs(value - own) > doubt * abs(own)}
    return next((f" ({name})" for name, value in told.items() if abs(number - value) <= doubt * abs(value)), "")
