"""What ``torch.export`` traces: a module with flat inputs, and every tensor at a module boundary as an extra output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from ditto_core.model import checkpoint, states
from ditto_core.model.buffers import Buffers
from ditto_core.model.code_lines import running_line
from ditto_core.model.forward import DECODED, TOKENS, Forward, named_outputs
from ditto_core.model.held import Holding, inputs_read
from ditto_core.model.recorder import Recorder
from ditto_core.model.traced import Clamped, RealViews, Seen, Traced, name_taps, own_tensors, version

BATCH, LENGTH, PAST, TOTAL, SOURCE = "batch", "length", "past", "total", "source"


class Wrapper(nn.Module):
    """Flat inputs and outputs around a module, and every tensor that passes a module boundary as an extra output.

    It has to run once before it is traced: only then is it known which tensors the model writes into later on. Of those
    the trace takes a copy at the site, for an exported graph knows a tensor's last content only.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.traced = Traced()
        self.operators = False
        """Whether the operators of the module's own code are sites too."""
        self.held: dict[str, torch.Tensor] = {}
        """The inputs that the trace holds at the example's values."""

    def signature(self) -> tuple[tuple[Any, ...], Any, list[str]]:
        """Return example arguments, their dynamic shapes, and the names of the flat inputs."""
        raise NotImplementedError

    @property
    def dimensions(self) -> dict[str, dict[int, str]]:
        """The names of dynamic dimensions, by input and index."""
        raise NotImplementedError

    def hold(self) -> bool:
        """Hold the inputs that the model's code reads as Python numbers; tell whether there are any more of them."""
        return False

    def run_tapped(
        self, run: Callable[[Sequence[torch.Tensor]], Mapping[str, torch.Tensor]], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run the module under a recorder; return its outputs by name, then every tensor that is none of them."""
        given = [tensor.clone() for tensor in inputs.values()] if self.traced.spoils else list(inputs.values())
        before = [version(tensor) for tensor in given]
        seen: list[Seen] = []

        def see(site: str, tensor: torch.Tensor, module: nn.Module) -> None:
            value = tensor.clone() if site in self.traced.rewritten else tensor
            line = running_line(self.run_tapped.__code__)
            seen.append(Seen(site, tensor, version(tensor), value, module, line))

        with Recorder(self.module, see, operators=self.operators).recording(), RealViews(), Clamped():
            outputs = run(given)
        self.traced.rewritten = frozenset(s.site for s in seen if version(s.tensor) != s.version)
        self.traced.spoils = [version(tensor) for tensor in given] != before
        handed_in = {(id(tensor), number) for tensor, number in zip(given, before, strict=True)}
        handed_in |= {(id(tensor), version(tensor)) for tensor in self.traced.stand_ins}
        finals = own_tensors(outputs, {id(tensor) for tensor in given})
        taps, extra = name_taps(seen, outputs, handed_in, {*outputs, *inputs})
        self.traced.outputs, self.traced.taps = tuple(outputs), taps
        return (*finals, *extra)


class DecoderWrapper(Wrapper):
    """``forward(input_ids, attention_mask, position_ids, past)`` around a transformers decoder; ``past`` is flat."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._states = states.layout(module)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [batch, length, vocab], what is carried to the next step, and the taps."""

        def run(given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
            carried = dict(zip((state.name for state in self._states), given[len(TOKENS) :], strict=True))
            forward = Forward(self.module, decoder=True)
            forward.cache = states.filled(states.empty_cache(self.module), carried)
            outputs = forward(dict(zip(TOKENS, given, strict=False)))
            return outputs | {states.PRESENT + name: tensor for name, tensor in states.items(forward.cache)}

        tokens = zip(TOKENS, (input_ids, attention_mask, position_ids), strict=True)
        return self.run_tapped(run, dict(tokens) | dict(zip(self._past, past, strict=True)))

    def signature(self) -> tuple[tuple[Any, ...], Any, list[str]]:
        """Example sizes of at least 2 everywhere, so that no dimension is taken for a constant."""
        batch, length, past = 2, states.example_tokens(self.module, self._states), 5
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab_size(self.module), (batch, length), generator=generator)
        mask = torch.ones(batch, past + length, dtype=torch.int64)
        positions = torch.arange(past, past + length).expand(batch, length).contiguous()
        dtype = next(self.module.parameters()).dtype
        caches = []
        for state in self._states:
            first, *others = state.sizes
            shape = (batch, first, past, *others[1:]) if state.grows else (batch, *state.sizes)
            cast = torch.float32 if state.dtype == torch.float32 else dtype
            caches.append(torch.randn(shape, generator=generator).to(cast))
        token = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        dynamic = dict.fromkeys(TOKENS, token) | {
            "past": [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC} if state.grows else {0: Dim.DYNAMIC} for state in self._states]
        }
        return (ids, mask, positions, caches), dynamic, [*TOKENS, *self._past]

    @property
    def dimensions(self) -> dict[str, dict[int, str]]:
        """Tokens have a length; the mask and the new cache span what is past as well."""
        token = {0: BATCH, 1: LENGTH}
        tokens = {"input_ids": token, "attention_mask": {0: BATCH, 1: TOTAL}, "position_ids": token}
        past = zip(self._past, self._states, strict=True)
        return tokens | {name: {0: BATCH, 2: PAST} if state.grows else {0: BATCH} for name, state in past}

    @property
    def _past(self) -> list[str]:
        return [f"past_key_values.{state.name}" for state in self._states]


class ModuleWrapper(Wrapper):
    """Any module: forward's named inputs in, its output tensors out by name.

    ``named`` are dimensions of inputs that have to be dynamic, by input, index and name.
    """

    def __init__(
        self, module: nn.Module, examples: Mapping[str, torch.Tensor], named: Sequence[tuple[str, int, str]] = ()
    ) -> None:
        super().__init__(module)
        self.examples = dict(examples)
        self._named = named
        self.doubles = True
        """Whether an example of one row may be traced as two."""
        self._loops = states.has_fixed_states(module) and states.loops(module)
        self.doubled = False
        """Whether the last signature has such an example."""

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the outputs in order, then the taps."""

        def run(given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
            named = dict(zip(self.examples, given, strict=True)) | self.held
            with Holding(self.held) if self.held else nullcontext():
                return self.call(named)

        return self.run_tapped(run, dict(zip(self.examples, inputs, strict=True)))

    def call(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the module on its inputs by name."""
        return named_outputs(self.module(**named), named)

    def hold(self) -> bool:
        """Hold the inputs that the model's code reads as Python numbers; tell whether there are any more of them.

        Never the tokens, which the next step has others of: they are read to be checked.
        """
        with torch.no_grad():
            read = inputs_read(self.call, self.examples, but=(*TOKENS, DECODED))
        more = read.keys() > self.held.keys()
        self.held = read
        return more

    def signature(self) -> tuple[tuple[Any, ...], Any, list[str]]:
        """The first dimension is the batch; also dynamic are that of tokens, and what was named."""
        examples = self._two_rows()
        dynamic = [{index: self._kind(size) for index, size in self.dimensions[name].items()} for name in examples]
        return (list(examples.values()),), {"inputs": dynamic}, list(examples)

    def _kind(self, dimension: str) -> Any:
        return None if self._loops and dimension == LENGTH else Dim.AUTO

    @property
    def dimensions(self) -> dict[str, dict[int, str]]:
        """The names of the dimensions that may have other sizes than in the example, by input and index."""
        names: dict[str, dict[int, str]] = {}
        for name, tensor in self.examples.items():
            names[name] = {0: BATCH} if tensor.ndim else {}
            if (tensor.ndim, tensor.is_floating_point()) in ((2, False), (3, True)):
                names[name][1] = LENGTH
            if name == "position_ids":
                names[name] = positions_axes(tensor)
            if name in self.held:
                names[name] = {}
        for name, index, dimension in self._named:
            names[name][index] = dimension
        return names

    def _two_rows(self) -> dict[str, torch.Tensor]:
        """Return the examples, of one row as two equal ones: the exporter takes a size of 1 for a constant."""
        self.doubled = False
        if not self.doubles or not any(tensor.ndim and tensor.shape[0] == 1 for tensor in self.examples.values()):
            return self.examples
        doubled = {
            name: torch.cat([tensor, tensor]) if tensor.ndim and tensor.shape[0] == 1 else tensor
            for name, tensor in self.examples.items()
        }
        try:
            with Buffers(self.module).kept():
                self(list(doubled.values()))
        except Exception:  # noqa: BLE001 - a module may raise anything where its inputs have no rows in common
            return self.examples
        self.doubled = True
        return doubled


def positions_axes(tensor: torch.Tensor) -> dict[int, str]:
    """Return the dimensions of tokens or their positions: [batch, length], or [axis, batch, length]."""
    return {tensor.ndim - 2: BATCH, tensor.ndim - 1: LENGTH}


def vocab_size(module: nn.Module) -> int:
    """Return the vocabulary's size, or 0 for a model without one."""
    return checkpoint.vocab_size(getattr(module, "config", None))
