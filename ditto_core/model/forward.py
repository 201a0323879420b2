"""How a loaded model is called, step by step: its cache, the dtype of its inputs, the names of its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ditto_core.model.containers import tensors_in
from ditto_core.model.states import SAME, cache_argument, cross_cache, empty_cache

DECODED = "decoder_input_ids"
"""The input of an encoder-decoder that holds the decoder's token ids, int64 [batch, length]."""
TOKENS = ("input_ids", "attention_mask", "position_ids")
"""What a decoder's step takes; one that sees images takes more in its first step."""


class Forward:
    """A module and, for a ``decoder``, the cache of the sequence that it is stepping.

    ``staged``: the first step takes more than later ones do. Of an encoder-decoder it encodes and decodes, later ones
    decode, with the cache of both attentions; ``encoded`` [batch, source, hidden] is what the first returned, and later
    ones need no more than its shape. A decoder that sees images gets them in the first step.
    """

    def __init__(self, module: nn.Module, *, decoder: bool = False, staged: bool = False) -> None:
        self.module = module
        self.cache: Any = None
        self.encoded: torch.Tensor | None = None
        self._decoder, self._staged = decoder, staged

    def start(self) -> None:
        """Empty the cache."""
        self.encoded = None
        if self._staged and is_encoder_decoder(self.module):
            self.cache = cross_cache()
        elif self._staged or self._decoder:
            self.cache = empty_cache(self.module)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step and return the final outputs by name. A module that writes into its inputs writes into copies,
        and floating inputs get the dtype of its parameters."""
        if self._decoder:
            out = self.module(**inputs, use_cache=True, **{cache_argument(self.module): self.cache})
            return {"logits": out.logits}
        own = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
        given = {name: as_float(tensor, own).clone() for name, tensor in inputs.items()}
        if not self._staged:
            return named_outputs(self.module(**given), given)
        return self._decoded(given) if DECODED in given else self._continued(given)

    def _continued(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        out = self.module(**given, use_cache=True, **{cache_argument(self.module): self.cache})
        return {"logits": out.logits} if set(given) <= set(TOKENS) else named_outputs(out, given)

    def _decoded(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        from transformers.modeling_outputs import BaseModelOutput

        later = self.encoded is not None
        encoded = {"encoder_outputs": BaseModelOutput(last_hidden_state=self.encoded)} if later else {}
        out = self.module(**given, **encoded, use_cache=True, **{cache_argument(self.module): self.cache})
        if later:
            return {"logits": out.logits}
        self.encoded = out.encoder_last_hidden_state
        return named_outputs(out, given)


def is_encoder_decoder(module: nn.Module) -> bool:
    """Tell whether a transformers model encodes its input for a decoder of its own."""
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def can_generate(module: nn.Module) -> bool:
    """Tell whether a model is of a class of transformers that generates tokens."""
    can: Any = getattr(module, "can_generate", None)
    return can is not None and bool(can())


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions, int64 [batch, length], of tokens under a mask: real ones count, as in ``generate``."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def first_inputs(module: nn.Module, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a decoder's inputs with the mask and the positions that its later steps go on from, where it takes them.

    Qwen-VL has positions of its own, int64 [3, batch, length].
    """
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    if "position_ids" in given or "position_ids" not in inspect.signature(module.forward).parameters:
        return {**given, "attention_mask": mask}
    parts = (module, getattr(module, "model", None))
    place: Any = next((found for part in parts if (found := getattr(part, "get_rope_index", None))), None)
    if place is None:
        return {**given, "attention_mask": mask, "position_ids": positions_of(mask)}
    known = {**given, "attention_mask": mask}
    positions = place(**{name: known[name] for name in inspect.signature(place).parameters if name in known})[0]
    return {**known, "position_ids": positions}


def later_inputs(given: Mapping[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of the step after one that was ``given`` some: new ids [batch, length], the mask of what is
    attended to, and the positions where the model takes them."""
    mask = given.get("attention_mask")
    if DECODED in given:
        return {DECODED: ids} | ({} if mask is None else {"attention_mask": mask})
    assert mask is not None
    new = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": torch.cat([mask, new], 1)}
    if "position_ids" in given:
        past = given["position_ids"]
        last = past.amax((0, 2) if past.ndim == 3 else 1)  # of an image the largest of height and width
        inputs["position_ids"] = (last[:, None] + new.cumsum(1)).expand(*past.shape[:-1], -1).contiguous()
    return inputs


def steps_decoder(module: nn.Module, examples: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether a model computes the same tokens from what it carries as at once.

    What an encoder-decoder encoded is NaN then: it has to come from the cache.
    """
    if not can_generate(module) or not {DECODED, "input_ids"} & set(examples):
        return False
    try:
        with torch.no_grad():
            if DECODED in examples:
                pairs = [decoded_at_once(module, examples)]
            else:  # a token that follows is of the type of text, which is 0, or of what is generated, 1
                pairs = [continued_at_once(module, examples, kind) for kind in (0, 1)]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return any(bool((actual - expected).norm() <= SAME * expected.norm()) for actual, expected in pairs)


def decoded_at_once(module: nn.Module, examples: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last token's logits of an encoder-decoder: in a second step, and at once."""
    ids = examples[DECODED]
    whole, split = (Forward(module, staged=True) for _ in range(2))
    whole.start()
    expected = whole(examples)["logits"][:, -1:]
    split.start()
    split({**examples, DECODED: ids[:, :-1]})
    assert split.encoded is not None
    split.encoded = torch.full_like(split.encoded, torch.nan)
    return split(later_inputs(examples, ids[:, -1:]))["logits"], expected


def continued_at_once(
    module: nn.Module, examples: Mapping[str, torch.Tensor], kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a decoder's last token and of two that follow: in two steps with positions, and at once.

    ``kind`` is what is told of a token that follows, where anything but its position is.
    """
    ids = examples["input_ids"]
    first = first_inputs(module, examples)
    later = later_inputs(first, ids[:, -1:].expand(-1, 2).contiguous())
    whole, split = (Forward(module, staged=True) for _ in range(2))
    whole.start()
    expected = whole({**{name: longer(tensor, ids, kind) for name, tensor in examples.items()}, **joined(first, later)})
    split.start()
    found = torch.cat([split(first)["logits"][:, -1:], split(later)["logits"]], 1)
    return found, torch.cat([module(**examples).logits[:, -1:], expected["logits"][:, -2:]], 1)


def joined(first: Mapping[str, torch.Tensor], later: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the token inputs of two steps as those of one."""
    return {n: t if n == "attention_mask" else torch.cat([first[n], t], -1) for n, t in later.items()}


def longer(tensor: torch.Tensor, ids: torch.Tensor, kind: int) -> torch.Tensor:
    """Return what is told of each token with ``kind`` for two more; other tensors as they are."""
    of_tokens = tensor.shape == ids.shape and not tensor.is_floating_point()
    return torch.cat([tensor, torch.full_like(tensor[:, :2], kind)], 1) if of_tokens else tensor


def as_float(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a floating tensor; leave others."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def named_outputs(output: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name the tensors of a module's output: a single one is ``output``, others by key, or ``output`` and index.

    One that has the name of an input (``sample`` of a diffusion model) is ``sample:out``: a graph has a name once.
    """
    named = {f"output{key}" if not key or key[0].isdigit() else key: tensor for key, tensor in tensors_in(output)}
    return {f"{name}:out" if name in inputs else name: tensor for name, tensor in named.items()}
