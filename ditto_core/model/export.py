"""Module -> ExportedProgram -> ONNX: one graph for prefill and decode, with the provenance of every tensor in it.

While ``torch.export`` traces, hooks hand over every module's tensors; the wrapper returns them as extra outputs, so
each site is tied to its value by construction. The outputs are then taken off again: the file on disk computes the
model's own outputs, and a backend makes taps of the values it is asked for.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ditto_core.errors import BuildError, UsageError
from ditto_core.graphs.outputs import finish_export
from ditto_core.model.loading import LoadedModel
from ditto_core.model.wrappers import DecoderWrapper, ModuleWrapper, Wrapper, vocab_size
from ditto_core.sites import Provenance, Tap, source_line

ONNX_FILE = "model.onnx"
PROVENANCE_FILE = "provenance.json"
EXPORT_FILE = "export.json"
FORMAT = 2
"""Of what an export holds, site names included; part of its key."""
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
    axes = finish_export(directory / ONNX_FILE, wrapper.traced.outputs, dimension_names(input_names))
    taps = tuple(describe(wrapper, decomposed, names, axes))
    Provenance(taps, tuple(unmapped_modules(model.module, taps))).save(directory / PROVENANCE_FILE)
    write_readable(decomposed, directory)
    done = Export(directory, model.decoder, tuple(input_names), wrapper.traced.outputs, vocab_size(model.module))
    done.save()
    return done


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
    names = ("torch.onnx", "onnxscript", "torch.export", "torch._export", "torch.fx", "onnx_ir")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    # torch's structured trace is at debug level on purpose, and pytest captures loggers that do not propagate as well.
    trace = logging.getLogger("torch.__trace")
    propagate, trace.propagate = trace.propagate, False
    handlers, trace.handlers = trace.handlers, [h for h in trace.handlers if type(h).__module__.startswith("torch.")]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        trace.propagate, trace.handlers = propagate, handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
