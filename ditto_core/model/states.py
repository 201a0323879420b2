"""What a decoder carries from step to step, as named tensors: keys and values, convolution windows, recurrences.

``{layer}.key`` and ``{layer}.value`` are [batch, kv_head, past, head_dim] and grow; ``{layer}.conv`` and
``{layer}.recurrent`` are [batch, …] of fixed size, and zeros before the first step. The decoder of an encoder-decoder
also carries ``{layer}.cross_key`` and ``{layer}.cross_value`` [batch, head, source, head_dim], made in the first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ditto_core.errors import ModelError, first_line
from ditto_core.model.attention import is_observed

GROWING = ("key", "value")
FIXED = ("conv", "recurrent")
CROSS = ("cross_key", "cross_value")
PRESENT = "present."
"""In front of a state's name: what a decoder's graph returns, and a session of it keeps."""
STATE, OUT = "state.", ":out"
"""Around a state's name: a plain input and output of the graphs of a staged model."""
LENGTHS = (130, 258)
"""Tokens of two prompts of several chunks each, of what is computed by chunks of 64."""
FAILURES = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What a model's own code raises on an input that it was not made for."""
SAME = 1e-3
"""Relative difference up to which two ways of computing a float32 tensor are the same."""


@dataclass(frozen=True)
class State:
    """One carried tensor: its name, its sizes without batch (a growing one's past is 0), and its dtype."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def grows(self) -> bool:
        """Tell whether it has a dimension for the tokens that are past."""
        return grows(self.name)


def grows(state: str) -> bool:
    """Tell by its name whether a state has a dimension for the tokens that are past."""
    return state.rpartition(".")[2] in GROWING


def taken(name: str) -> str:
    """Return the name of the input that gives a state to the later steps of a staged model."""
    return f"{STATE}{name}"


def kept(name: str) -> str:
    """Return the name of the output in which a step of a staged model returns a state."""
    return f"{STATE}{name}{OUT}"


def state_in(name: str) -> str:
    """Return the name of the state that such an input is; empty for any other input."""
    return name.removeprefix(STATE) if name.startswith(STATE) else ""


def is_cross(state: str) -> bool:
    """Tell whether a state was made from what was encoded: it stays the same."""
    return state.rpartition(".")[2] in CROSS


def state_of(value: str) -> str:
    """Return the name of the state that a graph's output holds for the next step; empty for any other output."""
    if value.startswith(STATE) and value.endswith(OUT):
        return value[len(STATE) : -len(OUT)]
    return value.removeprefix(PRESENT) if value.startswith(PRESENT) else ""


def cache_argument(module: nn.Module) -> str:
    """Return the name of forward's cache parameter (transformers renamed it in 5.2x)."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def empty_cache(module: nn.Module) -> Any:
    """Return an empty ``DynamicCache``. It keeps whole sequences: sliding layers apply their window by the mask."""
    from transformers.cache_utils import DynamicCache

    from ditto_core.model.caches import ObservedLayer

    if has_fixed_states(module):
        return layered_cache(module)
    cache = DynamicCache()
    if not is_observed(module):
        cache.layer_class_to_replicate = ObservedLayer
    return cache


def cross_cache() -> Any:
    """Return an empty cache of an encoder-decoder: of the tokens so far, and of what was encoded."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def layered_cache(module: nn.Module) -> Any:
    """Return a ``DynamicCache`` whose layers are of the kinds that the configuration says."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache(config=module.config)
    cache.layers = [layer if is_fixed(layer) else DynamicLayer() for layer in cache.layers]
    return cache


def has_fixed_states(module: nn.Module) -> bool:
    """Tell whether a decoder's configuration has layers that carry something else than keys and values."""
    from transformers.cache_utils import DynamicCache

    try:
        return any(is_fixed(layer) for layer in DynamicCache(config=module.config).layers)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False  # a configuration that says nothing of layers


def is_fixed(layer: Any) -> bool:
    """Tell whether a cache layer carries states of fixed size."""
    return hasattr(layer, "conv_states")


def items(cache: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a cache holds, by name."""
    if hasattr(cache, "cross_attention_cache"):
        yield from items(cache.self_attention_cache)
        for name, tensor in items(cache.cross_attention_cache):
            yield name.replace(".", ".cross_"), tensor
        return
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None:
            yield f"{i}.key", layer.keys
            yield f"{i}.value", layer.values
        for kind in FIXED if is_fixed(layer) else ():
            state = getattr(layer, f"{kind}_states")[0]
            if state is not None:
                yield f"{i}.{kind}", state


def filled(cache: Any, states: Mapping[str, torch.Tensor]) -> Any:
    """Return an empty cache after existing tensors were put into it."""
    for name, tensor in states.items():
        put(cache, name, tensor)
    return cache


def put(cache: Any, name: str, tensor: torch.Tensor) -> None:
    """Make a tensor what a cache holds under a name."""
    index, _, kind = name.partition(".")
    if kind in CROSS:
        put(cache.cross_attention_cache, name.replace("cross_", ""), tensor)
        cache.is_updated[int(index)] = True
        return
    cache = getattr(cache, "self_attention_cache", cache)
    while len(cache.layers) <= int(index):
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[int(index)]
    layer.dtype, layer.device = tensor.dtype, tensor.device
    if kind in GROWING:
        setattr(layer, f"{kind}s", tensor)
        layer.is_initialized = True
        return
    getattr(layer, f"{kind}_states")[0] = tensor
    getattr(layer, f"is_{kind}_states_initialized")[0] = True
    layer.has_previous_state[0] = True
    if kind == "conv":
        layer.conv_kernel_size[0] = tensor.shape[-1]


def layout(module: nn.Module) -> tuple[State, ...]:
    """Return what a decoder carries, read off a small eager run. Raises :class:`ModelError` for one that fails."""
    cache = empty_cache(module)
    try:
        step(module, torch.zeros(1, 2, dtype=torch.int64), cache)
    except FAILURES as error:
        name, said = type(module).__name__, f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            f"{name} cannot be stepped: with an empty cache and two tokens its own forward fails ({said}), expected "
            f"logits; transformers here is {version('transformers')}, another version may do"
        ) from error
    found = []
    for name, tensor in items(cache):
        state = State(name, tuple(tensor.shape[1:]), tensor.dtype)
        found.append(State(name, (state.sizes[0], 0, *state.sizes[2:]), state.dtype) if state.grows else state)
    return tuple(found)


def continues(module: nn.Module) -> bool:
    """Tell whether a decoder that carries states of fixed size computes several tokens from them as one by one.

    Where it does not (Mamba's scan starts from zeros unless it gets a single token), no one graph serves both prefill
    and decoding. What is carried afterwards is compared too: little of it may show in the logits.
    """
    ids = torch.arange(5).reshape(1, 5)
    try:
        whole, split = empty_cache(module), empty_cache(module)
        expected = [step(module, ids, whole)[:, 3:], *dict(items(whole)).values()]
        step(module, ids[:, :3], split)
        actual = [step(module, ids[:, 3:], split), *dict(items(split)).values()]
    except FAILURES:
        return False
    pairs = zip(actual, expected, strict=True)
    return all(float((a - b).norm()) <= SAME * float(b.norm()) for a, b in pairs)


def loops(module: nn.Module) -> bool:
    """Tell whether a decoder runs more operators for more tokens: its code loops over them, or over chunks of them.

    An export unrolls such a loop for one length (Mamba's scan, Qwen3-Next's chunks of 64). A model that takes no
    prompts of these lengths is exported for one, too.
    """
    counts: list[int] = []
    for length in LENGTHS:
        try:
            with Counting() as counting:
                step(module, torch.ones(1, length, dtype=torch.int64), empty_cache(module))
        except FAILURES:
            return True
        counts.append(counting.count)
    return counts[0] != counts[1]


def example_tokens(module: nn.Module, carried: Iterable[State]) -> int:
    """Return how many tokens of a decoder with these states are traced: 3, or more than one chunk.

    What is computed by chunks (Mamba 2's scan) has a dimension for them, and a trace takes a single one for a constant.
    """
    scans = any(state.name.endswith(".recurrent") for state in carried)
    sizes = [getattr(part, "chunk_size", 0) for part in module.modules()] if scans else []
    return 3 + max((size for size in sizes if isinstance(size, int)), default=0)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def step(module: nn.Module, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run one step on token ids [batch, length]; return the logits."""
    with torch.no_grad():
        out = module(input_ids=ids, use_cache=True, **{cache_argument(module): cache})
    logits: torch.Tensor = out.logits
    return logits
