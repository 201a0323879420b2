"""Module -> ExportedProgram with just the wanted outputs, its dynamic sizes bounded by a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._sympy.value_ranges import ValueRanges

from ditto_core.model.buffers import Buffers
from ditto_core.model.loading import LoadedModel
from ditto_core.model.tracing import held_where_read, own_symbols, quiet, run_once, wrap
from ditto_core.model.wrappers import BATCH, PAST, DecoderWrapper, ModuleWrapper, Wrapper
from ditto_core.profile import Range, ShapeProfile
from ditto_core.sites import Tap

LEAST = 2


@dataclass(frozen=True)
class Program:
    """A traced model. Inputs and outputs are flat lists of tensors in the order of their names.

    ``outputs`` are the model's own outputs, the cache's ``present.{i}.key|value``, then the ``taps``. ``refused`` are
    the taps that no tensor of the module is (site -> reason): raw names of other graphs. ``empty_past`` are the inputs
    ``past_key_values.{i}.…`` of one row that no step has filled: [1, kv_head, 0, head_dim], or zeros of a fixed size.
    """

    exported: torch.export.ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    taps: tuple[Tap, ...]
    refused: dict[str, str]
    empty_past: tuple[torch.Tensor, ...] = ()

    @property
    def given(self) -> list[torch.Tensor]:
        """The inputs in order, without values."""
        names = set(self.exported.graph_signature.user_inputs)
        return [n.meta["val"] for n in self.exported.graph.nodes if n.op == "placeholder" and n.name in names]


class Chosen(nn.Module):
    """A wrapper that takes its inputs as one flat list and returns the model's own outputs and ``wanted`` values."""

    def __init__(self, wrapper: Wrapper, wanted: Sequence[str]) -> None:
        super().__init__()
        self.wrapper = wrapper
        self.wanted = tuple(wanted)
        self.decoder = isinstance(wrapper, DecoderWrapper)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs in the order of :meth:`names`."""
        given: tuple[Any, ...] = (*inputs[:3], list(inputs[3:])) if self.decoder else (list(inputs),)
        results = self.wrapper(*given)
        values = dict(zip(self.wrapper.traced.names, results, strict=True))
        return tuple(values[name] for name in self.names())

    def names(self) -> tuple[str, ...]:
        """Return the outputs' names, once the module has been traced."""
        traced = self.wrapper.traced
        return (*traced.outputs, *(n for n in self.wanted if n in traced.taps and n not in traced.outputs))


def trace_program(
    model: LoadedModel,
    taps: Sequence[Tap],
    profile: ShapeProfile,
    named: Sequence[tuple[str, int, str]] = (),
    *,
    operators: bool = False,
) -> Program:
    """Trace a model in its own dtype; ``named`` are dimensions, and ``operators`` tells whether the taps were named
    with those of the model's own code among them, as :func:`~ditto_core.model.export.export` takes both.

    Raises :class:`BuildError` with the exporter's innermost complaint.
    """
    wrapper = wrap(model, named)
    wrapper.operators = operators
    program = _trace(model, wrapper, taps, profile)
    if isinstance(wrapper, ModuleWrapper) and wrapper.doubled and frozen_rows(program, wrapper):
        wrapper.doubles = False  # not frozen to two rows where the example has one
        program = _trace(model, wrapper, taps, profile)
    return program


def _trace(model: LoadedModel, wrapper: Wrapper, taps: Sequence[Tap], profile: ShapeProfile) -> Program:
    chosen = Chosen(wrapper, tuple(dict.fromkeys(tap.value for tap in taps)))

    def trace() -> tuple[torch.export.ExportedProgram, tuple[Any, ...], list[str]]:
        arguments, dynamic, names = wrapper.signature()
        inputs = tuple(flat(arguments))
        shapes = {"inputs": bounded(dynamic, profile, [wrapper.dimensions[name] for name in names], inputs)}
        return torch.export.export(chosen, inputs, dynamic_shapes=shapes, strict=False), arguments, names

    with quiet(), torch.no_grad(), own_symbols(not (model.decoder or model.later)), Buffers(model.module).kept():
        run_once(model, wrapper, wrapper.signature()[0])
        exported, arguments, names = held_where_read(model, wrapper, trace)
        exported = without_regions(exported)
    allow_short(exported)
    known = wrapper.traced.names
    refused = {tap.site: "no module of the model returns it" for tap in taps if tap.value not in known}
    past = zip(names[3:], arguments[3], strict=True) if model.decoder else ()
    return Program(
        exported,
        tuple(names),
        chosen.names(),
        tuple(tap for tap in taps if tap.value in known),
        refused,
        tuple(unfilled(cache, wrapper.dimensions[name]) for name, cache in past),
    )


def frozen_rows(program: Program, wrapper: Wrapper) -> bool:
    """Tell whether the model's code leaves one batch only."""
    return any(
        dimension == BATCH and is_concrete_int(tensor.shape[axis])
        for name, tensor in zip(program.inputs, program.given, strict=True)
        for axis, dimension in wrapper.dimensions[name].items()
    )


def without_regions(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program in which ``torch.autocast`` and ``torch.enable_grad`` are no graphs of their own, which
    ``torch.compile`` refuses where a size varies: their operators are in it, with the casts that autocast adds."""
    regions = [node for node in exported.graph.nodes if str(node.target).startswith("wrap_with_")]
    return exported.run_decompositions({}) if regions else exported


def allow_short(exported: torch.export.ExportedProgram) -> None:
    """Lower the least of each dynamic size to 2, which torch takes for any: traced sizes are 2 or more, so a sum of
    two, past + length, would have to be 4 or more."""
    constraints = exported.range_constraints
    for symbol, sizes in list(constraints.items()):
        if sizes.lower > LEAST:
            constraints[symbol] = ValueRanges(LEAST, sizes.upper)


def unfilled(state: torch.Tensor, dimensions: Mapping[int, str]) -> torch.Tensor:
    """Return one row of a state that no step has filled: of one that grows nothing, of another its zeros."""
    row = torch.zeros_like(state[:1])
    return row[:, :, :0] if PAST in dimensions.values() else row


def flat(arguments: Sequence[Any]) -> list[Any]:
    """Return tensors, and those of lists, in one list."""
    return [each for item in arguments for each in (item if isinstance(item, list) else [item])]


def bounded(
    dynamic: dict[str, Any],
    profile: ShapeProfile,
    names: Sequence[Mapping[int, str]],
    inputs: Sequence[torch.Tensor],
) -> tuple[dict[int, Any], ...]:
    """Return the dynamic sizes of the flat inputs, each within the profile; ``names`` are those of their dimensions.

    Of a model that is not a decoder the batch has bounds, and what the user named.
    """
    if "past" not in dynamic:
        ranges = {BATCH: profile.batch, **dict(profile.more)}
        return tuple(
            {axis: bound(Dim.AUTO, ranges.get(name), tensor.shape[axis]) for axis, name in sizes.items()}
            for sizes, tensor in zip(names, inputs, strict=True)
        )
    rows, count = inputs[0].shape
    total = inputs[1].shape[1]
    batch, length = bound(Dim.DYNAMIC, profile.batch, rows), bound(Dim.DYNAMIC, profile.length, count)
    past = bound(Dim.DYNAMIC, profile.past, total - count)
    least = profile.length.min + profile.past.min
    sums = Range(least, least, length.max + past.max)
    tokens = {0: batch, 1: length}
    return (
        tokens,
        {0: batch, 1: bound(Dim.DYNAMIC, sums, total)},
        tokens,
        *({axis: past if axis else batch for axis in axes} for axes in dynamic["past"]),
    )


def bound(kind: Any, size: Range | None, traced: int) -> Any:
    """Return a dynamic size with the bounds of the profile, where it has any.

    They are wide enough for the size that is traced, and for two sizes: torch takes a single one for a constant, and 1
    for 2.
    """
    return kind(min=min(size.min, traced), max=max(size.max, traced, LEAST + 1)) if size else kind
