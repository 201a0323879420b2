"""How a loaded model is called, step by step: its cache, the dtype of its inputs, the names of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ditto_core.model.recorder import tensors_in
from ditto_core.model.states import SAME, cache_argument, cross_cache, empty_cache

DECODED = "decoder_input_ids"
"""The input of an encoder-decoder that holds the decoder's token ids, int64 [batch, length]."""


class Forward:
    """A module and, for a ``decoder``, the cache of the sequence that it is stepping.

    ``seq2seq``: an encoder-decoder; the first step encodes and decodes, later ones decode, with the cache of both
    attentions. ``encoded`` [batch, source, hidden] is what the first returned; later ones need no more than its shape.
    """

    def __init__(self, module: nn.Module, *, decoder: bool = False, seq2seq: bool = False) -> None:
        self.module = module
        self.cache: Any = None
        self.encoded: torch.Tensor | None = None
        self._decoder, self._seq2seq = decoder, seq2seq

    def start(self) -> None:
        """Empty the cache."""
        self.encoded = None
        if self._seq2seq:
            self.cache = cross_cache()
        elif self._decoder:
            self.cache = empty_cache(self.module)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step and return the final outputs by name. A module that writes into its inputs writes into copies,
        and floating inputs get the dtype of its parameters."""
        if self._decoder:
            out = self.module(**inputs, use_cache=True, **{cache_argument(self.module): self.cache})
            return {"logits": out.logits}
        own = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
        given = {name: as_float(tensor, own).clone() for name, tensor in inputs.items()}
        return self._decoded(given) if self._seq2seq else named_outputs(self.module(**given), given)

    def _decoded(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        from transformers.modeling_outputs import BaseModelOutput

        later = self.encoded is not None
        encoded = {"encoder_outputs": BaseModelOutput(last_hidden_state=self.encoded)} if later else {}
        out = self.module(**given, **encoded, use_cache=True, **{cache_argument(self.module): self.cache})
        if later:
            return {"logits": out.logits}
        self.encoded = out.encoder_last_hidden_state
        return named_outputs(out, given)


def later_inputs(examples: Mapping[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of a later step of an encoder-decoder: new ids [batch, length], and what hides padding of the
    source."""
    masks = {name: examples[name] for name in ("attention_mask",) if name in examples}
    return {DECODED: ids, **masks}


def steps_decoder(module: nn.Module, examples: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether the decoder of a transformers encoder-decoder computes the same token from what it carries as at
    once. What was encoded is NaN then: it has to come from the cache."""
    can_generate: Any = getattr(module, "can_generate", None)
    if DECODED not in examples or can_generate is None or not can_generate():
        return False
    ids = examples[DECODED]
    whole, split = (Forward(module, seq2seq=True) for _ in range(2))
    try:
        with torch.no_grad():
            whole.start()
            expected = whole(examples)["logits"][:, -1:]
            split.start()
            split({**examples, DECODED: ids[:, :-1]})
            assert split.encoded is not None
            split.encoded = torch.full_like(split.encoded, torch.nan)
            actual = split(later_inputs(examples, ids[:, -1:]))["logits"]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return bool((actual - expected).norm() <= SAME * expected.norm())


def as_float(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a floating tensor; leave others."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def named_outputs(output: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name the tensors of a module's output: a single one is ``output``, others by key, or ``output`` and index.

    One that has the name of an input (``sample`` of a diffusion model) is ``sample:out``: a graph has a name once.
    """
    named = {f"output{key}" if not key or key[0].isdigit() else key: tensor for key, tensor in tensors_in(output)}
    return {f"{name}:out" if name in inputs else name: tensor for name, tensor in named.items()}
