"""Example inputs of a transformers model that is not a decoder, made from what its class and configuration say."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ditto_core.errors import ModelError
from ditto_core.model.checkpoint import vocab_size

ROWS, LENGTH, DECODED = 2, 7, 4
SECONDS = 1600
"""Samples of a waveform where the configuration does not say how many make a frame."""
FIRST_ID = 3
"""Ids below are special in most vocabularies."""


def examples_of(label: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return named inputs that the module can be run on.

    Raises :class:`ModelError`, saying what to give, when the configuration does not tell what they are.
    """
    main = getattr(module, "main_input_name", "")
    give = f"give a callable that returns (module, {{{main or 'name'!r}: tensor}})"
    if main not in MAKERS or getattr(module, "config", None) is None:
        known = f"its main input is {main!r}, known are {', '.join(MAKERS)}" if main else "it is no transformers model"
        raise ModelError(f"{label} returned no example inputs, and none can be made: {known}; {give}")
    try:
        inputs = make(module, main)
    except AttributeError as error:
        raise ModelError(f"{label} has a configuration that lacks {error.name!r} for {main}; {give}") from error
    try:
        with torch.no_grad():
            module.eval()(**{name: tensor.clone() for name, tensor in inputs.items()})
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        made = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
        raise ModelError(f"{label} cannot be run on {made} made from its configuration ({first}); {give}") from error
    return inputs


def token_inputs() -> dict[str, torch.Tensor]:
    """Return a prefill of two rows of five tokens."""
    ids = torch.arange(1, 11).reshape(2, 5)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(5).expand(2, 5).contiguous(),
    }


def make(module: nn.Module, main: str) -> dict[str, torch.Tensor]:
    """Make the main input, and what goes with it: a mask, an image beside text, the ids of a decoder."""
    config: Any = module.config
    takes = inspect.signature(module.forward).parameters
    generator = torch.Generator().manual_seed(0)
    inputs = {main: MAKERS[main](config, generator)}
    if main == "input_ids" and "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones_like(inputs[main])
        inputs["attention_mask"][1, LENGTH - 2 :] = 0
    if main == "input_ids" and "pixel_values" in takes and hasattr(config, "vision_config"):
        inputs["pixel_values"] = image(config.vision_config, generator)
    if main == "pixel_values" and "input_ids" in takes and hasattr(config, "text_config"):
        inputs["input_ids"] = ids(config, generator)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = ids(config, generator, DECODED)
    return inputs


def ids(config: Any, generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    """Token ids, int64 [row, length]."""
    size = vocab_size(config) or FIRST_ID + 1
    return torch.randint(min(FIRST_ID, size - 1), size, (ROWS, length), generator=generator)


def image(config: Any, generator: torch.Generator) -> torch.Tensor:
    """Images [row, channel, height, width] of the size that the configuration says, else of 64 x 64; of a model of
    videos [row, frame, channel, height, width]."""
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or 64
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = [config.num_frames] if hasattr(config, "tubelet_size") else []
    channels = getattr(config, "num_channels", None) or 3
    return torch.randn(ROWS, *frames, channels, height, width, generator=generator)


def waveform(config: Any, generator: torch.Generator) -> torch.Tensor:
    """Samples [row, time] of sixteen frames; of a codec [row, channel, time]; or a spectrogram [row, time, mel]."""
    strides = getattr(config, "conv_stride", None)
    if hasattr(config, "codebook_size") and not strides:
        return torch.randn(ROWS, getattr(config, "audio_channels", 1), SECONDS, generator=generator)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return torch.randn(ROWS, config.max_length, config.num_mel_bins, generator=generator)
    return torch.randn(ROWS, 16 * math.prod(strides) if strides else SECONDS, generator=generator)


def features(config: Any, generator: torch.Generator) -> torch.Tensor:
    """A spectrogram [row, mel, time] of the length that Whisper needs, else [row, time, feature]."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return torch.randn(ROWS, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    sizes = (getattr(config, name, None) for name in ("input_feat_per_channel", "feature_projection_input_dim"))
    return torch.randn(ROWS, 32, next(filter(None, sizes), 80), generator=generator)


def series(config: Any, generator: torch.Generator) -> torch.Tensor:
    """Time series [row, time, channel] of the length that the configuration says."""
    return torch.randn(ROWS, config.context_length, config.num_input_channels, generator=generator)


MAKERS: Mapping[str, Callable[..., torch.Tensor]] = {
    "input_ids": ids,
    "pixel_values": image,
    "input_values": waveform,
    "input_features": features,
    "past_values": series,
}
