"""What both sides are fed: inputs that the engine's dtype holds exactly, and what may not be fed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.errors import UsageError
from ditto_core.model.forward import DECODED, TOKENS
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from ditto_core.model.exported import Export
    from ditto_core.stepping.prompts import TokenBatch

TOWERS = ("vision_config", "audio_config")
"""Parts of a configuration whose modules text tokens do not reach."""
MORE = "a callable that returns (module, {name: tensor}) gives it more than tokens; call generate({name: tensor}) then"


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
