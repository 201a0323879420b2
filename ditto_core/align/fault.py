"""Where a file goes wrong: the first operators whose inputs are all right and whose output is not.

A value of the file is right when it agrees with a site, or when one that agrees is computed from it. What an operator
reads and gives is told as sites of the model with their source lines. Values can be right and in the wrong place, as
after an exchange of two weights: what the operator reads is compared with what the model reads there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ditto_core.align.matching import Matching
from ditto_core.align.nearest import candidates, column_blocks
from ditto_core.align.values import Value, with_ancestors

MOST_READS = 4
"""So many sites are named for what the model reads."""


@dataclass(frozen=True)
class Fault:
    """One operator of a file that computes wrongly from right inputs.

    ``site`` is the first site that is wrong, ``source`` its line in the model's code. ``reads`` and ``gives`` describe
    the operator's inputs and outputs, ``model_reads`` are the nearest right sites that the model computes it from.
    ``misplaced`` are right values that the model does not read there. ``columns`` are the wrong ones of packed outputs.
    ``cause`` is the one change that makes the operator right, ``involved`` are other operators that it is about.
    """

    node: str
    operator: str
    site: str
    source: str
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    model_reads: tuple[str, ...]
    misplaced: tuple[str, ...] = ()
    columns: tuple[tuple[int, int], ...] = ()
    outputs: tuple[str, ...] = ()
    cause: str = ""
    involved: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = "" if self.source in self.site else f" ({self.source})"
        lines = [f"{self.operator} {self.node}: first wrong site {self.site}{line}"]
        lines += [f"  reads {text}" for text in self.reads]
        lines += [f"  gives {text}" for text in self.gives]
        if self.columns:
            lines.append("  wrong columns " + ", ".join(f"{start}:{stop}" for start, stop in self.columns))
        if self.cause:
            lines.append(f"  {self.cause}")
        elif self.misplaced:
            lines.append(
                f"  wired wrongly: it reads {', '.join(self.misplaced)}, the model {', '.join(self.model_reads)}"
            )
        elif self.model_reads:
            lines.append(f"  the model computes it from {', '.join(self.model_reads)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


class Judged:
    """Which sites and values of a matching are right, and the first that are not."""

    def __init__(self, matching: Matching) -> None:
        self.matching = matching
        sites, values = matching.sites, matching.values
        self.right_sites = matching.vouched
        agreeing = {i: m for i, m in matching.matches.items() if matching.right(m)}
        whole = {m.value for m in agreeing.values() if values[m.value].base < 0}
        kinds = {matching.value_class[i] for i in whole}
        self.right_values = with_ancestors(
            values, matching.value_class, {i for i, kind in matching.value_class.items() if kind in kinds}
        )
        right = sorted(agreeing)
        self.columns = {base: gaps(matching, matching.values, base, right).gaps for base in self._bases()}
        covered = [base for base, gaps in self.columns.items() if not gaps]
        self.right_values |= with_ancestors(values, matching.value_class, covered)
        named = [i for i, site in enumerate(sites) if site.sites and i in matching.site_class]
        self._useful = with_ancestors(sites, matching.site_class, named)

    def wrong_sites(self) -> list[int]:
        """Return the first sites that are wrong: what they are computed from is right."""
        kinds, sites = self.matching.site_class, self.matching.sites
        wrong = (i for i in kinds if i in self._useful - self.right_sites)
        return [i for i in wrong if all(p in self.right_sites or p not in kinds for p in sites[i].parents)]

    def wrong_values(self) -> list[int]:
        """Return the first values of the file that are wrong.

        A cache that keeps the last tokens only is no site: it is right where its operator's other output is.
        """
        kinds, values = self.matching.value_class, self.matching.values
        fine = {values[i].where for i in self.right_values if values[i].vouches}
        wrong = (i for i in kinds if i not in self.right_values and (values[i].vouches or values[i].where not in fine))
        return [i for i in wrong if all(p in self.right_values or p not in kinds for p in values[i].parents)]

    def called(self, value: int) -> str:
        """Name a value of the file and the site that it is."""
        matching = self.matching
        kind = matching.value_class.get(value, value)
        parts = []
        for site in matching.sites_of.get(kind, [])[:3]:
            found = matching.matches[site]
            columns = matching.values[found.value].columns
            place = f" at columns {columns[0]}:{columns[1]}" if columns else ""
            state = "right" if matching.right(found) else f"off by {found.error:.1e}"
            parts.append(f"{matching.title(site)}{place}, {state}")
        known = "; ".join(parts) or (
            "right, no site of the model" if value in self.right_values else "no site of the model"
        )
        return f"{matching.values[value].name} = {known}"

    def _bases(self) -> set[int]:
        values = self.matching.values
        return {values[m.value].base for m in self.matching.matches.values()} - {-1}


@dataclass(frozen=True)
class Covered:
    """What columns of a packed value are: the right ``sites`` in it, and the ``gaps`` that are none."""

    sites: frozenset[int]
    gaps: tuple[tuple[int, int], ...]


def gaps(matching: Matching, values: list[Value], base: int, kinds: Sequence[int]) -> Covered:
    """Return which of the sites ``kinds`` the columns of a packed value are, within the tolerance."""
    blocks = column_blocks(values, [base], matching.sites, kinds)
    near = candidates(matching.sites, blocks, kinds, range(len(blocks)), matching.tolerance)
    hits = {c.value for found in near.values() for c in found}
    place, open_ones = 0, []
    for start, stop in sorted(columns for i in hits if (columns := blocks[i].columns)):
        if start > place:
            open_ones.append((place, start))
        place = max(place, stop)
    width = values[base].dims[-1][0] if values[base].dims else 0
    rest = ((place, width),) if place < width or not width else ()
    return Covered(frozenset(near), (*open_ones, *rest))


def faults(matching: Matching) -> list[Fault]:
    """Return the operators at which a file goes wrong, in the file's order; none when every site is right or absent."""
    judged = Judged(matching)
    sites = judged.wrong_sites()
    if not sites:
        return []
    groups: dict[tuple[str, str], list[int]] = {}
    for value in judged.wrong_values():
        found = matching.values[value]
        groups.setdefault((found.where, found.operator), []).append(value)
    return [fault_at(judged, sites, group) for group in groups.values()]


def fault_at(judged: Judged, wrong: Sequence[int], group: Sequence[int]) -> Fault:
    """Describe the operator that makes the values ``group``."""
    matching = judged.matching
    first = matching.values[group[0]]
    outputs = [
        i
        for i in matching.value_class
        if (matching.values[i].where, matching.values[i].operator) == (first.where, first.operator)
    ]
    site = nearest_wrong(judged, wrong, group)
    reads = [parent for parent in first.parents if parent in matching.value_class]
    expected = list(right_sources(judged, site))
    gaps = tuple(gap for value in outputs for gap in judged.columns.get(value, ()))
    return Fault(
        first.where,
        first.operator,
        judged.matching.title(site),
        matching.sites[site].where,
        tuple(judged.called(parent) for parent in reads),
        tuple(judged.called(value) for value in outputs if matching.values[value].base < 0),
        tuple(dict.fromkeys(judged.matching.title(i) for i in expected))[:MOST_READS],
        tuple(misplaced(judged, site, reads, expected)),
        gaps,
        tuple(matching.values[value].name for value in group),
    )


def nearest_wrong(judged: Judged, wrong: Sequence[int], group: Sequence[int]) -> int:
    """Return the wrong site that the values ``group`` were found to be, else one that reads what their node reads."""
    matching = judged.matching
    for value in group:
        for site in matching.sites_of.get(matching.value_class[value], []):
            if site in wrong:
                return site
    read = {site for parent in matching.values[group[0]].parents for site in sites_at(judged, parent)}
    shared = {site: len(read & {matching.site_class[i] for i in right_sources(judged, site)}) for site in wrong}
    return max(wrong, key=lambda site: (shared[site], -site))


def sites_at(judged: Judged, value: int) -> list[int]:
    """Return the classes of the right sites that a value is."""
    matching = judged.matching
    found = matching.sites_of.get(matching.value_class.get(value, value), [])
    return [site for site in found if matching.right(matching.matches[site])]


def right_sources(judged: Judged, site: int) -> Iterator[int]:
    """Yield the nearest sites that agree and that a site is computed from."""
    matching = judged.matching
    waiting, seen = list(matching.sites[site].parents), set()
    while waiting:
        index = waiting.pop(0)
        if index in seen:
            continue
        seen.add(index)
        if index in matching.agreeing:
            yield index
        else:
            waiting += matching.sites[index].parents


def misplaced(judged: Judged, site: int, reads: Sequence[int], expected: Sequence[int]) -> Iterator[str]:
    """Yield the right sites that an operator reads and the model does not, one step around the wrong site."""
    matching = judged.matching
    read = {kind for parent in reads for kind in sites_at(judged, parent)}
    if not read or not expected:
        return
    kinds = {matching.site_class[i] for i in expected}
    upstream = {
        matching.site_class[i] for i in with_ancestors(matching.sites, {}, expected) if i in matching.site_class
    }
    if read & kinds:
        return
    for kind in sorted(read):
        far = kind in upstream and kind not in kinds
        if kind not in upstream or far:
            yield judged.matching.title(kind)
