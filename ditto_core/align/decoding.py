"""The edges between steps: a cache that goes into the wrong layer is right in the first step and wrong in the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.align import eager
from ditto_core.align.aligning import final_places
from ditto_core.align.alignment import Place
from ditto_core.align.binding import Binding, Slot, computed_from
from ditto_core.align.fault import Fault
from ditto_core.align.parts import outputs_of
from ditto_core.align.probes import HELD_OUT, probe
from ditto_core.align.verify import SEED, WORSE, distance
from ditto_core.errors import DittoError
from ditto_core.model.forward import Forward

if TYPE_CHECKING:
    from ditto_core.align.aligning import Study

STEPS = 2
"""Tokens that are decoded after the prompt, one at a time."""


def decoding_fault(study: Study) -> Fault | None:
    """Return what goes wrong in the steps after the first, where the first is right; nothing for a model without any.

    The cache's outputs are given to its inputs as the file computes one from the other: where that is right and what
    their names say is not, the names are exchanged.
    """
    binding = study.binding
    finals = {name: place for name, place in final_places(study) if place.error <= study.matching.tolerance}
    if not binding.cache or not finals:
        return None
    steps = list(prompts(study))
    expected = reference(study, steps)
    error, site = worst(study, binding, finals, steps, expected)
    if error <= WORSE * study.matching.tolerance:
        return None
    traced = tuple(replace(slot, output=computed_from(study.file, port_of(study, slot))) for slot in binding.cache)
    moved = [(a, b) for a, b in zip(binding.cache, traced, strict=True) if a.output != b.output and b.output]
    fixed = worst(study, replace(binding, cache=traced), finals, steps, expected)[0] if moved else error
    cause = ""
    if fixed <= WORSE * study.matching.tolerance:
        pairs = "; ".join(f"{a.input} is continued by {b.output}, not by {a.output}" for a, b in moved)
        cause = f"wiring: {pairs}"
    state = f"off by {error:.1e}" if math.isfinite(error) else "fails"
    gives = (f"{finals[site].value} = {site}, {state} in a step after the first",)
    names = tuple(slot.input for slot, _ in moved) if cause else ()
    return Fault(", ".join(names) or finals[site].value, "cache", site, "", (), gives, (), cause=cause, involved=names)


def port_of(study: Study, slot: Slot) -> Any:
    """Return the input of a slot."""
    return next(port for port in study.file.inputs if port.name == slot.input)


def prompts(study: Study) -> Sequence[Mapping[str, torch.Tensor]]:
    """Return the inputs of each step: a held-out prompt, then single tokens; the mask covers all tokens so far."""
    batch, length = study.batches[0], HELD_OUT
    whole = probe(study.model, batch, length + STEPS, seed=SEED).inputs
    ends = [length, *range(length + 1, length + STEPS + 1)]
    starts = [0, *ends[:-1]]
    return [
        {name: t[:, : ends[i]] if name == "attention_mask" else t[:, starts[i] : ends[i]] for name, t in whole.items()}
        for i in range(len(ends))
    ]


def reference(study: Study, steps: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return the model's outputs in each step."""
    forward = Forward(eager.in_float32(study.model).module, decoder=True)
    forward.start()
    with torch.no_grad():
        return [dict(forward(inputs)) for inputs in steps]


def worst(
    study: Study,
    binding: Binding,
    finals: Mapping[str, Place],
    steps: Sequence[Mapping[str, torch.Tensor]],
    expected: Sequence[Mapping[str, torch.Tensor]],
) -> tuple[float, str]:
    """Return the largest relative L2 error of a final output after the first step, and which one it is."""
    graph = study.file.copy()
    batch = steps[0]["input_ids"].shape[0]
    cache, past = binding.empty(batch), 0
    names = [value.name for value in graph.graph.output]
    errors = [(0.0, next(iter(finals)))]
    for number, inputs in enumerate(steps):
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        try:
            found = outputs_of(study.file, graph, {**binding.feed(arrays, past), **cache}, names)
        except DittoError:
            return float("inf"), errors[0][1]
        cache = {slot.input: found[slot.output] for slot in binding.cache}
        past += inputs["input_ids"].shape[1]
        if number:
            errors += [
                (distance(place, found[place.value], expected[number][name].float().numpy(), None, batch), name)
                for name, place in finals.items()
            ]
    return max(errors)
