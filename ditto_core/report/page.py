"""What the HTML page holds of a comparison: columns over steps x sites, details of the results that matter most."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ditto_core.compare.verdict import EXPLAINED
from ditto_core.report.samples import Element, Sample, sample_dump

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.compare.result import SiteResult

WITHIN, WIDENED, RECOVERED, DIVERGED, NOT_FINITE, NOT_JUDGED = range(1, 7)
"""States of a cell of the heat map, 0: not compared; the page's script knows the same numbers."""

STATES = ("not compared", "within", "explained", "recovered", "diverged", "not finite", "not judged")
ELEMENTS = {"max_abs_actual": 9, "max_abs_expected": 9}
"""Digits of what is an element itself: nine tell float32 numbers apart."""

LONGEST = 256
"""Entries of an error by position that are kept."""

SAMPLED_BESIDES = 50
"""Results that get a scatter plot beside the worst one of each site."""


@dataclass(frozen=True)
class Budget:
    """How much a page may hold: ``details`` results with all their metrics, ``points`` in all scatter plots."""

    details: int = 1500
    points: int = 60_000

    def halved(self) -> Budget:
        """Return half of it."""
        return Budget(self.details // 2, self.points // 2)


def run_data(comparison: Comparison, budget: Budget) -> dict[str, Any]:
    """Return everything that the page's script draws of one comparison, JSON-ready."""
    sites = comparison.sites
    place = {site: i for i, site in enumerate(sites)}
    detailed = by_importance(comparison)[: budget.details]
    sampled = detailed[: len(sites) + SAMPLED_BESIDES]
    points = min(2000, budget.points // max(1, len(sampled)))
    samples = sample_dump(comparison, sampled, points)

    def key(result: SiteResult) -> str:
        return f"{result.step}:{place[result.site]}"

    return {
        "steps": comparison.steps,
        "sites": [site_facts(comparison, site) for site in sites],
        "ticks": ticks(sites),
        **columns(comparison, place),
        "details": {key(r): details(r) for r in detailed},
        "samples": {key(r): sample_data(samples[r.step, r.site]) for r in sampled if (r.step, r.site) in samples},
        "kept": bool(samples),
        "kl": [[m.step, short(m.kl_mean), short(m.kl_max), short(m.top1_agreement)] for m in comparison.logits],
        "start": start(comparison, place),
    }


def state(result: SiteResult) -> int:
    """Return what became of a result."""
    m = result.metrics
    if not result.verdict.ok and not result.healed and (m.nan_mismatch or m.inf_mismatch):
        return NOT_FINITE
    if not result.verdict.ok:
        return RECOVERED if result.healed else DIVERGED
    if not result.verdict.judged:
        return NOT_JUDGED
    return WIDENED if result.verdict.status == EXPLAINED else WITHIN


def by_importance(comparison: Comparison) -> list[SiteResult]:
    """Return the results: the worst of each site, then those at fault in order, then the rest, worst first."""
    worst = list({r.site: r for r in reversed(list(comparison))}.values())
    return list({id(r): r for r in (*worst, *comparison.failures, *comparison)}.values())


def columns(comparison: Comparison, place: Mapping[str, int]) -> dict[str, Any]:
    """Return the numbers of every result, as base64 of little-endian arrays [steps, sites]."""
    size = comparison.steps * len(place)
    names = ("margin", "value", "bound", "error", "floor", "max_abs", "local")
    floats = {name: [math.nan] * size for name in names}
    states, rule_of, rules = bytearray(size), [0] * size, Interned()
    for r in comparison.results:
        at = r.step * len(place) + place[r.site]
        states[at] = state(r)
        rule_of[at] = rules.number((r.verdict.metric, r.verdict.rule))
        v, floor = r.verdict, math.nan if r.floor is None else r.floor
        numbers = (v.margin, v.value, v.bound, r.metrics.rel_l2, floor, r.metrics.max_abs)
        for name, number in zip(names, numbers, strict=False):
            floats[name][at] = number
    for step, site, error in local_errors(comparison):
        if site in place and step < comparison.steps:
            floats["local"][step * len(place) + place[site]] = error
    return {
        "columns": {name: packed("f", map(single, values)) for name, values in floats.items()},
        "state": base64.b64encode(states).decode(),
        "rule_of": packed("I", rule_of),
        "rules": list(rules.values),
    }


class Interned:
    """Numbers values in the order in which they come, each once."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], int] = {}

    def number(self, value: tuple[str, str]) -> int:
        """Return a value's number."""
        return self.values.setdefault(value, len(self.values))


def local_errors(comparison: Comparison) -> Iterator[tuple[int, str, float]]:
    """Yield step, site and rel-L2 of the error that each site adds by itself, where that was measured."""
    for result in comparison.localization.results if comparison.localization is not None else ():
        yield result.step, result.site, result.metrics.rel_l2


def site_facts(comparison: Comparison, site: str) -> dict[str, Any]:
    """Return a site's name and provenance."""
    tap = comparison.tap_of.get(site)
    return {"site": site} if tap is None else {k: v for k, v in tap.to_json().items() if v}


def ticks(sites: Sequence[str]) -> list[tuple[int, str]]:
    """Return where the depth axis has labels: every site of a short run, else the first of each layer."""
    if len(sites) <= 40:
        return [(i, site) for i, site in enumerate(sites)]
    numbered: dict[str, int] = {}
    for i, site in enumerate(sites):
        layer = re.match(r"[^:]*?\.\d+(?=[.:]|$)", site)
        if layer:
            numbered.setdefault(layer[0], i)
    found = numbered or {site: i for i, site in enumerate(sites)}
    every = max(1, len(found) // 40)
    return [(i, name) for k, (name, i) in enumerate(found.items()) if k % every == 0]


def details(result: SiteResult) -> dict[str, Any]:
    """Return all metrics of a result, rounded to six digits, elements to nine; long axes are thinned to the largest."""
    data = {name: rounded(value, ELEMENTS.get(name, 6)) for name, value in result.metrics.to_json().items()}
    for name in ("by_row", "by_position", "by_head"):
        data[name], data[f"{name}_bucket"] = thinned(data[name])
    return data


def thinned(values: Sequence[Any]) -> tuple[list[Any], int]:
    """Return at most :data:`LONGEST` values, each the largest of a bucket, and the bucket's size."""
    size = -(-len(values) // LONGEST) or 1
    return [max(values[i : i + size], key=float) for i in range(0, len(values), size)], size


def sample_data(sample: Sample) -> dict[str, Any]:
    """Return a sample, JSON-ready."""
    return {
        "count": sample.count,
        "engine": packed("f", map(single, sample.engine)),
        "reference": packed("f", map(single, sample.reference)),
        "worst": [element_data(element) for element in sample.worst],
    }


def element_data(element: Element) -> dict[str, Any]:
    """Return an element and its difference, which is taken before anything is rounded."""
    values = {"engine": short(element.engine, 9), "reference": short(element.reference, 9)}
    return {"index": list(element.index), **values, "difference": short(element.engine - element.reference)}


def start(comparison: Comparison, place: Mapping[str, int]) -> list[int]:
    """Return step and site that the page shows first: the first bad one, else the worst."""
    shown = comparison.first_bad or comparison.worst
    return [shown.step, place[shown.site]] if shown else [0, 0]


def packed(code: str, values: Iterable[float]) -> str:
    """Return base64 of a little-endian array of 32-bit numbers."""
    numbers = list(values)
    return base64.b64encode(struct.pack(f"<{len(numbers)}{code}", *numbers)).decode()


def single(value: float) -> float:
    """Bring a number into float32's range: the page shows it, it does not calculate with it."""
    if not math.isfinite(value) or value == 0:
        return value
    return math.copysign(min(max(abs(value), 1e-38), 3e38), value)


def rounded(value: Any, digits: int = 6) -> Any:
    """Round floats, in lists too, to significant digits; what strict JSON lacks becomes a string."""
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return short(value, digits) if isinstance(value, float) else value


def short(value: float, digits: int = 6) -> float | str:
    """Round a float to significant digits, or spell it where strict JSON cannot."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
