"""Module -> ExportedProgram -> ONNX: one graph for prefill and decode, with the provenance of every tensor in it.

While ``torch.export`` traces, a recorder hands over every module's tensors; the wrapper returns them as extra outputs,
so each site is tied to its value by construction. The outputs are then taken off again: the file on disk computes the
model's own outputs, and a backend makes taps of the values it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn
from torch.export.graph_signature import OutputKind
from torch.utils._pytree import tree_leaves

from ditto_core.errors import BuildError
from ditto_core.graphs.outputs import finish_export, freeze_inputs, input_shapes, settled_sizes
from ditto_core.model.branches import has_branches
from ditto_core.model.buffers import Buffers
from ditto_core.model.experts import chosen_of, expert_axis
from ditto_core.model.export_failure import export_failure
from ditto_core.model.exported import ONNX_FILE, PROVENANCE_FILE, Export, head_axis, why_frozen
from ditto_core.model.hollow import Reader, give_weights, hollow, optimize, save
from ditto_core.model.loading import LoadedModel
from ditto_core.model.mapped import LINKED, Links
from ditto_core.model.sizes import frozen_sizes
from ditto_core.model.traced import upstream_first
from ditto_core.model.tracing import held_where_read, own_symbols, quiet, run_once, wrap
from ditto_core.model.wrappers import ModuleWrapper, Wrapper, vocab_size
from ditto_core.sites import Provenance, Tap, is_operator, source_line


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

    with quiet(), torch.no_grad(), own_symbols(not (model.decoder or model.later)), Buffers(model.module).kept():
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
    check_opset(model.label, opset, onnx_program.model.opset_imports[""])
    decomposed: Any = onnx_program.exported_program
    save(onnx_program.model, directory / ONNX_FILE)
    settled = settled_sizes(directory / ONNX_FILE)
    axes = finish_export(directory / ONNX_FILE, wrapper.traced.outputs, wrapper.dimensions)
    if settled:
        examples = dict(zip(input_names, tree_leaves(arguments), strict=True))
        frozen = frozen_sizes(directory / ONNX_FILE, settled, wrapper.dimensions, examples)
        freeze_inputs(directory / ONNX_FILE, frozen)
    taps = tuple(describe(wrapper, decomposed, names, axes))
    unmapped = tuple(unmapped_modules(model.module, taps))
    Provenance(taps, unmapped, has_branches(program)).save(directory / PROVENANCE_FILE)
    write_readable(decomposed, directory)
    return described(model, wrapper, directory, input_names, named)


def described(
    model: LoadedModel,
    wrapper: Wrapper,
    directory: Path,
    names: Sequence[str],
    named: Sequence[tuple[str, int, str]],
) -> Export:
    """Write down what an exported graph takes, by the ``names`` of its inputs, and what it returns."""
    shapes = input_shapes(directory / ONNX_FILE)
    check_dynamic(model, named, shapes)
    fixed = [
        (name, index, dimension)
        for name, dimensions in wrapper.dimensions.items()
        for index, dimension in dimensions.items()
        if isinstance(shapes[name][index], int)
    ]
    vocabulary, outputs = vocab_size(model.module), wrapper.traced.outputs
    held = {name: tensor.tolist() for name, tensor in wrapper.held.items()}
    done = Export(directory, model.decoder, tuple(names), outputs, vocabulary, shapes, model.staged, fixed, held)
    done.save()
    return done


def check_opset(label: str, wanted: int, written: int) -> None:
    """Raise :class:`BuildError` where the exporter wrote another opset: it does so where it cannot convert a graph."""
    if written != wanted:
        raise BuildError(f"{label} has no opset {wanted}, the exporter wrote {written}: give opset={written}")


def check_dynamic(
    model: LoadedModel, named: Sequence[tuple[str, int, str]], shapes: Mapping[str, Sequence[int | str]]
) -> None:
    """Raise :class:`BuildError` for a dimension that the user named and the model fixes."""
    for name, index, dimension in named:
        if isinstance(size := shapes[name][index], int):
            raise BuildError(f"dimension {index} of {name!r} ({dimension}) is frozen to {size}: {why_frozen(size)}")


def describe(
    wrapper: Wrapper, program: torch.export.ExportedProgram, names: Sequence[str], axes: Mapping[str, tuple[str, ...]]
) -> Iterator[Tap]:
    """Complete the taps, in the order in which the model computed them."""
    returned: Any = program.graph.output_node().args[0]
    kinds = [spec.kind for spec in program.graph_signature.output_specs]  # others are buffers that forward writes into
    results = [node for node, kind in zip(returned, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
    nodes = dict(zip(names, results, strict=True))
    for value in upstream_first({value: nodes[value] for value in wrapper.traced.taps}):
        node, tap = nodes[value], wrapper.traced.taps[value]
        # A node's stack ends at the module's forward; an operator may lie in a function that this calls.
        own = any(map(is_operator, (tap.site, *tap.aliases)))
        source = tap.source if own else source_line(node.meta.get("stack_trace") or "")
        axis, choice = head_axis(axes.get(value, ())), chosen_of(wrapper.module, tap.site, node.meta["val"])
        axis = expert_axis(wrapper.module, tap.site, axis)
        yield replace(tap, fx_node=node.name, source=source, axes=axis, choice=choice)


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
