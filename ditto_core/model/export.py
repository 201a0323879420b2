"""Module -> ExportedProgram -> ONNX: one graph for prefill and decode, with the provenance of every tensor in it.

While ``torch.export`` traces, hooks hand over every module's tensors; the wrapper returns them as extra outputs, so
each site is tied to its value by construction. The outputs are then taken off again: the file on disk computes the
model's own outputs, and a backend makes taps of the values it is asked for.
"""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import onnx
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ditto_core.errors import BuildError, UsageError
from ditto_core.graphs.outputs import axes_by_value, finish_export, freeze_inputs, input_shapes, settled_sizes
from ditto_core.model.experts import chosen_of, expert_axis
from ditto_core.model.export_failure import depends_on_values, export_failure, told
from ditto_core.model.hollow import Reader, give_weights, hollow, optimize, save
from ditto_core.model.loading import LoadedModel
from ditto_core.model.mapped import LINKED, Links
from ditto_core.model.sizes import frozen_sizes
from ditto_core.model.staged_wrappers import FirstWrapper, LaterWrapper
from ditto_core.model.states import state_of
from ditto_core.model.wrappers import (
    BATCH,
    LENGTH,
    TOTAL,
    DecoderWrapper,
    ModuleWrapper,
    Wrapper,
    vocab_size,
)
from ditto_core.sites import Provenance, Tap, final_site, is_operator, source_line
from ditto_core.system.files import parse_json

T = TypeVar("T")
ONNX_FILE = "model.onnx"
PROVENANCE_FILE = "provenance.json"
EXPORT_FILE = "export.json"
FORMAT = 6
"""Of what an export holds, site names included; part of its key."""


@dataclass(frozen=True)
class Export:
    """An export on disk: names of the graph's inputs and outputs, and whether it has a KV cache.

    ``staged``: it is one of the two kinds of steps of a model, whose states are plain inputs and outputs.
    """

    directory: Path
    decoder: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    vocab_size: int = 0
    shapes: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    """The sizes of each input's dimensions, or the names of those that are dynamic."""
    staged: bool = False
    frozen: Sequence[tuple[str, int, str]] = ()
    """The dimensions (input, index, name) that were to be dynamic and for which the model's code leaves one size."""
    held: Mapping[str, Any] = field(default_factory=dict)
    """The inputs whose numbers the model's code reads while it is traced, and those that they have to have."""

    @property
    def finals(self) -> tuple[str, ...]:
        """The model's own outputs, without the KV cache."""
        carries = self.decoder or self.staged
        return tuple(name for name in self.outputs if not (carries and state_of(name)))

    @property
    def returned(self) -> tuple[str, ...]:
        """The outputs that a session returns: of a staged model also what it carries."""
        return self.outputs if self.staged else self.finals

    def behind(self, taps: Sequence[Tap]) -> tuple[Tap, ...]:
        """Return a tap for each final output that is none of ``taps``: what is computed behind the last module."""
        known = {tap.value for tap in taps}
        sites = {tap.site: tap for tap in taps}
        wanted = [name for name in self.finals if name not in known]
        if not wanted or not self.onnx_path.exists():
            tokens = {"logits": (BATCH, LENGTH, "")} if self.decoder else {}
            return tuple(Tap(final_site(name, sites), name, axes=tokens.get(name, ())) for name in wanted)
        axes = axes_by_value(self.onnx_path)
        return tuple(Tap(final_site(name, sites), name, axes=head_axis(axes[name])) for name in wanted)

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

    def check(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`UsageError` for an input whose sizes, or numbers, this export cannot take."""
        for name, tensor in inputs.items():
            if name in self.held and tensor.tolist() != self.held[name]:
                raise UsageError(
                    f"input {name!r} is held at {self.held[name]}, whose numbers the model's code reads: "
                    "give an example with others"
                )
            shape = self.shapes.get(name)
            if shape is None:
                continue
            if len(shape) != tensor.ndim:
                raise UsageError(f"input {name!r} has {tensor.ndim} dimensions, expected {len(shape)}")
            for index, (size, expected) in enumerate(zip(tensor.shape, shape, strict=True)):
                if isinstance(expected, int) and size != expected:
                    raise UsageError(
                        f"input {name!r} has size {size} in dimension {index}, {self._fixed(name, index, expected)}"
                    )

    def _fixed(self, name: str, index: int, size: int) -> str:
        """Return why a dimension has one size, and the way out."""
        for frozen, place, dimension in self.frozen:
            if (frozen, place) == (name, index):
                return f"its {dimension} is frozen to {size}: {why_frozen(size)}"
        return f"the engine was built for {size}; to let it vary give dynamic={{{name!r}: {{{index}: 'size'}}}}"

    @classmethod
    def load(cls, directory: Path) -> Export:
        """Open what :func:`export` wrote."""
        data = parse_json((directory / EXPORT_FILE).read_text())
        lists = {name: tuple(data[name]) for name in ("inputs", "outputs")}
        lists["frozen"] = tuple(map(tuple, data["frozen"]))
        return cls(directory, **{**data, **lists})

    def save(self) -> None:
        """Write the description beside the ONNX file."""
        data = {k: v for k, v in asdict(self).items() if k != "directory"}
        (self.directory / EXPORT_FILE).write_text(json.dumps(data, indent=1) + "\n")


def export(
    model: LoadedModel,
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    opset: int = 20,
    named: Sequence[tuple[str, int, str]] = (),
    operators: bool = False,
) -> Export:
    """Export a loaded model in ``dtype`` into ``directory``: ONNX, weights, provenance, readable forms of the FX graph.

    Beside the model, memory holds one weight at a time (see :mod:`~ditto_core.model.hollow`).
    ``named`` are dimensions of a module's inputs that have to be dynamic, as (input, index, name). ``operators``: those
    of the model's own code are sites too.
    Raises :class:`BuildError` with the exporter's innermost complaint, and for a dimension that the model fixes.
    """
    with hollow(model.module, dtype) as readers:
        cast = replace(model, examples=model.examples_in(dtype))
        wrapper = wrap(cast, named)
        wrapper.operators = operators
        done = _export(cast, wrapper, directory, readers, opset, named)
        if isinstance(wrapper, ModuleWrapper) and any(frozen[1] == 0 for frozen in done.frozen) and wrapper.doubled:
            wrapper.doubles = False  # not frozen to two rows where the example has one
            done = _export(cast, wrapper, directory, readers, opset, named)
        return done


def _export(
    model: LoadedModel,
    wrapper: Wrapper,
    directory: Path,
    readers: Mapping[int, Reader],
    opset: int,
    named: Sequence[tuple[str, int, str]],
) -> Export:
    arguments, _, input_names = wrapper.signature()

    def trace() -> torch.export.ExportedProgram:
        arguments, dynamic, _ = wrapper.signature()
        return torch.export.export(wrapper, arguments, dynamic_shapes=dynamic, strict=False)

    with quiet(), torch.no_grad(), own_symbols(not (model.decoder or model.later)), restored(model.module):
        run_once(model, wrapper, arguments)
        program = held_where_read(model, wrapper, trace)
        names = wrapper.traced.names
        try:
            onnx_program = torch.onnx.export(
                program,
                (),
                input_names=input_names,
                output_names=names,
                dynamo=True,
                opset_version=opset,
                verbose=False,
                optimize=False,
                custom_translation_table={torch.ops.aten._is_all_true.default: all_true},
            )
            assert onnx_program is not None
            links = Links(directory) if sum(read.data.nbytes for read in readers.values()) >= LINKED else None
            give_weights(onnx_program.model, readers, links)
            optimize(onnx_program.model)
        except Exception as error:
            raise BuildError(export_failure(model.label, error, program)) from error
    decomposed: Any = onnx_program.exported_program
    save(onnx_program.model, directory / ONNX_FILE)
    settled = settled_sizes(directory / ONNX_FILE)
    axes = finish_export(directory / ONNX_FILE, wrapper.traced.outputs, wrapper.dimensions)
    if settled:
        examples = dict(zip(input_names, tree_leaves(arguments), strict=True))
        frozen = frozen_sizes(directory / ONNX_FILE, settled, wrapper.dimensions, examples)
        freeze_inputs(directory / ONNX_FILE, frozen)
    taps = tuple(describe(wrapper, decomposed, names, axes))
    Provenance(taps, tuple(unmapped_modules(model.module, taps))).save(directory / PROVENANCE_FILE)
    write_readable(decomposed, directory)
    shapes = input_shapes(directory / ONNX_FILE)
    fixed = [
        (name, index, dimension)
        for name, dimensions in wrapper.dimensions.items()
        for index, dimension in dimensions.items()
        if isinstance(shapes[name][index], int)
    ]
    check_dynamic(model, named, shapes)
    vocabulary = vocab_size(model.module)
    inputs, outputs = tuple(input_names), wrapper.traced.outputs
    held = {name: tensor.tolist() for name, tensor in wrapper.held.items()}
    done = Export(directory, model.decoder, inputs, outputs, vocabulary, shapes, model.staged, fixed, held)
    done.save()
    return done


def held_where_read(model: LoadedModel, wrapper: Wrapper, trace: Callable[[], T]) -> T:
    """Trace a model; where that fails for numbers that its code reads, hold the inputs they are of and trace again.

    Raises :class:`BuildError` with the exporter's innermost complaint.
    """
    try:
        try:
            with restored(model.module):
                return trace()
        except Exception as error:
            if not depends_on_values(error) or not wrapper.hold():
                raise
            return trace()
    except Exception as error:
        raise BuildError(export_failure(model.label, error)) from error


def wrap(model: LoadedModel, named: Sequence[tuple[str, int, str]] = ()) -> Wrapper:
    """Return what is traced of a loaded model. Raises :class:`UsageError` for a dimension that no input has."""
    if model.decoder and named:
        raise UsageError(f"dynamic names {named[0][0]!r}, but {model.label} is a decoder, whose sizes are all dynamic")
    if model.decoder:
        return DecoderWrapper(model.module)
    if model.later:
        return LaterWrapper(model.module, model.examples)
    for name, index, dimension in named:
        if name not in model.examples:
            raise UsageError(f"dynamic names input {name!r}, {model.label} has {', '.join(model.examples)}")
        if index >= model.examples[name].ndim:
            raise UsageError(
                f"dynamic gives {dimension!r} to dimension {index} of {name!r}, which has {model.examples[name].ndim}"
            )
    return (FirstWrapper if model.staged else ModuleWrapper)(model.module, model.examples, named)


def run_once(model: LoadedModel, wrapper: Wrapper, arguments: tuple[Any, ...]) -> None:
    """Run a wrapper before it is traced. Raises :class:`BuildError` when the model cannot run on its own examples."""
    try:
        wrapper(*arguments)
    except Exception as error:
        raise BuildError(f"{model.label} could not be run: {told(error)}") from error
    if not wrapper.traced.outputs:
        raise BuildError(f"{model.label} returns no tensor, expected at least one to compare")


def check_dynamic(
    model: LoadedModel, named: Sequence[tuple[str, int, str]], shapes: Mapping[str, Sequence[int | str]]
) -> None:
    """Raise :class:`BuildError` for a dimension that the user named and the model fixes."""
    for name, index, dimension in named:
        if isinstance(size := shapes[name][index], int):
            raise BuildError(f"dimension {index} of {name!r} ({dimension}) is frozen to {size}: {why_frozen(size)}")


def why_frozen(size: int) -> str:
    """Return why an export has one size only, and what to do."""
    if size == 1:
        return "give an example of at least 2"
    return "the model's code leaves no other size, as int(x.shape[0]) does, or a constant of that size"


def describe(
    wrapper: Wrapper, program: torch.export.ExportedProgram, names: Sequence[str], axes: Mapping[str, tuple[str, ...]]
) -> Iterator[Tap]:
    """Complete the taps, in the order in which the model computed them."""
    results: Any = program.graph.output_node().args[0]
    nodes = dict(zip(names, results, strict=True))
    for value, tap in wrapper.traced.taps.items():
        node = nodes[value]
        # A node's stack ends at the module's forward; an operator may lie in a function that this calls.
        own = any(map(is_operator, (tap.site, *tap.aliases)))
        source = tap.source if own else source_line(node.meta.get("stack_trace") or "")
        axis, choice = head_axis(axes.get(value, ())), chosen_of(wrapper.module, tap.site, node.meta["val"])
        axis = expert_axis(wrapper.module, tap.site, axis)
        yield replace(tap, fx_node=node.name, source=source, axes=axis, choice=choice)


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


def all_true(flags: Any) -> Any:
    """Translate ``aten._is_all_true``, which the exporter lacks; models that take images count their tokens by it."""
    from onnxscript import opset20

    least = opset20.ReduceMin(opset20.Cast(flags, to=onnx.TensorProto.INT32), keepdims=0)
    return opset20.Cast(least, to=onnx.TensorProto.BOOL)


def own_symbols(wanted: bool) -> AbstractContextManager[Any]:
    """Give dimensions symbols of their own: without that, an image that is square in the example always is."""
    config: Any = importlib.import_module("torch.fx.experimental._config")
    patched: AbstractContextManager[Any] = config.patch(use_duck_shape=not wanted)
    return patched


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Give each module its attributes back: what a forward keeps while it is traced holds no numbers.

    Dicts among them keep their identity, which handles of hooks refer to; those of other classes may be immutable.
    """
    attributes = [vars(part) for part in module.modules()]
    dicts = [value for table in attributes for value in table.values() if type(value) in (dict, OrderedDict)]
    before = [(table, dict(table)) for table in (*attributes, *dicts)]
    try:
        yield
    finally:
        for table, kept in before:
            table.clear()
            table.update(kept)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' chatter off the screen; their errors still raise. Of one torch prints the graph so far."""
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
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        trace.propagate, trace.handlers = propagate, handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
