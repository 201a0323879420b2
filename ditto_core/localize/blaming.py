"""From flagged results to blamed sites: whose code computes them, and from what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ditto_core.compare.blame import Blame, LocalResult
from ditto_core.sites import is_operator

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.graphs.graph import Graph
    from ditto_core.sites import Tap


def blame(
    results: Sequence[LocalResult], taps: Sequence[Tap], comparison: Comparison | None, graph: Graph | None
) -> tuple[Blame, ...]:
    """Turn flagged results into blamed sites, with what the comparison and the exported graph know of each."""
    by_site: dict[str, list[LocalResult]] = {}
    for result in sorted((r for r in results if r.flagged), key=lambda r: (r.step, r.order)):
        by_site.setdefault(result.site, []).append(result)
    known = {} if comparison is None else {(r.step, r.site): r.metrics.rel_l2 for r in comparison.results}
    tap_of = {tap.site: tap for tap in taps}
    blamed = [blame_site(tap_of[site], found, known) for site, found in by_site.items()]
    return tuple(blamed if graph is None else (with_segment(b, tap_of[b.site], graph, taps) for b in blamed))


def blame_site(tap: Tap, found: Sequence[LocalResult], accumulated: Mapping[tuple[int, str], float]) -> Blame:
    """Describe one flagged site from its results, the earliest first."""
    first = found[0]
    return Blame(
        tap.site,
        owner(tap.site) if tap.module_class else "",  # what no module returned, the model's own code computed
        tap.module_class,
        tap.source,
        first.step,
        tuple(result.step for result in found),
        first.metrics.rel_l2,
        first.floor,
        first.bound,
        accumulated.get((first.step, tap.site)),
    )


def owner(site: str) -> str:
    """Return the module whose code computes a site: itself, or for an input the module around it."""
    path, _, port = site.partition(":")
    path = path.rpartition(".")[0] if is_operator(site) else path  # without the function
    path = path.split("@")[0]
    return path.rpartition(".")[0] if port == "in" or port.startswith("in.") else path


def with_segment(blamed: Blame, tap: Tap, graph: Graph, taps: Sequence[Tap]) -> Blame:
    """Add the operators between a site and the nearest sites upstream."""
    segment = graph.segment(tap.value, {t.value for t in taps})
    sites = {t.value: t.site for t in taps}
    names = tuple(sites.get(value, value) for value in segment.inputs)
    # Behind the last module it is the model's own code that computes an output: the last of its lines.
    source = blamed.source or next((op.source for op in reversed(segment.operators) if op.source), "")
    return replace(blamed, inputs=names, source=source, operators=tuple(str(op) for op in segment.operators))
