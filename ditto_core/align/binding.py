"""How a file of any origin is fed: which of its inputs is what, and which outputs are the cache of the next step.

Inputs are known by their names, then by dtype and rank. Where several readings are possible each is returned, and the
one whose outputs are nearest to the model's is taken.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ditto_core.align.file import OnnxFile, Port
from ditto_core.errors import UsageError

TOKENS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
COUNTS = {
    "past_sequence_length": "past_length",
    "past_seq_len": "past_length",
    "total_sequence_length": "total_length",
    "total_seq_len": "total_length",
    "current_sequence_length": "length",
    "seqlens_k": "last_positions",
    "use_cache_branch": "has_past",
    "cache_position": "cache_positions",
    "token_type_ids": "zeros",
    "attention_mask": "ones",
    "position_ids": "positions",
}
"""Inputs that exporters add beside the model's own, and what they hold."""
TOKEN_WORDS = ("past", "total", "seq", "len", "sliding", "window")
RING_WORDS = ("sliding", "window")
"""Words in the names of a cache's dimensions: of the one that counts tokens, of one that keeps the last only."""
FUSED_CACHES: Mapping[str, Mapping[int, int]] = {
    "GroupQueryAttention": {3: 1, 4: 2},
    "MultiHeadAttention": {6: 1, 7: 2},
    "DecoderMaskedMultiHeadAttention": {5: 1, 6: 2},
    "Attention": {4: 1},
}
"""Operators that take a past at one input and return the present at one output."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the cache: what is read, what is written, and the shape of an empty one (-1: the batch)."""

    input: str
    output: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Binding:
    """``roles`` say what each input holds: an input of the model by its name, or one of :data:`COUNTS`."""

    roles: Mapping[str, str]
    cache: tuple[Slot, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    def feed(self, inputs: Mapping[str, Any], past: int) -> dict[str, Any]:
        """Return the arrays of one step. ``inputs`` are the model's, as arrays; ``past`` counts the tokens before."""
        return {
            name: shaped(content(role, inputs, past), self.ranks[name]).astype(self.dtypes[name], copy=False)
            for name, role in self.roles.items()
        }

    def empty(self, batch: int) -> dict[str, Any]:
        """Return the cache before the first step."""
        sizes = {slot.input: tuple(batch if size < 0 else size for size in slot.shape) for slot in self.cache}
        return {slot.input: np.zeros(sizes[slot.input], slot.dtype) for slot in self.cache}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Binding:
        """Inverse of :meth:`to_json`."""
        slots = tuple(Slot(**{**slot, "shape": tuple(slot["shape"])}) for slot in data["cache"])
        return cls(data["roles"], slots, data["dtypes"], data["ranks"])


def content(role: str, inputs: Mapping[str, Any], past: int) -> Any:
    """Return what an input of this role holds."""
    if role in inputs:
        return np.asarray(inputs[role])
    tokens = np.asarray(inputs[TOKENS])
    batch, length = tokens.shape
    made: dict[str, Callable[[], Any]] = {
        "past_length": lambda: np.array(past),
        "total_length": lambda: np.array(past + length),
        "length": lambda: np.array(length),
        "last_positions": lambda: np.asarray(inputs[MASK]).sum(1) - 1,
        "has_past": lambda: np.array(past > 0),
        "cache_positions": lambda: np.arange(past, past + length),
        "ones": lambda: np.ones((batch, past + length), np.int64),
        "positions": lambda: np.broadcast_to(np.arange(past, past + length), (batch, length)),
        "zeros": lambda: np.zeros((batch, length), np.int64),
    }
    return made[role]()


def shaped(array: Any, rank: int) -> Any:
    """Give a number the rank that an input declares."""
    return array.reshape((1,) * rank) if array.ndim == 0 and rank else array


def bindings(
    file: OnnxFile, names: Sequence[str], ranks: Mapping[str, tuple[str, int]], config: Any, given: Mapping[str, str]
) -> list[Binding]:
    """Return the ways in which a file can be fed, the likeliest first.

    ``names`` are the model's inputs, ``ranks`` their kind (``float`` or ``int``) and rank; ``given`` are roles by input
    that the user names. Raises :class:`UsageError` naming the input that nothing fits.
    """
    known, left = named_roles(file, names, given)
    decoder = TOKENS in names and config is not None
    cache = [port for port in left if decoder and port.floating and len(port.shape) >= 3]
    left = [port for port in left if port not in cache]
    free = [name for name in names if name not in known.values()]
    slots = tuple(slot(file, port, config) for port in cache)
    dtypes = {port.name: port.dtype for port in file.inputs}
    count = {port.name: len(port.shape) for port in file.inputs}
    return [Binding({**known, **more}, slots, dtypes, count) for more in readings(left, free, ranks)]


def named_roles(file: OnnxFile, names: Sequence[str], given: Mapping[str, str]) -> tuple[dict[str, str], list[Port]]:
    """Return the roles that names tell, and the inputs that they do not."""
    known: dict[str, str] = {}
    for wrong in set(given) - {port.name for port in file.inputs}:
        raise UsageError(f"the file has no input {wrong!r}, it has {', '.join(port.name for port in file.inputs)}")
    settings = {text: role for role, text in file.settings.get("inputs", {}).items() if isinstance(text, str)}
    for port in file.inputs:
        aliases = (given.get(port.name, ""), port.name, settings.get(port.name, ""))
        named = (name if name in names else COUNTS.get(name, "") for name in aliases)
        role = next(filter(None, named), "")
        if role:
            known[port.name] = role
    return known, [port for port in file.inputs if port.name not in known]


def readings(
    left: Sequence[Port], free: Sequence[str], kinds: Mapping[str, tuple[str, int]]
) -> Iterator[dict[str, str]]:
    """Yield the ways to give each input that is ``left`` one of the ``free`` inputs of the model.

    Raises :class:`UsageError` when an input fits none.
    """
    fits = {
        port.name: [name for name in free if kinds[name][1] == len(port.shape) and fitting(port, kinds[name][0])]
        for port in left
    }
    for port in left:
        if not fits[port.name]:
            roles = ", ".join((*free, *sorted(set(COUNTS.values()))))
            raise UsageError(f"what is input {port} of the file? Give inputs={{{port.name!r}: ROLE}}, one of {roles}")
    for choice in itertools.product(*fits.values()):
        if len(set(choice)) == len(choice):
            yield dict(zip(fits, choice, strict=True))


def fitting(port: Port, kind: str) -> bool:
    """Tell whether an input can hold the model's: a mask of integers may be a mask of floats in the file."""
    return kind == "int" or port.floating


def slot(file: OnnxFile, port: Port, config: Any) -> Slot:
    """Describe one tensor of the cache. Raises :class:`UsageError` when no output returns it."""
    output = returned(file, port)
    if not output:
        outputs = ", ".join(found.name for found in file.outputs)
        raise UsageError(f"no output of the file returns cache input {port} for the next step, it has {outputs}")
    return Slot(port.name, output, empty_shape(port, config), port.dtype)


def empty_shape(port: Port, config: Any) -> tuple[int, ...]:
    """Return the shape of an empty cache tensor: -1 for the batch, 0 for the tokens, a window's length for a ring.

    Dimensions that have only a name are told by it, else by their place: batch, tokens, heads, size of a head.
    """
    names = {i: dim for i, dim in enumerate(port.shape) if isinstance(dim, str)}
    batch = next((i for i, name in names.items() if "batch" in name), min(names, default=0))
    others = {i: name for i, name in names.items() if i != batch}
    tokens = next((i for i, name in others.items() if any(w in name for w in TOKEN_WORDS)), min(others, default=-1))
    made = [
        dim if isinstance(dim, int) else head_size(config, last=i == len(port.shape) - 1)
        for i, dim in enumerate(port.shape)
    ]
    made[batch] = -1
    if tokens >= 0:
        ring = any(word in others[tokens] for word in RING_WORDS)
        made[tokens] = int(getattr(config, "sliding_window", None) or 0) if ring else 0
    return tuple(made)


def head_size(config: Any, *, last: bool) -> int:
    """Return the size of a head, or the number of key and value heads, from a model's configuration."""
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    if last:
        return int(getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads)
    return int(getattr(config, "num_key_value_heads", None) or heads)


def returned(file: OnnxFile, port: Port) -> str:
    """Return the output that a cache input comes back as: by its name, else the nearest that is computed from it."""
    outputs = {found.name: found for found in file.outputs}
    for old, new in (("past_key_values", "present"), ("past", "present"), ("_in", "_out"), ("input", "output")):
        if old in port.name and port.name.replace(old, new) in outputs:
            return port.name.replace(old, new)
    return computed_from(file, port)


def computed_from(file: OnnxFile, port: Port) -> str:
    """Return the nearest output of a cache input's rank that is computed from it; an empty string for none."""
    outputs = {found.name: found for found in file.outputs}
    readers: dict[str, list[Any]] = {}
    for node in file.model.graph.node:
        for place, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, place))
    waiting, seen = deque([port.name]), {port.name}
    while waiting:
        for node, place in readers.get(waiting.popleft(), []):
            for name in following(node, place):
                found = outputs.get(name)
                if found is not None and len(found.shape) == len(port.shape):
                    return name
                if name and name not in seen:
                    seen.add(name)
                    waiting.append(name)
    return ""


def following(node: Any, place: int) -> list[str]:
    """Return the outputs of a node that hold what it reads at one of its inputs."""
    fused = FUSED_CACHES.get(node.op_type, {})
    if place in fused and fused[place] < len(node.output):
        return [node.output[fused[place]]]
    return list(node.output)
