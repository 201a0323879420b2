"""Inputs for two ONNX files of one computation, without a model that says what they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ditto_core.align.binding import TOKEN_WORDS, bindings, empty_shape
from ditto_core.align.probes import BATCHES, IMAGE, LENGTHS, SEED

if TYPE_CHECKING:
    from ditto_core.align.file import OnnxFile, Port

LOOKUPS = ("Gather", "GatherBlockQuantized")
COLOURS = 3
FEWEST = 2
"""Ids below this are in every table."""


def random_feeds(file: OnnxFile) -> list[dict[str, Any]]:
    """Return two feeds of a file: normal numbers, ids that its tables have, masks of ones, positions, empty caches."""
    return [
        {port.name: drawn(file, port, batch, length, np.random.default_rng(SEED + i)) for port in file.inputs}
        for i, (batch, length) in enumerate(zip(BATCHES, LENGTHS, strict=True))
    ]


def drawn(file: OnnxFile, port: Port, batch: int, length: int, generator: np.random.Generator) -> Any:
    """Return an array for one input."""
    if is_cache(port):
        return np.zeros([batch if size < 0 else size for size in empty_shape(port, own_config(file))], port.dtype)
    shape = [dim if isinstance(dim, int) else size(file, i, dim, port, batch, length) for i, dim in enumerate(port.shape)]
    if port.floating:
        return generator.standard_normal(shape).astype(port.dtype)
    if "mask" in port.name or port.dtype == "bool":
        return np.ones(shape, port.dtype)
    if "position" in port.name:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(port.dtype)
    if not shape or "length" in port.name:
        return np.full(shape, length, port.dtype)
    return generator.integers(0, rows(file, port.name), shape).astype(port.dtype)


def own_config(file: OnnxFile) -> SimpleNamespace:
    """Return what onnxruntime-genai's configuration beside a file says of its heads and window, if there is one."""
    known = file.settings
    return SimpleNamespace(
        head_dim=known.get("head_size"),
        num_attention_heads=known.get("num_attention_heads"),
        num_key_value_heads=known.get("num_key_value_heads"),
        sliding_window=known.get("sliding_window", {}).get("window_size"),
    )


def size(file: OnnxFile, axis: int, name: str, port: Port, batch: int, length: int) -> int:
    """Return the size of a dimension that has only a name: the batch first, then tokens; an image's channels, pixels."""
    if axis == 0 and not any(word in name for word in TOKEN_WORDS):
        return batch
    if port.floating and len(port.shape) == 4:
        return channels(file, port.name) if axis == 1 else IMAGE
    return length


def channels(file: OnnxFile, name: str) -> int:
    """Return the number of channels that the convolution of an input takes, as of colours where there is none."""
    weights = {tensor.name: tensor.dims for tensor in file.model.graph.initializer}
    taken = (weights.get(n.input[1], ()) for n in file.model.graph.node if n.op_type == "Conv" and n.input[0] == name)
    return next((int(dims[1]) for dims in taken if len(dims) == 4), COLOURS)


def is_cache(port: Port) -> bool:
    """Tell whether an input is what an earlier step left."""
    return port.floating and len(port.shape) >= 3 and ("past" in port.name or "cache" in port.name)


def rows(file: OnnxFile, name: str) -> int:
    """Return the number of rows of the smallest table that an input's numbers are looked up in."""
    tables = {tensor.name: tensor.dims[0] for tensor in file.model.graph.initializer if tensor.dims}
    names, found = {name}, []
    for node in file.model.graph.node:
        if node.op_type == "Cast" and node.input[0] in names:
            names.add(node.output[0])
        if node.op_type in LOOKUPS and node.input[1] in names and node.input[0] in tables:
            found.append(int(tables[node.input[0]]))
    return min(found, default=FEWEST)


def fed_alike(
    file: OnnxFile, like: OnnxFile, feeds: Sequence[Mapping[str, Any]], given: Mapping[str, str]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the ways to feed a file the same inputs as another one, the likeliest first; ``given`` are roles by input.

    Raises :class:`~ditto_core.errors.UsageError` for an input that fits none of the other's.
    """
    own = [port for port in like.inputs if not is_cache(port)]
    kinds = {port.name: ("float" if port.floating else "int", len(port.shape)) for port in own}
    for binding in bindings(file, list(kinds), kinds, own_config(file), given):
        yield [
            {**binding.feed(feed, 0), **binding.empty(next((len(a) for a in feed.values() if np.ndim(a)), 1))}
            for feed in feeds
        ]
