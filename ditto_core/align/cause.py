"""Why an operator of a file is wrong: the one change under which it gives, alone, what the model has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ditto_core.align.alone import Change, Operator
from ditto_core.align.changes import changes
from ditto_core.align.fault import Fault, Judged, faults, gaps, nearest_wrong, right_sources, sites_at
from ditto_core.align.matching import Matching
from ditto_core.align.nearest import candidates
from ditto_core.align.values import Array, Value
from ditto_core.errors import DittoError, SelectorError

if TYPE_CHECKING:
    from ditto_core.align.aligning import Sides

HEALED = 3
"""An exchange makes more sites right than those that follow at once."""


@dataclass(frozen=True)
class Explained:
    """A fault with its cause, and the values that are right in the place of its operator's outputs, by name."""

    fault: Fault
    put: Mapping[str, Sequence[Array]] = field(default_factory=dict)


def explained(study: Sides, fault: Fault) -> Explained:
    """Return the fault with the change that makes its operator right, or as it is where none does.

    A wrong input moves the blame to the operator that computes it.
    """
    matching = study.matching
    judged = Judged(matching)
    group = [i for i, value in enumerate(matching.values) if value.name in fault.outputs and value.base < 0]
    sites = judged.wrong_sites()
    if not group or not sites:
        return Explained(fault)
    site = nearest_wrong(judged, sites, group)
    try:
        operator = Operator(study, fault.node)
    except SelectorError:
        return Explained(fault)
    for change in changes(operator, site):
        made = outcome(operator, change)
        if made and heals(matching, made):
            return blamed(study, fault, change, made)
    return next(exchanges(study, fault, judged, site, group[0]), Explained(fault))


def exchanges(study: Sides, fault: Fault, judged: Judged, site: int, first: int) -> Iterator[Explained]:
    """Yield the exchange of what an operator reads with what the model reads there, if it heals what follows.

    As by two exchanged weights: every value is right and in the other's place.
    """
    matching = study.matching
    values = matching.values
    held = [values[m.value] for i in right_sources(judged, site) if (m := matching.of(i)) and matching.right(m)]
    for parent in values[first].parents:
        for other in held:
            one = values[parent]
            if other.base >= 0 or one is other or one.dims != other.dims or not sites_at(judged, parent):
                continue
            put = {one.name: other.arrays, other.name: one.arrays}
            healed = study.again(put).matching
            if len(healed.agreeing) > len(matching.agreeing) + HEALED and not at(healed, fault.node):
                text = f"wiring: {one.name} and {other.name} are exchanged, or what makes them is"
                yield Explained(replace(fault, cause=text, involved=(one.where, other.where)), put)


def at(matching: Matching, node: str) -> bool:
    """Tell whether a file is wrong at an operator."""
    return any(fault.node == node for fault in faults(matching))


def outcome(operator: Operator, change: Change) -> list[Value]:
    """Return what an operator gives with a change; nothing where ONNX Runtime refuses it."""
    try:
        return operator.outputs(change)
    except DittoError:
        return []


def heals(matching: Matching, made: Sequence[Value]) -> bool:
    """Tell whether all of the outputs are the model's values, and one of them a value that the file lacks."""
    sites, kinds = matching.sites, sorted(set(matching.site_class.values()))
    near = candidates(sites, made, kinds, range(len(made)), matching.tolerance)
    hits = {(site, c.value) for site, found in near.items() for c in found}
    new = any(site not in matching.agreeing for site, _ in hits)
    for index in set(range(len(made))) - {value for _, value in hits}:
        blocks = gaps(matching, list(made), index, kinds)
        if blocks.gaps:
            return False
        new = new or any(site not in matching.agreeing for site in blocks.sites)
    return new


def blamed(study: Sides, fault: Fault, change: Change, made: Sequence[Value]) -> Explained:
    """Return the fault with its cause, at the operator that is to blame."""
    node = next((v for v in study.matching.values if v.where == change.moves), None)
    cause = f"{change.kind}: {change.text}"
    if node is None:
        put = {value.name: value.arrays for value in made}
        return Explained(replace(fault, cause=cause, involved=change.involved), put)
    moved = replace(
        fault,
        node=node.where,
        operator=node.operator,
        cause=cause,
        involved=change.involved,
        outputs=tuple(change.put),
    )
    return Explained(moved, change.put)
