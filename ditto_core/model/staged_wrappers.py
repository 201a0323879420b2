"""What ``torch.export`` traces of a staged model: its first step and its later ones are graphs of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from ditto_core.model import states
from ditto_core.model.forward import DECODED, Forward, is_encoder_decoder, later_inputs
from ditto_core.model.wrappers import BATCH, PAST, SOURCE, TOTAL, ModuleWrapper, positions_axes


class FirstWrapper(ModuleWrapper):
    """The first step of a staged model: also returns what its later steps are computed from."""

    def call(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the step; return the outputs, then the states."""
        forward = Forward(self.module, staged=True)
        forward.start()
        outputs = forward(named)
        return outputs | {states.kept(name): tensor for name, tensor in states.items(forward.cache)}


class LaterWrapper(ModuleWrapper):
    """A later step of a staged model: new tokens and states in, logits and the states that change out."""

    def signature(self) -> tuple[tuple[Any, ...], Any, list[str]]:
        """All sizes are known to be dynamic."""
        dynamic = [dict.fromkeys(self.dimensions[name], Dim.DYNAMIC) for name in self.examples]
        return (list(self.examples.values()),), {"inputs": dynamic}, list(self.examples)

    def call(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Decode. The shape of what was encoded is that of the keys made from it, its values are not needed."""
        carried = {states.state_in(name): tensor for name, tensor in named.items() if states.state_in(name)}
        forward = Forward(self.module, staged=True)
        forward.start()
        states.filled(forward.cache, carried)
        if is_encoder_decoder(self.module):
            key = next(tensor for name, tensor in carried.items() if name.endswith(states.CROSS[0]))
            config: Any = self.module.config
            forward.encoded = key.new_zeros(key.shape[0], key.shape[2], config.hidden_size)
            self.traced.stand_ins = (forward.encoded,)
        outputs = forward({name: tensor for name, tensor in named.items() if not states.state_in(name)})
        changed = {name: tensor for name, tensor in states.items(forward.cache) if not states.is_cross(name)}
        return outputs | {states.kept(name): tensor for name, tensor in changed.items()}

    @property
    def dimensions(self) -> dict[str, dict[int, str]]:
        """New tokens have a length, states of the decoder that grow a past, those of the encoder the length of the
        source."""
        return {name: self._dimensions_of(name, tensor) for name, tensor in self.examples.items()}

    def _dimensions_of(self, name: str, tensor: torch.Tensor) -> dict[int, str]:
        if state := states.state_in(name):
            grown = {2: PAST} if states.grows(state) else {}
            return {0: BATCH, 2: SOURCE} if states.is_cross(state) else {0: BATCH, **grown}
        if name == "attention_mask":
            return {0: BATCH, 1: SOURCE if DECODED in self.examples else TOTAL}
        return positions_axes(tensor)


def later_examples(module: nn.Module, examples: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return example inputs of a later step of a staged model, made by a first step on ``examples``; of two rows where
    they have one, for the exporter takes a size of 1 for a constant."""
    forward = Forward(module, staged=True)
    forward.start()
    with torch.no_grad():
        forward(examples)
    ids = examples[DECODED if DECODED in examples else "input_ids"]
    new = ids[:, 1:4].clone()  # a view is traced as one
    inputs = later_inputs(examples, new)
    inputs |= {states.taken(name): tensor for name, tensor in states.items(forward.cache)}
    if ids.shape[0] > 1:
        return inputs
    return {name: torch.cat([t, t], 1 if name == "position_ids" and t.ndim == 3 else 0) for name, t in inputs.items()}
