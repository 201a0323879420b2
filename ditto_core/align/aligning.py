"""Run a model and a file on the probes and map the tensors that belong together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ditto_core.align import eager, running
from ditto_core.align.alignment import Alignment, Place
from ditto_core.align.binding import Binding
from ditto_core.align.file import OnnxFile
from ditto_core.align.integers import integer_places
from ditto_core.align.layout import Layout, layouts, product
from ditto_core.align.matching import TOLERANCES, Match, Matching, match
from ditto_core.align.nearest import Candidate, candidates, flat, laid_out, worst_error
from ditto_core.align.origin import ModelOrigin, Origin
from ditto_core.align.parts import Feeds, Runnable
from ditto_core.align.probes import BATCHES, OWN, PADDING, Probe, probes, untried_window, with_inputs_of
from ditto_core.align.values import Value
from ditto_core.errors import RunError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ditto_core.model.loading import LoadedModel

CACHE = "present."


@dataclass
class Sides:
    """A file and the right side on the same inputs. ``feeds`` are the file's, ``origin`` is what the sites are of."""

    file: Runnable
    feeds: Feeds
    matching: Matching
    origin: Origin

    def again(self, forced: running.Forced) -> Self:
        """Return both sides with some of the file's values given instead of computed."""
        batches = self.matching.values[0].batches
        values = running.capture(self.file, self.feeds, batches, forced)
        return replace(self, matching=match(self.matching.sites, values, self.matching.tolerance))


@dataclass
class Study(Sides):
    """A file and a model on the probes, and what of the two belongs together."""

    file: OnnxFile
    model: LoadedModel
    probes: Sequence[Probe]
    binding: Binding
    finals: Mapping[str, int]
    batches: tuple[int, ...]

    def padded(self) -> Study:
        """Return the study on probes whose last row is padded."""
        ran = probes(self.model, self.batches, PADDING)
        return of_both(self.model, self.file, self.binding, ran, *eager.capture(self.model, ran), self.batches)


def study(model: LoadedModel, file: OnnxFile, inputs: Mapping[str, str] | None = None, tolerance: float = 0.0) -> Study:
    """Run both sides on the probes and match their values. ``inputs`` are roles of the file's inputs by name.

    ``tolerance``: the relative L2 of values that agree; 0 is what the file's dtype has.
    Raises :class:`UsageError` when an input of the file fits nothing, :class:`~ditto_core.errors.RunError` when a side
    fails.
    """
    model = with_inputs_of(model, file.inputs)
    batches = running.takes(file)
    if model.decoder and batches == OWN:
        batches = BATCHES
    try:
        ran = probes(model, batches)
        sites, finals = eager.capture(model, ran)
    except RunError:
        if model.decoder or not any(batches):
            raise
        batches = OWN  # rows of one input belong to several of another: nodes of a graph and its edges
        ran = probes(model, batches)
        sites, finals = eager.capture(model, ran)
    binding = running.bind(file, model, ran, {name: sites[i] for name, i in finals.items()}, inputs or {})
    return of_both(model, file, binding, ran, sites, finals, batches, tolerance)


def of_both(
    model: LoadedModel,
    file: OnnxFile,
    binding: Binding,
    ran: Sequence[Probe],
    sites: Sequence[Value],
    finals: Mapping[str, int],
    batches: tuple[int, ...],
    tolerance: float = 0.0,
) -> Study:
    """Run the file and match its values with the model's."""
    feeds = [running.fed(binding, probe) for probe in ran]
    values = running.capture(file, feeds, tuple(probe.batch for probe in ran))
    matching = match(sites, values, tolerance or TOLERANCES.get(file.dtype, TOLERANCES["float32"]))
    return Study(file, feeds, matching, ModelOrigin(model.module), model, ran, binding, finals, batches)


def concluded(found: Study) -> Alignment:
    """Return the map that a study found. Raises :class:`UsageError` when no output of the file is the model's."""
    matching = found.matching
    integers = dict(integer_places(found.model, found.file, found.probes, found.feeds))
    finals = {**dict(final_places(found)), **{name: place for name, place in integers.items() if place}}
    if not finals:
        names = ", ".join(port.name for port in found.file.outputs)
        raise UsageError(f"none of the file's outputs ({names}) has the shape of an output of {found.model.label}")
    sites: dict[str, Place] = {}
    reasons: dict[str, dict[str, str]] = {"hidden": {}, "absent": {}, "ambiguous": {}}
    for index, value in enumerate(matching.sites):
        if not value.sites:
            continue
        kind, reason = verdict(matching, index)
        if kind:
            reasons[kind] |= dict.fromkeys(value.sites[:1], reason)
        elif (place := place_of(matching, index)) is not None:
            sites[place.site] = place
    returned = (*final_names(found), *integers)
    missing = {name: "not among the file's outputs" for name in returned if name not in finals}
    file = found.file
    return Alignment(
        file.path.name,
        file.digest,
        file.dtype,
        file.quantization,
        matching.tolerance,
        found.binding,
        finals,
        sites,
        reasons["hidden"],
        {**reasons["absent"], **missing},
        reasons["ambiguous"],
        notes=tuple(remarks(found)),
    )


def remarks(found: Study) -> Iterator[str]:
    """Yield what the probes could not try."""
    if window := untried_window(found.model):
        yield f"the attention window of {window} tokens is longer than any probe: a wrong window would not show"
    if found.batches == OWN:
        yield "aligned on inputs of the example's sizes only"
    elif len(set(found.batches)) == 1:
        yield f"the file takes batches of {found.batches[0]} only"


def verdict(matching: Matching, index: int) -> tuple[str, str]:
    """Return why a site cannot be compared: (``hidden``, ``absent`` or ``ambiguous``, reason); empty where it can."""
    found = matching.of(index)
    if found is not None and found.before_bias:
        return "hidden", "only before its bias in this file"
    if found is not None and not matching.right(found) and found.ambiguous:
        return (
            "ambiguous",
            f"{matching.values[found.value].name} is {found.error:.1e} off, another value nearly as near",
        )
    if found is not None:
        return "", ""
    if index in matching.vouched:
        return "hidden", "inside of a fused operator; what is computed from it agrees"
    if index not in matching.site_class:
        return "hidden", "a constant of few numbers"
    return "absent", "no value of the file is it, nor is one that agrees computed from it"


def place_of(matching: Matching, index: int) -> Place | None:
    """Return where the file holds a site, in the site's own shape: of equal values the one that is laid out alike."""
    found = matching.of(index)
    assert found is not None
    site = matching.sites[index]
    options = [(j, layout) for j in equals(matching, found) for layout in layouts_for(matching.values[j], site)]
    best = min(
        ((measured(matching.values[j], site, layout), not layout.plain, j, i) for i, (j, layout) in enumerate(options)),
        default=None,
    )
    if best is None or best[0] > max(2 * found.error, matching.tolerance):
        return None
    error, _, j, i = best
    plain = next(
        (o for o in options if o[1].plain and measured(matching.values[o[0]], site, o[1]) <= error * 1.5), None
    )
    j, layout = plain or options[i]
    return placed(site.sites[0], matching.values, j, layout, error, found.ratio)


def equals(matching: Matching, found: Match) -> list[int]:
    """Return the values that hold the numbers of a match, columns of a packed one alone."""
    if matching.values[found.value].base >= 0:
        return [found.value]
    kind = matching.value_class[found.value]
    return [j for j, other in matching.value_class.items() if other == kind]


def layouts_for(value: Value, site: Value) -> Sequence[Layout]:
    """Return the layouts from a value to a site."""
    return layouts(value.dims, site.dims, value.batches)


def measured(value: Value, site: Value, layout: Layout) -> float:
    """Return the relative L2 error of a value in a layout, on the worst probe."""
    ends = np.cumsum(product(site.dims))[:-1]
    return worst_error(laid_out(value, layout), flat(site), ends)


def placed(site: str, values: Sequence[Value], index: int, layout: Layout, error: float, ratio: float) -> Place:
    """Return the place of a value, or of the packed value that it is a block of."""
    value = values[index]
    name = values[value.base].name if value.base >= 0 else value.name
    return Place(site, name, layout, value.columns, error, ratio)


def final_names(found: Study) -> list[str]:
    """Return the names of the model's own outputs, without the cache."""
    return [name for name in found.finals if not (found.model.decoder and name.startswith(CACHE))]


def final_places(found: Study) -> Iterator[tuple[str, Place]]:
    """Yield the place of each final output that the file has: by its name, else the nearest output of its shape."""
    values, sites = found.matching.values, found.matching.sites
    outputs = {port.name for port in found.file.outputs} - {slot.output for slot in found.binding.cache}
    ends = [i for i, value in enumerate(values) if value.name in outputs and value.base < 0]
    near: dict[str, list[Candidate]] = {}
    for name in final_names(found):
        index = found.finals[name]
        right = preferred(values, ends, name)
        near[name] = candidates(sites, values, [index], right, most=float("inf")).get(index, [])
    taken: set[int] = set()
    for name in sorted(near, key=lambda name: nearness(values, name, near[name])):
        left = [each for each in near[name] if each.value not in taken or each.error <= found.matching.tolerance]
        if left:
            taken.add(left[0].value)
            yield name, placed(name, values, left[0].value, left[0].layout, left[0].error, 0.0)
        elif not near[name] and (last := last_token(values, ends, sites[found.finals[name]])):
            yield name, last


def nearness(values: Sequence[Value], name: str, near: Sequence[Candidate]) -> tuple[bool, float]:
    """Return what outputs are given away by: the one of the name first, then the nearest."""
    return (values[near[0].value].name != name, near[0].error) if near else (True, float("inf"))


def preferred(values: Sequence[Value], ends: Iterable[int], name: str) -> list[int]:
    """Return the output of this name, or all."""
    ends = list(ends)
    return [i for i in ends if values[i].name == name] or ends


def last_token(values: Sequence[Value], ends: Iterable[int], site: Value) -> Place | None:
    """Return the output [batch, 1, vocab] of a file that computes the last token's logits alone."""
    for i in ends:
        if len(site.dims) == 3 and values[i].dims == (site.dims[0], (1,) * len(site.arrays), site.dims[2]):
            errors = [
                worst_error(ours.ravel(), theirs[:, -1:].ravel(), np.array([], np.int64))
                for ours, theirs in zip(values[i].clean, site.clean, strict=True)
            ]
            axes = (("b",), ("t",), ("c",))
            return Place("logits", values[i].name, Layout(axes, axes), None, max(errors))
    return None
