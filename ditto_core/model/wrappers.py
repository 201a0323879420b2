"""What ``torch.export`` traces: a module with flat inputs, and every tensor at a module boundary as an extra output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from ditto_core.model import checkpoint
from ditto_core.model.code_lines import running_line
from ditto_core.model.recorder import Recorder
from ditto_core.sites import Tap

CACHE_SITES = ("key", "value")


class Traced:
    """What a wrapper saw while it was traced: ``torch.export`` undoes changes to a module's own attributes only."""

    def __init__(self) -> None:
        self.outputs: tuple[str, ...] = ()
        self.taps: dict[str, Tap] = {}

    @property
    def names(self) -> list[str]:
        """The names of everything the wrapper returned, in order."""
        return [*self.outputs, *(value for value in self.taps if value not in self.outputs)]


class Wrapper(nn.Module):
    """Flat inputs and outputs around a module, and every tensor that passes a module boundary as an extra output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.traced = Traced()

    def signature(self) -> tuple[tuple[Any, ...], Any, list[str]]:
        """Return example arguments, their dynamic shapes, and the names of the flat inputs."""
        raise NotImplementedError

    def run_tapped(
        self, run: Callable[[], Mapping[str, torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run the module under a recorder; return its outputs by name, then every tensor that is none of them."""
        seen: list[tuple[str, torch.Tensor, nn.Module]] = []
        lines: dict[str, str] = {}

        def on_tensor(site: str, tensor: torch.Tensor, module: nn.Module) -> None:
            seen.append((site, tensor, module))
            lines[site] = running_line(self.run_tapped.__code__)

        with Recorder(self.module, on_tensor).recording():
            outputs = run()
        values = {id(tensor): name for name, tensor in outputs.items()}
        skip = {id(tensor) for tensor in inputs}
        taps: dict[str, Tap] = {}
        extra: list[torch.Tensor] = []
        for site, tensor, module in seen:
            if id(tensor) in skip or not tensor.is_floating_point():
                continue
            value = values.setdefault(id(tensor), site)
            if value in taps:
                taps[value] = replace(taps[value], aliases=(*taps[value].aliases, site))
                continue
            taps[value] = Tap(
                site, value, module_class=class_name(module), dtype=str(tensor.dtype)[6:], source=lines[site]
            )
            if value == site:
                extra.append(tensor)
        self.traced.outputs, self.traced.taps = tuple(outputs), taps
        return (*outputs.values(), *extra)


class DecoderWrapper(Wrapper):
    """``forward(input_ids, attention_mask, position_ids, past)`` around a transformers decoder with a flat KV cache."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [batch, length, vocab], the new cache [batch, kv_head, total, head_dim] …, and the taps."""
        cache = cache_from_flat(past)

        def run() -> dict[str, torch.Tensor]:
            kwargs = {cache_argument(self.module): cache}
            out = self.module(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=True,
                **kwargs,
            )
            return {"logits": out.logits} | dict(cache_items("present", cache))

        return self.run_tapped(run, (input_ids, attention_mask, position_ids, *past))

    def signature(self) -> tuple[tuple[Any, ...], Any, list[str]]:
        """Example sizes of at least 2 everywhere, so that no dimension is taken for a constant."""
        batch, length, past = 2, 3, 5
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab_size(self.module), (batch, length), generator=generator)
        mask = torch.ones(batch, past + length, dtype=torch.int64)
        positions = torch.arange(past, past + length).expand(batch, length).contiguous()
        dtype = next(self.module.parameters()).dtype
        caches = [
            torch.randn(batch, heads, past, dim, generator=generator).to(dtype)
            for heads, dim in kv_geometry(self.module)
            for _ in CACHE_SITES
        ]
        d = Dim.DYNAMIC
        token = {0: d, 1: d}
        dynamic = {
            "input_ids": token,
            "attention_mask": token,
            "position_ids": token,
            "past": [{0: d, 2: d}] * len(caches),
        }
        names = ["input_ids", "attention_mask", "position_ids"]
        names += [f"past_key_values.{i}.{k}" for i in range(len(caches) // 2) for k in CACHE_SITES]
        return (ids, mask, positions, caches), dynamic, names


class ModuleWrapper(Wrapper):
    """Any module: forward's named inputs in, its output tensors out by name."""

    def __init__(self, module: nn.Module, examples: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module)
        self.examples = dict(examples)

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the outputs in order, then the taps."""
        named = dict(zip(self.examples, inputs, strict=True))
        return self.run_tapped(lambda: named_outputs(self.module(**named)), inputs)

    def signature(self) -> tuple[tuple[Any, ...], Any, list[str]]:
        """The batch dimension is dynamic, and both dimensions of token ids."""
        auto = Dim.AUTO
        dynamic = [
            {0: auto, 1: auto} if t.ndim == 2 and not t.is_floating_point() else ({0: auto} if t.ndim else {})
            for t in self.examples.values()
        ]
        return (list(self.examples.values()),), {"inputs": dynamic}, list(self.examples)


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """Name the tensors of a module's output: a single one is ``output``, others by key or index."""
    from ditto_core.model.recorder import tensors_in

    return {key if not key.isdigit() and key else f"output{key}": t for key, t in tensors_in(output)}


def cache_argument(module: nn.Module) -> str:
    """Return the name of forward's cache parameter (transformers renamed it in 5.2x)."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def cache_from_flat(flat: Sequence[torch.Tensor]) -> Any:
    """Build a ``DynamicCache`` of plain layers around existing tensors [batch, kv_head, past, head_dim]."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for i in range(0, len(flat), 2):
        layer = DynamicLayer()
        layer.keys, layer.values = flat[i], flat[i + 1]
        layer.dtype, layer.device, layer.is_initialized = flat[i].dtype, flat[i].device, True
        cache.layers.append(layer)
    return cache


def cache_items(prefix: str, cache: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a cache as ``{prefix}.{layer}.key|value``."""
    for i, layer in enumerate(cache.layers):
        yield f"{prefix}.{i}.key", layer.keys
        yield f"{prefix}.{i}.value", layer.values


def kv_geometry(module: nn.Module) -> list[tuple[int, int]]:
    """Return (key/value heads, head dimension) for each layer."""
    config: Any = module.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [(heads, dim)] * config.num_hidden_layers


def vocab_size(module: nn.Module) -> int:
    """Return the vocabulary's size, or 0 for a model without one."""
    return checkpoint.vocab_size(getattr(module, "config", None))


def class_name(module: nn.Module) -> str:
    """Return ``package.module.Class``."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
