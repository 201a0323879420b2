"""What both sides are fed: tokens of prompts, and tensors that the engine's dtype holds exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.errors import UsageError
from ditto_core.model.checkpoint import vocab_size
from ditto_core.model.forward import DECODED, TOKENS, first_inputs
from ditto_core.stepping.choosing import allowed_tokens, first_ids
from ditto_core.stepping.lockstep import rows_of
from ditto_core.stepping.prompts import Prompt, SourceBatch, TokenBatch, encode
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from ditto_core.model.exported import Export
    from ditto_core.pair.sessions import Sessions

TOWERS = ("vision_config", "audio_config")
"""Parts of a configuration whose modules text tokens do not reach."""
MORE = "a callable that returns (module, {name: tensor}) gives it more than tokens; call generate({name: tensor}) then"


class Inputs:
    """The inputs of a pair's model: prompts as its tokens, and tensors by name that the engine's dtype holds."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @property
    def config(self) -> Any:
        """The model's own configuration, None where it has none."""
        return getattr(self._sessions.model.module, "config", None)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, None where it has none."""
        return self._sessions.model.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model takes, 0 for a model without a vocabulary."""
        return vocab_size(self.config)

    def values(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return inputs by name as tensors that the engine's dtype holds. Raises :class:`UsageError` for a name."""
        spec = self._sessions.spec
        values = by_name(inputs, self._sessions.model.examples, spec.model.label)
        return rounded({name: torch.as_tensor(value) for name, value in values.items()}, spec.dtype)

    def batch(
        self, prompts: Prompt | Sequence[Prompt] | Mapping[str, torch.Tensor], steps: int
    ) -> TokenBatch | SourceBatch:
        """Return what the generation of so many tokens starts from."""
        model, label = self._sessions.model, self._sessions.spec.model.label
        module: Any = model.module
        if not model.staged:
            if isinstance(prompts, Mapping):
                raise UsageError(f"{label} got inputs by name, expected text or token ids; {MORE}")
            return self.encode(prompts)
        texts: tuple[str, ...] = ()
        if isinstance(prompts, Mapping):
            given = self.values(prompts)
        elif DECODED not in model.examples:
            raise UsageError(f"{label} takes {', '.join(model.examples)}: call generate({{name: tensor}})")
        elif getattr(module, "main_input_name", "") == "input_ids":
            tokens = self.encode(prompts, left=False)
            given, texts = {"input_ids": tokens.input_ids, "attention_mask": tokens.mask}, tokens.texts
        else:
            raise UsageError(f"{label} encodes {module.main_input_name}: call generate({{name: tensor}})")
        config: Any = module.generation_config
        name = DECODED
        if DECODED not in model.examples:
            name, given = "input_ids", first_inputs(module, given)
        elif DECODED not in given:
            given[DECODED] = first_ids(module.config, config, rows_of(given))
        start = given.pop(name)
        return SourceBatch(given, start, texts, allowed_tokens(config, start.shape[1], steps), name)

    def encode(self, prompts: Prompt | Sequence[Prompt], *, left: bool = True) -> TokenBatch:
        """Turn prompts into a batch of this model's tokens, padded on the left or the right."""
        pad = int(getattr(self.config, "pad_token_id", None) or 0)
        return encode(prompts, tokenizer=self.tokenizer, vocab_size=self.vocab_size, pad=pad, left=left)

    def check_profile(self, batch: TokenBatch, steps: int) -> None:
        """Raise :class:`UsageError` for a generation beyond the shapes that the engine is built for."""
        profile, length = self._sessions.spec.profile, batch.input_ids.shape[1]
        profile.check(batch.rows, length, 0)
        if steps > 1:
            profile.check(batch.rows, 1, length + steps - 2)


def parts_not_run(config: Any, given: Mapping[str, torch.Tensor]) -> list[str]:
    """Return a note for each part of a model that does not run where all it is ``given`` are tokens."""
    if not set(given) <= {*TOKENS, DECODED}:
        return []
    towers = [name.removesuffix("_config") for name in TOWERS if getattr(config, name, None) is not None]
    return [f"text tokens do not reach the {name} part of this model: it was not run; {MORE}" for name in towers]


def by_name(inputs: Any, known: Collection[str], label: str) -> Mapping[str, Any]:
    """Return the inputs of a model. Raises :class:`UsageError` unless they are given by names that are ``known``."""
    if not isinstance(inputs, Mapping):
        shown = ", ".join(f"{name!r}: tensor" for name in known)
        raise UsageError(f"the inputs of {label} are a {type(inputs).__name__}, expected them by name: {{{shown}}}")
    for name in inputs:
        if name not in known:
            raise UsageError(f"{label} has no input {name!r}, expected {', '.join(known)}")
    return inputs


def rounded(inputs: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Round floating inputs to the engine's dtype, so that both sides compute from the same numbers.

    The lowest number of the inputs' dtype, as additive masks have it, becomes the engine's lowest. Raises
    :class:`UsageError` for any other finite number that the engine's dtype cannot hold.
    """
    kind = getattr(torch, dtype)
    return {
        name: fitted(name, tensor, kind) if tensor.is_floating_point() and kind.is_floating_point else tensor
        for name, tensor in inputs.items()
    }


def fitted(name: str, tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Round one input; see :func:`rounded`."""
    cast = tensor.to(kind)
    lost = cast.isinf() & tensor.isfinite()
    if lost.any():
        beyond = tensor[lost & (tensor != torch.finfo(tensor.dtype).min)]
        if beyond.numel():
            value, limit = float(beyond[beyond.abs().argmax()]), torch.finfo(kind).max
            raise UsageError(
                f"input {name!r} holds {value:.4g}, beyond the {limit:.4g} of the engine's {str(kind)[6:]}"
            )
        cast = cast.masked_fill(lost, torch.finfo(kind).min)
    return cast


def digests(inputs: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digests of inputs by name."""
    return {name: fingerprint(tensor.tolist()) for name, tensor in inputs.items()}


def check_padding(export: Export, batch: TokenBatch) -> None:
    """Raise :class:`UsageError` for prompts of several lengths where padding would enter a state of fixed size."""
    fixed = [n for n in export.inputs if n.startswith("past_key_values.") and not n.endswith((".key", ".value"))]
    if fixed and batch.padded:
        name = fixed[0].removeprefix("past_key_values.")
        raise UsageError(f"padding would enter the state {name} that this model carries: give prompts of one length")
