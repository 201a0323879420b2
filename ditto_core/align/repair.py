"""Repair and continue: the right value replaces the wrong one, the rest runs again, and the next fault shows.

A repair is taken when it heals what follows, and when the next fault is elsewhere: of an operator with two wrong
outputs, one right output heals some of it and leaves the rest wrong at the very same place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from ditto_core.align.binding import MASK
from ditto_core.align.cause import HEALED, Explained, explained
from ditto_core.align.decoding import decoding_fault
from ditto_core.align.fault import Fault, Judged, faults
from ditto_core.align.layout import layouts
from ditto_core.align.matching import Matching
from ditto_core.align.nearest import Candidate, candidates
from ditto_core.align.values import Array, Value

if TYPE_CHECKING:
    from ditto_core.align.aligning import Sides, Study

S = TypeVar("S", bound="Sides")

MOST_TRIES = 12
NEAR_SITES = 24
ANY_DISTANCE = 1e3


@dataclass(frozen=True)
class Repair:
    """A fault, and the sites whose values took the place of its operator's outputs; none when nothing healed."""

    fault: Fault
    sites: tuple[str, ...] = ()
    healed: int = 0

    def __str__(self) -> str:
        if not self.sites:
            return str(self.fault)
        return f"{self.fault}\n  with {', '.join(self.sites)} put in its place, {self.healed} more sites are right"


def all_faults(study: Study, most: int = 4) -> list[Repair]:
    """Return the faults of a file in order, each found after those before it are repaired.

    Where the probes show none, a decoder's later steps and an encoder's padded probes are looked at.
    """
    found = repaired(study, most)[0]
    if found or not most:
        return found
    later = decoding_fault(study)
    if later is not None:
        return [Repair(later)]
    masked = not study.model.decoder and MASK in study.binding.roles.values() and study.probes[0].batch > 1
    return repaired(study.padded(), most)[0] if masked else []


Taken: TypeAlias = tuple[Repair, dict[str, Sequence[Array]], S]
"""A repair, all values that are put in up to now, and both sides with them."""


def repaired(study: S, most: int, *, to_the_end: bool = False) -> tuple[list[Repair], S]:
    """Return the faults that the study's own probes show, and the sides with all of them but the last repaired.

    ``to_the_end``: with the last one, too.
    """
    found: list[Repair] = []
    forced: dict[str, Sequence[Array]] = {}
    seen: set[str] = set()
    while len(found) < most:
        new = [fault for fault in faults(study.matching) if fault.node not in seen]
        if not new:
            break
        seen.add(new[0].node)
        known = explained(study, new[0])
        last = len(found) + 1 == most and not to_the_end
        best = None if last else caused_repair(study, known, forced) or best_repair(study, new[0], forced)
        found.append(Repair(known.fault) if best is None else best[0])
        if best is None:
            found += [Repair(explained(study, other).fault) for other in new[1 : most - len(found) + 1]]
            break
        _, forced, study = best
    return found[:most], study


def caused_repair(study: S, known: Explained, forced: dict[str, Sequence[Array]]) -> Taken[S] | None:
    """Put what a fault's operator gives without its cause in its place, where that heals."""
    put = {**forced, **known.put}
    other = study.again(put) if known.put else study
    gain = len(other.matching.agreeing) - len(study.matching.agreeing)
    if gain <= 0:
        return None
    judged = {i: other.matching.title(i) for i in other.matching.matches if other.matching.right(other.matching.of(i))}
    at = {value.name: i for i, value in enumerate(other.matching.values)}
    sites = [i for name in known.put for i in other.matching.sites_of.get(other.matching.value_class[at[name]], [])]
    healed = tuple(judged[i] for i in sites if i in judged and i not in study.matching.agreeing)
    return Repair(known.fault, healed, gain), put, other


def best_repair(study: S, fault: Fault, forced: dict[str, Sequence[Array]]) -> Taken[S] | None:
    """Put the sites near a fault in the place of its operator's outputs; return the first repair that heals.

    It heals more than follows at once, or leaves nothing wrong.
    """
    before = len(study.matching.agreeing)
    for sites, values in itertools.islice(proposals(study, fault), MOST_TRIES):
        put = {**forced, **values}
        other = study.again(put)
        gain = len(other.matching.agreeing) - before
        healed = gain > HEALED * len(sites) and elsewhere(other, fault, values)
        if healed or (gain >= len(sites) and not Judged(other.matching).wrong_sites()):
            return Repair(fault, sites, gain), put, other
    return None


def elsewhere(study: Sides, fault: Fault, put: dict[str, Any]) -> bool:
    """Tell whether what is wrong after a repair is neither at the operator nor at one that reads what was put in."""
    values = study.matching.values
    for other in faults(study.matching):
        reads = {
            values[p].name for v in values if v.where == other.node and v.operator == other.operator for p in v.parents
        }
        if other.node == fault.node or reads & put.keys():
            return False
    return True


def proposals(study: Sides, fault: Fault) -> Iterator[tuple[tuple[str, ...], dict[str, Sequence[Array]]]]:
    """Yield what may be right in the place of the operator's wrong outputs, all at once, the likeliest first."""
    matching = study.matching
    judged = Judged(matching)
    sites, values = matching.sites, matching.values
    start = min(judged.wrong_sites(), default=0)
    kinds = sorted({kind for i, kind in matching.site_class.items() if kind >= start and i not in judged.right_sites})[
        :NEAR_SITES
    ]
    wrong = [i for i, value in enumerate(values) if value.name in fault.outputs and value.base < 0]
    near = candidates(sites, values, kinds, wrong, ANY_DISTANCE)
    choices = []
    for index in wrong:
        found = [(kind, c) for kind, all_near in near.items() for c in all_near if c.value == index]
        found.sort(key=lambda each: likeliness(matching, index, *each))
        matched = [each for each in found if each[0] in matching.sites_of.get(matching.value_class[index], [])]
        choices.append(matched or found[:MOST_TRIES])
    for chosen in sorted(
        itertools.product(*choices), key=lambda each: sum(choices[i].index(c) for i, c in enumerate(each))
    ):
        if len({kind for kind, _ in chosen}) == len(chosen):
            titles = tuple(matching.title(kind) for kind, _ in chosen)
            yield titles, {values[c.value].name: in_place(matching, kind, c) for kind, c in chosen}


def in_place(matching: Matching, kind: int, candidate: Candidate) -> Sequence[Array]:
    """Return the numbers of a class of sites in the shape of a value: of the member laid out alike, if there is one."""
    value = matching.values[candidate.value]
    same = (i for i, other in matching.site_class.items() if other == kind)
    alike = next((i for i in same if matching.sites[i].dims == value.dims), None)
    return inverse(value, matching.sites[kind], candidate) if alike is None else matching.sites[alike].arrays


def likeliness(matching: Matching, value: int, kind: int, candidate: Candidate) -> tuple[bool, bool, float]:
    """Order the sites that a wrong value should be: those of its shape first, then with a name, then the nearest."""
    sites = matching.sites
    same = [i for i, other in matching.site_class.items() if other == kind]
    alike = any(sites[i].dims == matching.values[value].dims for i in same)
    return not alike, not any(sites[i].sites for i in same), candidate.error


def inverse(value: Value, site: Value, candidate: Candidate) -> list[Array]:
    """Return a site's numbers in a value's shape."""
    for layout in layouts(site.dims, value.dims, value.batches):
        back = [layout.apply(array, batch) for array, batch in zip(site.arrays, value.batches, strict=True)]
        again = [candidate.layout.apply(array, batch) for array, batch in zip(back, value.batches, strict=True)]
        if all(np.array_equal(one, other) for one, other in zip(again, site.arrays, strict=True)):
            return [np.ascontiguousarray(array) for array in back]
    return [array.reshape(like.shape) for array, like in zip(site.arrays, value.arrays, strict=True)]
