"""Module -> ExportedProgram -> ONNX: one graph for prefill and decode, with the provenance of every tensor in it.

While ``torch.export`` traces, hooks hand over every module's tensors; the wrapper returns them as extra outputs, so
each site is tied to its value by construction. The outputs are then taken off again: the file on disk computes the
model's own outputs, and a backend makes taps of the values it is asked for.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from ditto_core import models, onnx_graph
from ditto_core.errors import BuildError, UsageError
from ditto_core.models import LoadedModel
from ditto_core.recording import Recorder
from ditto_core.sites import Provenance, Tap, source_line

ONNX_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
PROVENANCE_FILE = "provenance.json"
EXPORT_FILE = "export.json"
FORMAT = 2
"""Of what an export holds, site names included; part of its key."""
CACHE_SITES = ("key", "value")
BATCH, LENGTH, PAST, TOTAL = "batch", "length", "past", "total"


@dataclass(frozen=True)
class Export:
    """An export on disk: names of the graph's inputs and outputs, and whether it has a KV cache."""

    directory: Path
    decoder: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    vocab_size: int = 0

    @property
    def finals(self) -> tuple[str, ...]:
        """The model's own outputs, without the KV cache."""
        return tuple(name for name in self.outputs if not (self.decoder and name.startswith("present.")))

    @property
    def onnx_path(self) -> Path:
        """The ONNX file; its weights lie beside it."""
        return self.directory / ONNX_FILE

    def graph_path(self) -> Path:
        """Return the ONNX file. Raises :class:`UsageError` when the engine is built from none."""
        if not self.onnx_path.exists():
            raise UsageError("operators cannot be told apart: this backend builds its engines from no ONNX graph")
        return self.onnx_path

    @property
    def provenance(self) -> Provenance:
        """Every site of the model."""
        return Provenance.load(self.directory / PROVENANCE_FILE)

    @classmethod
    def load(cls, directory: Path) -> Export:
        """Open what :func:`export` wrote."""
        data = json.loads((directory / EXPORT_FILE).read_text())
        lists = {name: tuple(data[name]) for name in ("inputs", "outputs")}
        return cls(directory, **{**data, **lists})

    def save(self) -> None:
        """Write the description beside the ONNX file."""
        data = {k: v for k, v in asdict(self).items() if k != "directory"}
        (self.directory / EXPORT_FILE).write_text(json.dumps(data, indent=1) + "\n")


def export(model: LoadedModel, directory: Path, *, opset: int = 20) -> Export:
    """Export a loaded model into ``directory``: ONNX, weights, provenance, and readable forms of the FX graph.

    Raises :class:`BuildError` with the first line of the exporter's complaint.
    """
    wrapper: Wrapper = DecoderWrapper(model.module) if model.decoder else ModuleWrapper(model.module, model.examples)
    arguments, dynamic, input_names = wrapper.signature()
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(wrapper, arguments, dynamic_shapes=dynamic, strict=False)
            names = wrapper.traced.names
            onnx_program = torch.onnx.export(
                program,
                (),
                input_names=input_names,
                output_names=names,
                dynamo=True,
                opset_version=opset,
                verbose=False,
            )
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BuildError(f"{model.label} could not be exported: {first.strip()}") from error
    assert onnx_program is not None
    decomposed: Any = onnx_program.exported_program
    onnx_program.save(directory / ONNX_FILE, external_data=True)
    axes = onnx_graph.finish_export(directory / ONNX_FILE, wrapper.traced.outputs, dimension_names(input_names))
    taps = tuple(describe(wrapper, decomposed, names, axes))
    Provenance(taps, tuple(unmapped_modules(model.module, taps))).save(directory / PROVENANCE_FILE)
    write_readable(decomposed, directory)
    done = Export(directory, model.decoder, tuple(input_names), wrapper.traced.outputs, vocab_size(model.module))
    done.save()
    return done


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
        with Recorder(self.module, lambda site, tensor, module: seen.append((site, tensor, module))).recording():
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
            taps[value] = Tap(site, value, module_class=class_name(module), dtype=str(tensor.dtype)[6:])
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
    from ditto_core.recording import tensors_in

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
    return models.vocab_size(getattr(module, "config", None))


def class_name(module: nn.Module) -> str:
    """Return ``package.module.Class``."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def dimension_names(input_names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Name the dynamic dimensions of the inputs; anything not listed is known by its batch dimension alone."""
    names: dict[str, dict[int, str]] = {name: {0: BATCH} for name in input_names}
    names |= {n: {0: BATCH, 1: LENGTH} for n in ("input_ids", "position_ids") if n in names}
    if "attention_mask" in names:
        decoder = any(n.startswith("past_key_values.") for n in names)
        names["attention_mask"] = {0: BATCH, 1: TOTAL if decoder else LENGTH}
    return names | {n: {0: BATCH, 2: PAST} for n in input_names if n.startswith("past_key_values.")}


def describe(
    wrapper: Wrapper, program: torch.export.ExportedProgram, names: Sequence[str], axes: Mapping[str, tuple[str, ...]]
) -> Iterator[Tap]:
    """Complete the taps, in the order in which the model computed them."""
    results: Any = program.graph.output_node().args[0]
    nodes = dict(zip(names, results, strict=True))
    for value, tap in wrapper.traced.taps.items():
        node = nodes[value]
        source = source_line(node.meta.get("stack_trace") or "")
        yield replace(tap, fx_node=node.name, source=source, axes=head_axis(axes.get(value, ())))


def head_axis(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Name the head dimension of a [batch, head, length|total, …] tensor."""
    if len(axes) == 4 and axes[0] == BATCH and axes[1] == "" and axes[2] in (LENGTH, TOTAL):
        return (BATCH, "head", *axes[2:])
    if len(axes) == 4 and axes[:2] == (BATCH, LENGTH):
        return (BATCH, LENGTH, "head", axes[3])
    return axes


def unmapped_modules(module: nn.Module, taps: Sequence[Tap]) -> Iterator[str]:
    """Yield the modules that have no tensor of their own in the graph."""
    known = {site.split(":")[0].split("@")[0] for tap in taps for site in (tap.site, *tap.aliases)}
    for path, child in module.named_modules():
        if path and path not in known and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield path


def write_readable(program: torch.export.ExportedProgram, directory: Path) -> None:
    """Write ``graph_module.py`` and ``graph.txt``: their node names are what ``fx:`` selectors take."""
    code = program.graph_module.print_readable(print_output=False)
    (directory / "graph_module.py").write_text(code + "\n")
    (directory / "graph.txt").write_text(str(program.graph) + "\n")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' chatter off the screen; their errors still raise."""
    names = ("torch.onnx", "onnxscript", "torch.export", "torch.fx", "onnx_ir")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    # torch's structured trace is at debug level on purpose; a test runner that captures logs would show all of it.
    trace = logging.getLogger("torch.__trace")
    propagate, trace.propagate = trace.propagate, False
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        trace.propagate = propagate
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
