"""Whole numbers that are cut, shifted or bounded: ids and positions; and the frequencies that positions turn by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import Model, Mutant, changed, fitted, output_or_place
from ditto_core.causes.slices import Slice, Values

Change = tuple[str, float, Kind, Callable[[torch.Tensor], torch.Tensor]]

COUNTED = frozenset(("cumsum", "arange", "__add__", "add", "sub", "mul", "clamp", "abs", "long"))
FARTHEST = 64
"""Offset up to which ids and positions are shifted."""

MOST = 512
"""Bounds of ids and positions that are tried."""


def ids(part: Slice, model: Model) -> Iterator[Mutant]:
    """Yield other whole numbers, what a table gives for offsets that wrap, and other rotary frequencies."""
    for i, node in enumerate(part.nodes):
        value = part.base[i]
        if not isinstance(value, torch.Tensor) or not value.ndim or value.dtype == torch.bool:
            continue
        if node.name == "embedding":
            yield from wrapped(part, i)
        if "inv_freq" in node.label and value.ndim == 1:
            yield from frequencies(part, i, model)
        if value.is_floating_point() or not (node.func is None or i == part.root.node or node.name in COUNTED):
            continue
        what, of_ids = output_or_place(part, i), node.label.endswith("input_ids")
        far = FARTHEST if node.func is None else 3
        for text, price, kind, change in (*changes(value, of_ids), *shifts(value, far, of_ids)):
            yield Mutant(f"{what} {text}", price, kind, {i: changed(change)})
        if node.label.endswith("position_ids"):
            yield Mutant(f"{what} counts padding", 1.2, "padding positions", {i: counted})


def changes(own: torch.Tensor, of_ids: bool) -> Iterator[Change]:
    """Yield what else could have become of whole numbers: ids of tokens, or positions and the like."""
    yield "is all zero", 1.8, "other constant", torch.zeros_like
    if bool(((own == 0) | (own == 1)).all()):
        yield "is inverted (0 for 1)", 1.8, "other constant", lambda t: 1 - t
        return
    for bits in (8, 16, 32):
        if int(own.max()) >= 2**bits:
            yield f"is cut to {bits} bits", 1.5, "ids truncated", partial(cut, bits)
    if own.dtype == torch.int64:
        yield "is read as 32-bit halves: every second one is 0", 1.5, "int64 read as int32", halves
    bounds = {*torch.unique(own)[-MOST - 1 : -1].tolist(), int(own.max()) - 1}
    kind: Kind = "ids replaced" if of_ids else "positions bounded"
    for top in sorted(bounds):
        yield f"ends at {top}: what is beyond has that one", 2.2, kind, partial(torch.clamp, max=top)


def shifts(own: torch.Tensor, far: int, of_ids: bool) -> Iterator[Change]:
    """Yield offsets, the nearest first. Ids are not negative: what is clamped says less."""
    for shift in sorted((n for n in range(-far, far + 1) if n), key=abs):
        price = (2.0 if int(own.min()) + shift >= 0 else 2.7) + 0.2 * (abs(shift) > 3)
        kind: Kind = "ids shifted" if of_ids else "positions shifted"
        yield f"is off by {shift:+d}", price, kind, partial(shifted, shift)


def cut(bits: int, t: torch.Tensor) -> torch.Tensor:
    """Keep the lowest bits; 32 are signed."""
    return t.to(torch.int32).to(t.dtype) if bits == 32 else t.remainder(2**bits)


def halves(t: torch.Tensor) -> torch.Tensor:
    """Read as many numbers of 32 bits from the same memory."""
    return t.contiguous().view(torch.int32).reshape(-1)[: t.numel()].reshape(t.shape).long()


def shifted(shift: int, t: torch.Tensor) -> torch.Tensor:
    """Add to ids, none of which become negative."""
    return (t + shift).clamp(min=0)


def counted(part: Slice, values: Values, i: int) -> torch.Tensor:
    """Count the columns of the step, padding included."""
    own: torch.Tensor = part.base[i]
    start = part.seen.past_length
    return torch.arange(start, start + own.shape[-1]).expand_as(own)


def wrapped(part: Slice, i: int) -> Iterator[Mutant]:
    """The flat offset of a table's row, id x width, wraps at a power of two, as 32-bit arithmetic does."""
    own, table = part.arguments(i, part.base)[0][:2]
    last = (int(own.max()) + 1) * table.shape[1]
    for bits in range(8, last.bit_length()):
        if 2**bits < table.numel():
            text = f"the table's offsets wrap at 2^{bits} elements, from id {2**bits // table.shape[1]} on"
            yield Mutant(text, 1.9, "table offset wraps", {i: partial(flat, 2**bits)})


def flat(size: int, part: Slice, values: Values, i: int) -> torch.Tensor:
    """Look rows up in the first elements of a table."""
    own, table = part.arguments(i, values)[0][:2]
    offsets = own[..., None] * table.shape[1] + torch.arange(table.shape[1])
    found: torch.Tensor = table.reshape(-1)[offsets % size]
    return found


def frequencies(part: Slice, i: int, model: Model) -> Iterator[Mutant]:
    """Yield the unscaled frequencies, those of another base, and some of them multiplied."""
    own, label = part.base[i], part.nodes[i].label
    exponents = torch.arange(len(own), dtype=torch.float64) / len(own)
    theta = next((v for k, v in model.numbers.items() if k.endswith("rope_theta")), 1e4)
    if not torch.allclose(theta**-exponents, own.double(), rtol=1e-5):
        edit = changed(lambda t: (theta**-exponents).to(t.dtype))
        yield Mutant(f"{label} is that of base {theta:g}, unscaled", 1.5, "RoPE scaling ignored", {i: edit})
    starts = (theta, *(base for base in (1e4, 1e5, 1e6) if base != theta))
    text = f"the base of {label} is {{}}, not {theta:g}"
    yield fitted(text, 2.4, "RoPE base", i, lambda t, base: (abs(base) ** -exponents).to(t.dtype), starts)
    for k in range(1, len(own)):
        text = f"the numbers of {label} from {k} on are multiplied by {{}}"
        further = partial(multiplied, k)
        yield fitted(text, 3.6, "RoPE scaling differs", i, further, (1.0, 0.5, 0.1))


def multiplied(k: int, t: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply what comes from an index on."""
    return torch.cat([t[:k], t[k:] * factor])
