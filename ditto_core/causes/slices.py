"""The model's own computation of one site at one step, from the engine's tensors upstream, ready to be changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ditto_core.causes.evidence import Seen, left, rel_l2
from ditto_core.compare.masks import hidden_share, is_mask
from ditto_core.model.tape import Node, Ref, Tape, mapped

LARGE = 1 << 20
"""Elements of a weight from which changes are tried on some of its output channels first."""

CHANNELS = 64

Values = list[Any]
"""Results by node."""


class Slice:
    """The nodes between a site and what the engine shows upstream, in the order in which they ran, the site's last.

    ``unfolded`` are sites upstream that count as not shown: their own computation belongs to the slice too.
    """

    def __init__(self, tape: Tape, seen: Seen, unfolded: Collection[str] = ()) -> None:
        self.seen = seen
        root = tape.sites[seen.site]
        needed = nodes_of(tape, root, unfolded)
        place = {number: i for i, number in enumerate(needed)}
        self.nodes = [local(tape.nodes[number], place, unfolded) for number in needed]
        self.root = Ref(place[root.node], root.item)
        self.below = reached(self.nodes)
        self._compute()

    def _compute(self) -> None:
        self.base: Values = []
        for i in range(len(self.nodes)):
            self.base.append(self.call(i, self.base))
        self.expected = self.get(self.base, self.root)
        self.mask = is_mask(self.expected)
        self.now = self.error(self.expected)

    def _with(self, leaves: Mapping[int, torch.Tensor], seen: Seen) -> Slice:
        """Return the slice with other leaves, and with what else is known of the site."""
        other = copy(self)
        other.seen = seen
        other.nodes = [replace(node, value=leaves.get(i, node.value)) for i, node in enumerate(self.nodes)]
        other._compute()
        return other

    @property
    def signature(self) -> list[str]:
        """What the slices of two steps have in common when positions in them mean the same."""
        return [node.name for node in self.nodes]

    @property
    def flagged(self) -> bool:
        """Tell whether the engine's tensor is wrong here."""
        return not self.now <= self.seen.bound

    def get(self, values: Values, ref: Ref) -> Any:
        """Return a tensor among results."""
        value = values[ref.node]
        return value if ref.item is None else tree_leaves(value)[ref.item]

    def arguments(self, i: int, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a node takes; a tensor that it writes into is a copy."""
        node = self.nodes[i]
        args, kwargs = mapped(lambda ref: self.get(values, ref), Ref, (node.args, node.kwargs))
        return ((args[0].clone(), *args[1:]) if node.writes else args), kwargs

    def call(self, i: int, values: Values, func: Callable[..., Any] | None = None) -> Any:
        """Compute a node, or another function of what it takes."""
        node = self.nodes[i]
        if node.func is None:
            return node.value
        args, kwargs = self.arguments(i, values)
        out = (func or node.func)(*args, **kwargs)
        return args[0] if node.name == "__setitem__" else out

    def run(self, edits: Mapping[int, Edit], upto: int | None = None) -> Any:
        """Return the site's tensor, or that of node ``upto``, when some nodes give something else."""
        values = list(self.base)
        touched = self.touched(edits)
        last = len(self.nodes) - 1 if upto is None else upto
        for i in range(last + 1):
            if touched >> i & 1:
                values[i] = edits[i](self, values, i) if i in edits else self.call(i, values)
        return self.get(values, self.root) if upto is None else values[upto]

    def error(self, candidate: Any) -> float:
        """Return the rel-L2 of the engine's tensor against a candidate, without padding; infinity for another shape."""
        if not isinstance(candidate, torch.Tensor) or candidate.shape != self.seen.actual.shape:
            return math.inf
        a, b = self.seen.actual, candidate.double()
        if self.mask:
            if bool((b > 0).any()) and not bool((a > 0).any()):
                return math.inf  # the same to a softmax, and another mask
            a, b = hidden_share(a), hidden_share(b)
        return rel_l2(self.seen.chosen(a), self.seen.chosen(b))

    def explains(self, error: float, share: float = 0.0) -> bool:
        """Tell whether a candidate with this error is the engine's tensor.

        Where the model's own is not, a tenth of its error may be left, or what rounding leaves at a site like this; or
        what is beyond a ``share`` of the error.
        """
        if not self.flagged:
            return error <= self.seen.bound
        if share:
            return error <= (1 - share) * min(self.now, 1.0)
        return error <= left(self.now, self.seen.bound, self.seen.floor)

    def at_random(self, seed: int) -> Slice:
        """Return the slice with other numbers in the place of the engine's tensors: of the same size and sign."""
        draw = torch.Generator().manual_seed(seed)
        noise: dict[int, torch.Tensor] = {}  # a tensor that is shown under several names stays one

        def random(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in noise:
                noise[id(tensor)] = random_like(tensor, draw)
            return noise[id(tensor)]

        shown = {name: random(tensor) for name, tensor in self.seen.captured.items()}
        leaves = {
            i: shown[n.label].to(n.value.dtype) for i, n in enumerate(self.nodes) if n.origin and n.label in shown
        }
        return self._with(leaves, replace(self.seen, captured=shown))

    def narrowed(self) -> Slice | None:
        """Return the slice of a few output channels of a large product; None where there is none at the site.

        Those with the largest and the smallest weight are among them: a scale of the whole is the same.
        """
        width = self.seen.actual.shape[-1] if self.seen.actual.ndim else 0
        weights = [(i, n.value) for i, n in enumerate(self.nodes) if n.func is None and n.origin is None]
        for i, large in ((i, w) for i, w in weights if w.ndim == 2 and w.numel() > LARGE):
            for axis in (axis for axis in (0, 1) if large.shape[axis] == width):
                extremes = {int(large.amax(1 - axis).argmax()), int(large.amin(1 - axis).argmin())}
                some = torch.tensor(sorted({*range(CHANNELS), *extremes}))
                leaves = {j: w[some] for j, w in weights if w.shape == (width,)} | {i: large.index_select(axis, some)}
                with suppress(RuntimeError):  # the weight's other axis is as long
                    other = self._with(leaves, replace(self.seen, actual=self.seen.actual[..., some]))
                    if torch.allclose(other.expected, self.expected[..., some]):
                        return other
        return None

    def touched(self, edits: Iterable[int]) -> int:
        """Return the nodes that edits change, as the bits of a number."""
        return reduce(or_, (self.below[i] | 1 << i for i in edits), 0)

    def costly(self, edits: Iterable[int]) -> bool:
        """Tell whether a large tensor takes part in what edits change."""
        sizes = [getattr(value, "numel", int)() for value in self.base]
        changed = self.touched(edits)
        return any(changed >> i & 1 and any(sizes[r.node] > LARGE for r in n.refs) for i, n in enumerate(self.nodes))


Edit = Callable[[Slice, Values, int], Any]
"""Returns what a node gives in place of its own result, from the results before it."""


def nodes_of(tape: Tape, root: Ref, unfolded: Collection[str]) -> list[int]:
    """Return the nodes that a tensor is computed by, down to the engine's tensors."""
    needed: set[int] = set()
    waiting = [root.node]
    while waiting:
        number = waiting.pop()
        if number in needed:
            continue
        needed.add(number)
        node = tape.nodes[number]
        opened = node.origin is not None and node.label in unfolded
        refs: Sequence[Ref] = [node.origin] if opened and node.origin else node.refs
        waiting += [ref.node for ref in refs]
    return sorted(needed)


def local(node: Node, place: Mapping[int, int], unfolded: Collection[str]) -> Node:
    """Return a node that refers to others by their place in a slice."""

    def moved(ref: Ref) -> Ref:
        return Ref(place[ref.node], ref.item)

    if node.origin is not None and node.label in unfolded:
        return replace(node, func=lambda x: x, args=(moved(node.origin),), name="site", value=None, origin=None)
    args, kwargs = mapped(moved, Ref, (node.args, node.kwargs))
    return replace(node, args=args, kwargs=kwargs)


def reached(nodes: Sequence[Node]) -> list[int]:
    """Return for each node the nodes that depend on it, as the bits of a number."""
    below = [0] * len(nodes)
    for i in reversed(range(len(nodes))):
        for ref in nodes[i].refs:
            below[ref.node] |= below[i] | 1 << i
    return below


def random_like(tensor: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return random numbers of a tensor's shape, size and sign; a mask, or what is not floating, stays."""
    if not tensor.is_floating_point() or is_mask(tensor) or not tensor.numel():
        return tensor
    noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float64) * tensor.double().square().mean().sqrt()
    return noise.abs() if bool((tensor >= 0).all()) else noise
