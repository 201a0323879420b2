"""The inputs on which both sides run to be aligned, in several sizes, so that each dimension can be identified.

Batches and lengths are prime and differ between the probes: no other dimension changes as they do. Lengths exceed the
model's attention window where it is small enough to be tried. Nothing is padded: a file that cannot pad is aligned all
the same, and the held-out probe tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.model.wrappers import vocab_size

if TYPE_CHECKING:
    from ditto_core.align.file import Port
    from ditto_core.model.loading import LoadedModel

Inputs = Mapping[str, torch.Tensor]

BATCHES = (2, 3)
OWN = (0, 0)
"""The examples' own sizes, twice."""
LENGTHS = (11, 17)
HELD_OUT = 13
PRIMES = (17, 23, 29, 37, 53, 67, 101, 131, 257, 521)
LONGEST = 521
SEED = 5
PADDING = 4
IMAGE = 32
"""Pixels a side, of models that take any."""


@dataclass(frozen=True)
class Probe:
    """Named inputs, as the model's forward takes them; ``batch`` rows of ``length`` tokens (0: it takes no tokens)."""

    inputs: Inputs
    batch: int
    length: int


def probes(model: LoadedModel, batches: tuple[int, ...] = BATCHES, padding: int = 0) -> list[Probe]:
    """Return the probes that a model and a file are aligned on; ``batches`` are those that the file takes, 0 for the
    examples' own."""
    lengths = (LENGTHS[0], beyond_window(model))
    sizes = enumerate(zip(batches, lengths, strict=True))
    return [probe(model, batch, length, seed=SEED + i, padding=padding) for i, (batch, length) in sizes]


def probe(model: LoadedModel, batch: int, length: int, *, seed: int, padding: int = 0) -> Probe:
    """Make one probe; the last row is padded by ``padding`` tokens, a decoder's on the left."""
    generator = torch.Generator().manual_seed(seed)
    if not model.decoder:
        return examples(model, batch, length, generator, padding)
    ids = torch.randint(3, max(vocab_size(model.module), 4), (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return Probe({"input_ids": ids, "attention_mask": mask, "position_ids": positions}, batch, length)


def examples(model: LoadedModel, batch: int, length: int, generator: torch.Generator, padding: int = 0) -> Probe:
    """Draw inputs of the kinds of a model's example inputs: token ids get a length, what else there is keeps its, and
    for a ``batch`` of 0 its rows.

    The last row's mask ends ``padding`` tokens early.
    """
    tokens = model.examples.get("input_ids")
    made = {}
    for name, example in model.examples.items():
        like_tokens = tokens is not None and example.ndim == 2 and not example.is_floating_point()
        rows = (batch or example.shape[0],) if example.ndim else ()
        shape = (*rows, length) if like_tokens else (*rows, *example.shape[1:])
        made[name] = drawn(name, example, shape, generator, vocab_size(model.module))
    if padding and "attention_mask" in made:
        made["attention_mask"][-1, -padding:] = 0
    own = next((len(tensor) for tensor in made.values() if tensor.ndim), 1)
    return Probe(made, batch or own, length if tokens is not None else 0)


def drawn(
    name: str, example: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator, vocabulary: int
) -> torch.Tensor:
    """Return random numbers like an example's: normal ones, token ids, other integers between its least and its
    largest, ones for a mask."""
    if example.is_floating_point():
        return torch.randn(shape, generator=generator).to(example.dtype)
    if "mask" in name or example.dtype == torch.bool:
        return torch.ones(shape, dtype=example.dtype)
    tokens = name == "input_ids" and vocabulary
    least, count = (0, vocabulary) if tokens else (int(example.min()), int(example.max()) + 1)
    return torch.randint(least, count, shape, generator=generator).to(example.dtype)


def with_inputs_of(model: LoadedModel, ports: Iterable[Port]) -> LoadedModel:
    """Return a model that is not a decoder with examples for those of its inputs that a file has.

    A checkpoint's own examples are token ids, whatever it takes.
    """
    if model.decoder:
        return model
    parameters = inspect.signature(model.module.forward).parameters
    config: Any = getattr(model.module, "config", None)
    made = {}
    for port in ports:
        known = model.examples.get(port.name)
        if port.name in parameters and (known is None or known.ndim != len(port.shape)):
            made[port.name] = example_of(port, config)
    kept = {name: tensor for name, tensor in model.examples.items() if name in parameters}
    return replace(model, examples={**kept, **made})


def example_of(port: Port, config: Any) -> torch.Tensor:
    """Return an example for an input: pixels of the model's image size, ones for a mask, zeros for other ids."""
    if not port.floating:
        return torch.full((1, LENGTHS[0]), int("mask" in port.name), dtype=torch.int64)
    edge = getattr(config, "image_size", None) or IMAGE
    sizes = (1, int(getattr(config, "num_channels", 3)), int(edge), int(edge))[: len(port.shape)]
    return torch.zeros([dim if isinstance(dim, int) else size for dim, size in zip(port.shape, sizes, strict=True)])


def beyond_window(model: LoadedModel) -> int:
    """Return a prime length beyond the model's attention window, or the usual one where the window is too long."""
    config: Any = getattr(model.module, "config", None)
    window = int(getattr(config, "sliding_window", None) or 0)
    most = int(getattr(config, "max_position_embeddings", None) or LONGEST)
    fitting = [length for length in PRIMES if window < length <= most]
    return fitting[0] if fitting else LENGTHS[1]


def untried_window(model: LoadedModel) -> int:
    """Return the model's attention window when no probe is longer than it, else 0."""
    window = int(getattr(getattr(model.module, "config", None), "sliding_window", None) or 0)
    return window if window >= beyond_window(model) else 0
