"""How a file's value is laid out compared with a model's site: reshaped, transposed, packed by heads or channels.

A layout reads like einops: ``b t (c d) -> b c t d`` with ``c=4, d=16``. Dimensions that the probes change have no size
in it, so that it holds for every batch and length.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from ditto_core.align.values import Dims
from ditto_core.errors import UsageError

Groups: TypeAlias = tuple[tuple[int, ...], ...]
Sizes: TypeAlias = tuple[int, ...]

MOST_ATOMS = 5
"""More dimensions than this are not permuted: 6! orders of attention tensors are no layouts that exporters write."""
BLOCKS = (8, 16)
"""Sizes of the channel blocks of ONNX Runtime's NCHWc kernels, which keep the plain shape."""
GROUP = re.compile(r"\(([^)]*)\)|(\S+)")


@dataclass(frozen=True)
class Layout:
    """Value -> site: ``left`` and ``right`` group the same named axes; ``sizes`` are those of constant axes.

    A single group on the left takes the whole tensor as one dimension.
    """

    left: tuple[tuple[str, ...], ...]
    right: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        text = f"{grouped_text(self.left)} -> {grouped_text(self.right)}"
        used = {name for name, _ in self.sizes if any(name in group for group in self.left if len(group) > 1)}
        return text + "".join(f", {name}={size}" for name, size in self.sizes if name in used)

    @property
    def plain(self) -> bool:
        """Whether the value has the site's shape and order."""
        return self.left == self.right

    def apply(self, tensor: Any, batch: int = 0) -> Any:
        """Lay out a numpy array or a torch tensor; ``batch`` is the size of the axis ``b``, where it is known.

        Raises :class:`UsageError` when the tensor's shape does not fit.
        """
        if self.plain:
            return tensor
        shape = (math.prod(tensor.shape),) if len(self.left) == 1 else tuple(tensor.shape)
        if len(shape) != len(self.left):
            raise UsageError(f"layout {self} does not fit a tensor of shape {list(tensor.shape)}")
        size: dict[str, int] = {}
        for group, total in zip(self.left, shape, strict=True):
            size |= self._resolve(group, total, batch)
        flat = [name for group in self.left for name in group]
        order = [flat.index(name) for group in self.right for name in group]
        parts = tensor.reshape([size[name] for name in flat])
        moved = parts.permute(order) if hasattr(parts, "permute") else parts.transpose(order)
        return moved.reshape([math.prod(size[name] for name in group) for group in self.right])

    def _resolve(self, group: Sequence[str], total: int, batch: int) -> dict[str, int]:
        """Return the sizes of a group's axes; one that is not known is what the others leave."""
        known = {**dict(self.sizes), **({"b": batch} if batch else {})}
        size = {name: known[name] for name in group if name in known and len(group) > 1}
        rest = math.prod(size.values())
        unknown = [name for name in group if name not in size]
        if len(unknown) > 1 or total % rest or (not unknown and rest != total):
            raise UsageError(f"layout {self} does not fit a dimension of {total}")
        return size | dict.fromkeys(unknown, total // rest)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Inverse of ``str``. Raises :class:`UsageError` for a text that is no layout."""
        pattern, *sizes = text.split(",")
        left, arrow, right = pattern.partition("->")
        pairs = [size.strip().partition("=") for size in sizes]
        if not arrow or any(not number.isdecimal() for _, _, number in pairs):
            raise UsageError(f"layout is {text!r}, expected such as 'b t (c d) -> b c t d, c=4, d=16'")
        made = cls(parse_groups(left), parse_groups(right), tuple((name, int(number)) for name, _, number in pairs))
        if sorted(itertools.chain(*made.left)) != sorted(itertools.chain(*made.right)):
            raise UsageError(f"layout {text!r} has other axes on its left than on its right")
        return made


def grouped_text(groups: Sequence[Sequence[str]]) -> str:
    """Return groups of axes as a pattern; a dimension of size 1 is ``1``."""
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" if group else "1" for group in groups)


def parse_groups(text: str) -> tuple[tuple[str, ...], ...]:
    """Inverse of :func:`grouped_text`."""
    return tuple(
        tuple(inner.split()) if alone == "" else (() if alone == "1" else (alone,))
        for inner, alone in GROUP.findall(text)
    )


@lru_cache(maxsize=4096)
def layouts(value: Dims, site: Dims, batches: Sizes) -> tuple[Layout, ...]:
    """Return every way to lay a value out as a site: the same order of elements first, then transposed.

    Axes are the dimensions of either side, or the value's with one of them split in two. Both sides must have the same
    number of elements on every probe. ``batches`` are the numbers of rows of the probes.
    """
    if product(value) != product(site):
        return ()
    found: dict[str, Layout] = {}
    for atoms, last in axis_sets(value, site):
        for left in arrangements(atoms, value):
            for right in arrangements(atoms, site):
                if in_order(left) or in_order(right):
                    made = named(atoms, left, right, batches)
                    found.setdefault(str(made), made)
        if found and last:
            break
    made_of = tuple(sorted(found.values(), key=lambda layout: (not same_order(layout), not layout.plain)))
    return made_of + tuple(blocked(value, site))


def axis_sets(value: Dims, site: Dims) -> Iterator[tuple[Dims, bool]]:
    """Yield sets of axes: the value's dimensions, the site's, the value's with one split by a dimension of the site.

    With each comes whether what it gives is enough: a dimension is split in both orders.
    """
    narrow, wide = (tuple(d for d in dims if max(d) > 1) for dims in (value, site))
    yield narrow, True
    yield wide, True
    for place, dim in enumerate(narrow):
        for part in dict.fromkeys(wide):
            if part != dim and all(size % by == 0 for size, by in zip(dim, part, strict=True)):
                rest = tuple(size // by for size, by in zip(dim, part, strict=True))
                for pair in ((part, rest), (rest, part)):
                    yield (*narrow[:place], *pair, *narrow[place + 1 :]), pair != (part, rest)


def arrangements(atoms: Dims, target: Dims) -> Iterator[Groups]:
    """Yield the groups of axes, by index, whose products are the ``target`` dimensions."""
    orders = itertools.permutations(range(len(atoms))) if len(atoms) <= MOST_ATOMS else [tuple(range(len(atoms)))]
    for order in orders:
        groups = grouped(atoms, order, target)
        if groups is not None:
            yield groups


def grouped(atoms: Dims, order: Sequence[int], target: Dims) -> Groups | None:
    """Cut an order of axes into groups with the ``target``'s sizes; None where it cannot be done."""
    groups: list[tuple[int, ...]] = []
    place = 0
    for dim in target:
        group: list[int] = []
        size = (1,) * len(dim)
        while size != dim:
            if place == len(order):
                return None
            size = tuple(a * b for a, b in zip(size, atoms[order[place]], strict=True))
            group.append(order[place])
            place += 1
            if any(a > b for a, b in zip(size, dim, strict=True)):
                return None
        groups.append(tuple(group))
    return tuple(groups) if place == len(order) else None


def in_order(groups: Groups) -> bool:
    """Tell whether the axes stand in the order in which they were listed."""
    flat = [index for group in groups for index in group]
    return flat == sorted(flat)


def named(atoms: Dims, left: Groups, right: Groups, batches: Sizes) -> Layout:
    """Name the axes: ``b`` the batch, ``t``, ``u`` … what else the probes change, other letters for constants."""
    letters = iter("cdefghijk")
    changing = iter("tuvwxyz")
    names: dict[int, str] = {}
    for group in right:
        for index in group:
            if atoms[index] == batches and "b" not in names.values():
                names[index] = "b"
            else:
                names[index] = next(letters if constant(atoms[index]) else changing)
    sizes = tuple((name, atoms[index][0]) for index, name in names.items() if name != "b" and constant(atoms[index]))
    ours, theirs = (tuple(tuple(names[index] for index in group) for group in groups) for groups in (left, right))
    return Layout(ours, theirs, sizes)


def constant(sizes: Sizes) -> bool:
    """Tell whether a dimension has one size on all probes."""
    return len(set(sizes)) == 1


def same_order(layout: Layout) -> bool:
    """Tell whether a layout is a reshape only."""
    return list(itertools.chain(*layout.left)) == list(itertools.chain(*layout.right))


def blocked(value: Dims, site: Dims) -> Iterator[Layout]:
    """Yield the layouts of channel blocks [n, channels / block, height, width, block] under the plain shape."""
    if value != site or len(site) != 4 or not all(constant(dim) for dim in site[1:]):
        return
    _, (channels, *_), (height, *_), (width, *_) = site
    for block in BLOCKS:
        if channels % block == 0:
            sizes = (("c", channels // block), ("h", height), ("w", width), ("k", block))
            yield Layout((("b", "c", "h", "w", "k"),), (("b",), ("c", "k"), ("h",), ("w",)), sizes)


def product(dims: Dims) -> Sizes:
    """Return the number of elements on every probe; of a scalar, nothing."""
    return tuple(math.prod(sizes) for sizes in zip(*dims, strict=True))
