"""Load a model source: checkpoint, GGUF file or callable."""

from __future__ import annotations

import copy
import inspect
import struct
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from ditto_core.errors import ModelError, first_line
from ditto_core.model import attention, states
from ditto_core.model.checkpoint import (
    is_gguf,
    load_tokenizer,
    locate,
    readable,
    refuse_adapter,
    refuse_missing,
    stored_dtype,
    weights_size,
)
from ditto_core.model.examples import examples_of
from ditto_core.model.export_failure import told
from ditto_core.model.forward import DECODED, TOKENS, can_generate, first_inputs, steps_decoder
from ditto_core.model.own_code import model_class, refuse_code_elsewhere, untrusted
from ditto_core.model.placing import placed
from ditto_core.model.staged_wrappers import later_examples
from ditto_core.model.tiny import tiny_decoder

if TYPE_CHECKING:
    from ditto_core.spec import ModelSource

LARGE = 1 << 30
"""Bytes of a half precision checkpoint from which its export does not wait for the float32 model, twice as large."""

__all__ = ["LoadedModel", "load_lean", "load_model", "tiny_decoder"]


@dataclass(frozen=True)
class LoadedModel:
    """A module ready to run and export. A ``decoder`` is stepped with a KV cache, others run on ``examples``.

    ``staged``: its first step takes more than later ones, as that of an encoder-decoder or of a decoder with images;
    ``later`` is such a model from its second step on.
    """

    module: nn.Module
    decoder: bool
    label: str
    examples: Mapping[str, torch.Tensor]
    location: Path | None = None
    trust_remote_code: bool = False
    staged: bool = False
    later: bool = False

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer beside the weights, or None when there is none."""
        return None if self.location is None else load_tokenizer(self.location, self.trust_remote_code)

    def cast(self, dtype: torch.dtype) -> LoadedModel:
        """Return a copy in another dtype, floating examples with it. Non-persistent buffers (rotary frequencies) keep
        theirs, as on loading."""
        return replace(self, module=placed(self.module, dtype, streams=False), examples=self.examples_in(dtype))

    def examples_in(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the examples, the floating ones in ``dtype``."""
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.examples.items()}

    def later_steps(self) -> LoadedModel:
        """Return a staged model as its later steps are: new tokens and what is carried are its inputs."""
        return replace(self, later=True, examples=later_examples(self.module, self.examples))


def load_model(source: ModelSource, dtype: torch.dtype = torch.float32, implementation: str = "eager") -> LoadedModel:
    """Load a source in ``dtype``, in eval mode and without gradients.

    Raises :class:`ModelError` when there is nothing to load. A GGUF source is dequantized by transformers.
    """
    attention.register()
    loaded = from_factory(source) if source.factory else from_location(source, locate(source), dtype)
    module = placed(loaded.module, dtype, streams=False)
    set_attention(module, implementation)
    set_experts(module)
    module, examples = freeze(module), loaded.examples
    staged = loaded.staged and steps_decoder(module, examples)
    if staged and DECODED not in examples:
        examples = first_inputs(module, examples)
    return replace(loaded, module=module, examples=examples, staged=staged)


def load_lean(source: ModelSource, implementation: str = "eager") -> LoadedModel:
    """Load a large checkpoint in half precision as it is stored, any other model in float32."""
    return load_as_stored(source, implementation) or load_model(source, implementation=implementation)


def load_as_stored(source: ModelSource, implementation: str) -> LoadedModel | None:
    """Load a large checkpoint in its own half precision, which is all that its export reads; None for others.

    What states of fixed size (see :mod:`~ditto_core.model.states`) and an encoder-decoder's are is measured in float32:
    None too. So for a model that rounds a number of its own to the dtype it is loaded in (Gemma's embedding scale).
    """
    location = None if source.factory else locate(source)
    large = location is not None and not is_gguf(location) and weights_size(location) > LARGE
    dtype = stored_dtype(location) if location and large else None
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    model = load_model(source, dtype, implementation)
    stored = persistent_buffers(model.module)
    rounded = any(b.dtype == dtype for name, b in model.module.named_buffers() if name not in stored)
    return None if rounded or states.has_fixed_states(model.module) or DECODED in model.examples else model


def from_factory(source: ModelSource) -> LoadedModel:
    """Call the factory; accept a decoder, or a module with example inputs. What lies on a GPU is copied to the CPU.

    Raises :class:`ModelError` for a factory that fails or makes something else.
    """
    assert source.factory is not None
    try:
        made = source.factory()
    except (Exception, SystemExit) as error:
        raise ModelError(f"factory {source.label!r} failed: {told(error)}") from error
    module, examples = made if isinstance(made, tuple) else (made, None)
    if not isinstance(module, nn.Module):
        raise ModelError(f"factory {source.label!r} returned {type(module).__name__}, expected a torch.nn.Module")
    module = on_host(module)
    if examples is None and is_decoder(module):
        return LoadedModel(module, True, source.label, {})
    if examples is None:
        examples = examples_of(f"factory {source.label!r}", module)
        return LoadedModel(module, False, source.label, examples, staged=True)
    examples = checked_examples(source.label, module, examples)
    sees = is_decoder(module) and "input_ids" in examples and not set(examples) <= set(TOKENS)
    return LoadedModel(module, False, source.label, examples, staged=sees)


def checked_examples(label: str, module: nn.Module, examples: Any) -> dict[str, torch.Tensor]:
    """Return a factory's example inputs on the CPU. Raises :class:`ModelError` when ``forward`` cannot take them."""
    if not isinstance(examples, Mapping) or not all(isinstance(value, torch.Tensor) for value in examples.values()):
        raise ModelError(
            f"factory {label!r} returned example inputs that are not named tensors, expected {{name: tensor}}"
        )
    forward = inspect.signature(module.forward)
    try:
        forward.bind(**examples)
    except TypeError as error:
        takes = f"{type(module).__name__}.forward({', '.join(forward.parameters)})"
        given = ", ".join(map(str, examples))
        raise ModelError(f"factory {label!r} returned example inputs {given}, not those of {takes}: {error}") from error
    return {name: tensor.cpu() for name, tensor in examples.items()}


def on_host(module: nn.Module) -> nn.Module:
    """Return the module where all of it is on the CPU, else a copy there: references and exports start from that."""
    there = any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))
    return copy.deepcopy(module).cpu() if there else module


def from_location(source: ModelSource, location: Path, dtype: torch.dtype = torch.float32, **extra: Any) -> LoadedModel:
    """Load from a directory, or a GGUF file, with ``from_pretrained``.

    Raises :class:`ModelError` for what cannot be loaded, or not as the whole of what is there.
    """
    import transformers

    refuse_adapter(source.location, location)
    refuse_code_elsewhere(source, location)
    trust = {"trust_remote_code": source.trust_remote_code}
    try:
        with silent_bars(), readable(location) as where:
            cls = model_class(source, transformers.AutoConfig.from_pretrained(**where, **trust))
            found: Any
            module, found = cls.from_pretrained(**where, **trust, **extra, dtype=dtype, output_loading_info=True)
    except Exception as error:  # readers of weights have exceptions of their own
        raise ModelError(f"model {source.location!r} could not be loaded: {reason(source, error)}") from error
    refuse_missing(source.location, found["missing_keys"])
    decoder = is_decoder(module)
    examples = {} if decoder else examples_of(f"model {source.label!r}", module)
    return LoadedModel(module, decoder, source.label, examples, location, source.trust_remote_code, not decoder)


def reason(source: ModelSource, error: Exception) -> str:
    """Return in one line why a model could not be loaded; transformers' own advice is about its own functions."""
    if "trust_remote_code" in str(error) and not source.trust_remote_code:
        return untrusted(source)
    if isinstance(error, UnpicklingError):  # its own advice is to run what the file says
        return "its weights are damaged or hold other objects than tensors, which are not loaded"
    damaged = isinstance(error, (SafetensorError, struct.error)) or raised_in("gguf", error)
    return "its weights are damaged: " * damaged + first_line(error)


def raised_in(package: str, error: Exception) -> bool:
    """Tell whether code of a package raised an error, or called what raised it."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] == package for frame in frames)


@contextmanager
def silent_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off the screen."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def dequantize(source: ModelSource, directory: Path) -> None:
    """Save a GGUF source as float32 safetensors with its tokenizer, which load a hundred times faster."""
    from transformers import GgufConfig

    origin = locate(source)
    model: Any = from_location(source, origin, quantization_config=GgufConfig(dequantize=True)).module
    with silent_bars():
        model.save_pretrained(directory)
    if (tokenizer := load_tokenizer(origin, source.trust_remote_code)) is not None:
        tokenizer.save_pretrained(directory)


def is_decoder(module: nn.Module) -> bool:
    """Tell whether a module is a transformers decoder whose tokens can be stepped with a carried cache."""
    config = getattr(module, "config", None)
    if config is None or not can_generate(module) or not hasattr(config, "get_text_config"):
        return False
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or not hasattr(text, "vocab_size"):
        return False
    if not set(required(module)) <= {"input_ids"}:  # BLIP's text needs an image at every step
        return False
    if states.has_fixed_states(module):
        return states.continues(module) and not states.loops(module)
    return hasattr(text, "num_attention_heads")


def required(module: nn.Module) -> list[str]:
    """Return the names of a forward's arguments that have no default."""
    takes = inspect.signature(module.forward).parameters.values()
    named = (p for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return [p.name for p in named if p.default is p.empty]


def set_attention(module: nn.Module, implementation: str) -> None:
    """Select the observed form of an attention implementation on a transformers model; others are left alone.

    Raises :class:`ModelError` for one that the model has not.
    """
    select: Any = getattr(module, "set_attn_implementation", None)
    if select is None:
        return
    try:
        select(attention.PREFIX + implementation)
    except ValueError as error:
        name = type(module).__name__
        raise ModelError(f"{name} has no attention implementation {implementation!r}, expected 'eager'") from error


def set_experts(module: nn.Module) -> None:
    """Compute mixtures of experts by batched products: the default, grouped products, has no ONNX function."""
    for part in module.modules():
        can: Any = getattr(part, "_can_set_experts_implementation", None)
        if can is not None and can():
            part.set_experts_implementation("batched_mm")  # type: ignore[operator]


def freeze(module: nn.Module) -> nn.Module:
    """Put a module in eval mode without gradients."""
    return module.eval().requires_grad_(False)


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict would hold, by name."""
    state = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in state}
