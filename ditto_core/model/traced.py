"""What is seen of a module while it is traced: tensors at sites, which become taps and extra outputs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ditto_core.sites import Tap, is_operator, rename


class Traced:
    """What a wrapper saw while it ran: ``torch.export`` undoes changes to a module's own attributes only.

    ``rewritten`` holds the sites whose tensor the model writes into later on (``ReLU(inplace=True)``, ``h += x``);
    ``spoils`` tells whether it writes into its inputs. ``stand_ins`` are tensors that the wrapper made in the place of
    ones that it does not get: they are no sites.
    """

    def __init__(self) -> None:
        self.outputs: tuple[str, ...] = ()
        self.taps: dict[str, Tap] = {}
        self.rewritten: frozenset[str] = frozenset()
        self.spoils = True
        self.stand_ins: tuple[torch.Tensor, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of everything the wrapper returned, in order."""
        return [*self.outputs, *(value for value in self.taps if value not in self.outputs)]


@dataclass(frozen=True)
class Seen:
    """A tensor at a site. ``version`` counts the writes into it up to then, ``value`` is what it held then, ``line`` is
    the model's own that was running."""

    site: str
    tensor: torch.Tensor
    version: int
    value: torch.Tensor
    module: nn.Module
    line: str

    @property
    def identity(self) -> tuple[int, int]:
        """The same for two sites that are the very same tensor with the same content."""
        return id(self.tensor), self.version


class RealViews(TorchFunctionMode):
    """Gives complex tensors new dimensions by way of their real and imaginary parts.

    The exporter multiplies complex numbers (rotary embeddings of Llama 4 and DeepSeek V2) but cannot unsqueeze them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; what adds dimensions before the last adds them to pairs of real numbers."""
        moves = func in (torch.Tensor.__getitem__, torch.Tensor.unsqueeze)
        if torch.compiler.is_dynamo_compiling() or not moves or not args[0].is_complex():
            return func(*args, **(kwargs or {}))
        return torch.view_as_complex(func(torch.view_as_real(args[0]), *args[1:], **(kwargs or {})))


OVERFLOWS = {torch.isfinite: False, torch.Tensor.isfinite: False, torch.isinf: True, torch.Tensor.isinf: True}
"""What asks whether numbers overflow, and what it answers of those that do."""
WHOLE = frozenset((torch.all, torch.Tensor.all, torch.any, torch.Tensor.any))


class Clamped(TorchFunctionMode):
    """Takes the branch in which transformers clamps what overflows (BART and Marian in float16).

    It depends on values, so no graph has both. Of finite numbers the clamp changes those within 1000 of the largest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; a question of transformers' code whether a tensor overflows is answered with yes."""
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        known = self._asked.get(id(args[0])) if args else None
        asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if known and func is torch.Tensor.__bool__ and asks == "transformers":
            return known[1]
        found = func(*args, **(kwargs or {}))
        if func in OVERFLOWS:
            self._asked[id(found)] = found, OVERFLOWS[func]
        elif known and func in WHOLE:
            self._asked[id(found)] = found, known[1]
        return found


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written into, through any view of it; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def own_tensors(outputs: Mapping[str, torch.Tensor], taken: set[int]) -> Iterator[torch.Tensor]:
    """Yield each output as a tensor of its own: one that is an input, or another output as well, as a copy."""
    for tensor in outputs.values():
        yield tensor.clone() if id(tensor) in taken else tensor
        taken.add(id(tensor))


def name_taps(
    seen: Sequence[Seen], outputs: Mapping[str, torch.Tensor], inputs: set[tuple[int, int]], taken: Collection[str]
) -> tuple[dict[str, Tap], list[torch.Tensor]]:
    """Return the taps by value, and the tensors of those that are no output. ``taken`` names are no value's.

    Sites that are the very same tensor are one tap. Inputs, and what is not floating, are none.
    """
    values: dict[tuple[int, int], str] = {}
    for name, tensor in outputs.items():
        values.setdefault((id(tensor), version(tensor)), name)
    taps: dict[str, Tap] = {}
    extra: list[torch.Tensor] = []
    for found in seen:
        if found.identity in inputs or not found.tensor.is_floating_point():
            continue
        if found.identity not in values:
            values[found.identity] = f"{found.site}:value" if found.site in taken else found.site
            extra.append(found.value)
        value = values[found.identity]
        if value in taps:
            taps[value] = also_called(taps[value], found.site)
        else:
            dtype = str(found.tensor.dtype).removeprefix("torch.")
            taps[value] = Tap(found.site, value, module_class=class_name(found.module), dtype=dtype, source=found.line)
    return taps, extra


def upstream_first(nodes: Mapping[str, torch.fx.Node]) -> Iterator[str]:
    """Yield values, given with their nodes in the order in which they were seen, none before one that it is made from.

    A module returns its attention's probabilities after another one took what was made of them.
    """
    named: dict[torch.fx.Node, list[str]] = {}
    for value, node in nodes.items():
        named.setdefault(node, []).append(value)
    done: set[torch.fx.Node] = set()
    for last in named:
        waiting = [last]
        while waiting:
            node = waiting[-1]
            above = [] if node in done else [other for other in node.all_input_nodes if other not in done]
            if above:
                waiting += above
                continue
            waiting.pop()
            if node not in done:
                done.add(node)
                yield from named.get(node, ())


def also_called(tap: Tap, site: str) -> Tap:
    """Return a tap with a further site. A module's input or output is called so rather than by the operator's line."""
    if is_operator(tap.site) and not is_operator(site):
        return rename(replace(tap, aliases=(*tap.aliases, site)), site)
    return replace(tap, aliases=(*tap.aliases, site))


def class_name(module: nn.Module) -> str:
    """Return ``package.module.Class``."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
