"""Measurements become verdicts: each by its tolerance and floor, then those that heal downstream are marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ditto_core.compare.bounds import LOGITS_METRICS
from ditto_core.compare.result import SiteResult
from ditto_core.compare.row_error import row_factor
from ditto_core.compare.tokens import LogitsMetrics
from ditto_core.compare.tolerance import (
    CEILING,
    FACTOR,
    INTEGERS,
    LUCK,
    NONFINITE,
    QUANTIZED,
    Tolerance,
    quantized_bounds,
    widened,
)
from ditto_core.compare.verdict import INCONCLUSIVE, WITHIN, Verdict, decide
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap

RANDOM = "the reference does not repeat itself"
"""How the reason begins where two runs of the reference differ."""

OUTPUT = "output:"
"""Before the name of a final output that is the site of another tensor, too."""

UNTAPPED = ":untapped"
"""Port of a final output's name that stands for the same output of the engine without taps."""


def judge(
    results: Sequence[SiteResult],
    tolerance: Tolerance,
    taps: Iterable[Tap],
    engine: SessionInfo,
    *,
    one_engine: bool = False,
) -> tuple[SiteResult, ...]:
    """Give every measurement its verdict, then mark those that heal downstream.

    ``one_engine``: both sides are the same engine, so a tensor that differs is not a wrong one, however much it does.
    """
    taps = tuple(taps)
    names = {tap.site: (tap.site, *tap.aliases) for tap in taps}
    outputs = {tap.site: tap.value for tap in taps}
    integers = {tap.site for tap in taps if tap.dtype in INTEGERS}
    usual = usual_floors(r for r in results if r.floor is not None and tolerance.usable(r.floor))
    reasons = unusable_floors(results, tolerance, engine.dtype)

    def meant(r: SiteResult) -> tuple[str, ...]:
        sites = names.get(r.site) or output_names(r.site, taps)
        return (*sites, outputs[r.site]) if r.final and r.site in outputs else sites

    def verdict(r: SiteResult) -> Verdict:
        if r.tied:
            return Verdict(INCONCLUSIVE, "rel_l2", r.metrics.rel_l2, math.inf, r.tied)
        known = () if r.floor is None else (r.floor, usual.get((r.site, r.step > 0), 0.0))
        return tolerance.judge(
            meant(r),
            r.step,
            r.metrics,
            r.dtype or engine.judged_as,
            max(known, default=None),  # the first where it is NaN
            engine.kernels,
            r.dtype in INTEGERS or r.site in integers,
            reasons.get(kind_of(r), "") + cancelling(r),
            r.row,
            r.element,
        )

    judged = [replace(r, verdict=verdict(r)) for r in results]
    if one_engine:
        return tuple(mark_healed(judged, names, lambda result: True))
    return tuple(mark_healed(judged, names, lambda r: may_be_rounding(r) and not tolerance.rules_for(meant(r), r.step)))


def judge_logits(
    logits: LogitsMetrics, dtype: str, tolerance: Tolerance, names: Sequence[str] = ("logits",)
) -> Iterator[Verdict]:
    """Judge a step's logits by the user's rules about them, and where there is none those of a quantized engine by mean
    KL and top-1 agreement. ``names`` is what the logits are called.
    """
    rules = tolerance.logits_rules(names, logits.step)
    table: dict[str, float] = {}
    near = 0.0
    if bounds := quantized_bounds(dtype):
        # Rounded, because 1 - 0.93 is less than 0.07.
        table = {"kl_mean": bounds[0], "top1_disagreement": round(1 - bounds[1], 6)}
        near = near_tie(bounds[0])
    origin = f"table for {dtype}" if dtype in QUANTIZED else f"table for int8, it has no {dtype}"
    for metric in LOGITS_METRICS:
        value = getattr(logits, metric)
        if metric in rules:
            yield rules[metric].decide(value)
        elif metric == "top1_disagreement" and table:
            far = sum(not flip.gap <= near for flip in logits.flips)
            ties = f", {len(logits.flips) - far} near ties (a gap of {near:.2g} or less) not counted"
            note = origin + (ties if far < len(logits.flips) else "")
            yield decide(metric, far / logits.positions, table[metric], note)
        elif metric in table:
            yield decide(metric, value, table[metric], origin)


def near_tie(kl: float) -> float:
    """Return the gap of two logits that errors decide which a mean KL divergence of ``kl`` nats allows.

    KL is half of the variance of the logits' errors under the reference's probabilities (its second-order term), and
    the difference of two logits has twice the variance of one: sqrt(2) x sqrt(2 x kl).
    """
    return 2 * math.sqrt(kl)


def unjudged(
    dtype: str,
    results: Iterable[SiteResult],
    logits: Collection[LogitsMetrics],
    taps: Iterable[Tap] = (),
    *,
    generated: bool = False,
) -> dict[str, str]:
    """Return what is missing for a verdict on a quantized engine, by site: outputs (each site, where no output is
    known) that are not its logits and that no rule judges; its logits, where there are none of either.

    What a step returns that ``generated`` a token is what its logits are computed from.
    """
    found = list(results)
    outputs = [r for r in found if r.final] or found
    left = [r.site for r in outputs if not math.isfinite(r.verdict.bound)]
    if not quantized_bounds(dtype) or (len(logits) and generated) or (outputs and not left):
        return {}
    if not len(logits):
        return {
            "logits": f"an {dtype} engine is judged by its logits, which there are none of: give a tolerance by site"
        }
    known = {"logits", *(tap.site for tap in taps if tap.value == "logits")}
    reason = f"an {dtype} engine is judged by its logits alone: give this output a tolerance"
    return {site: reason for site in left if site.removesuffix(UNTAPPED) not in known}


def output_names(site: str, taps: Iterable[Tap]) -> tuple[str, ...]:
    """Return every name by which a rule may mean an output: one of the untapped engine has the tapped one's too."""
    output = site.removesuffix(UNTAPPED)
    if site == output:
        return (site,)
    same = (name for tap in taps if tap.value == output for name in (tap.site, *tap.aliases))
    return (site, output, *same)


def unusable_floors(results: Iterable[SiteResult], tolerance: Tolerance, dtype: str) -> dict[str, str]:
    """Return why floors are not usable, by kind, each with the first site in topological order that shows it."""
    found: dict[str, str] = {}
    for r in sorted(results, key=lambda r: (r.step, r.order)):
        if r.floor is not None and not tolerance.usable(r.floor):
            found.setdefault(kind_of(r), f"{kind_of(r).format(dtype=dtype, floor=r.floor)}, first at {r.site}")
    return found


def cancelling(result: SiteResult) -> str:
    """Return what the condition of a site's own sums adds to the reason, where it was measured."""
    if result.conditioning is None:
        return ""
    return f"; sum of |terms| here is {result.conditioning:.2g} x |sum|"


def kind_of(result: SiteResult) -> str:
    """Return what a floor that is not usable says of the reference, as a template of ``dtype`` and ``floor``."""
    if result.floor is not None and math.isnan(result.floor):
        return RANDOM
    if result.metrics.nan_expected + result.metrics.inf_expected:
        return "the reference itself has NaN or Inf"
    return "eager in {dtype} overflows" if result.floor == math.inf else "eager in {dtype} is itself off by {floor:.1e}"


def usual_floors(results: Iterable[SiteResult]) -> Mapping[tuple[str, bool], float]:
    """Return the median floor of each site over the prefill, and over the decoding steps.

    One sample of a floor can be small by chance; what is usual there is not.
    """
    samples: dict[tuple[str, bool], list[float]] = {}
    for r in results:
        if r.floor is not None:
            samples.setdefault((r.site, r.step > 0), []).append(r.floor)
    return {key: median(values) for key, values in samples.items()}


def mark_healed(
    results: Iterable[SiteResult], names: Mapping[str, tuple[str, ...]], may: Callable[[SiteResult], bool]
) -> Iterator[SiteResult]:
    """Mark a diverged site as healed when an enclosing module's output, computed later in the same step, is within.

    An output that a kernel property explains is off too, so it heals nothing. Only what ``may`` heals does: a tensor
    that is another one altogether is wrong, though these inputs may not let it matter (a softmax over one key), and
    a user's bound is meant.
    ``model.layers.0.self_attn:q_rope`` heals when ``model.layers.0.self_attn`` or ``model.layers.0`` passes.
    """
    results = list(results)
    known: dict[tuple[int, str], SiteResult] = {}
    for result in results:
        for name in names.get(result.site, (result.site,)):
            known[result.step, name] = result
    for result in results:
        later = (known.get((result.step, path)) for path in enclosing(result.site))
        fine = any(o and o.order > result.order and o.verdict.status == WITHIN for o in later)
        healed = not result.verdict.ok and fine and not result.final and result.verdict.metric != NONFINITE
        yield replace(result, healed=healed and may(result))


def may_be_rounding(result: SiteResult) -> bool:
    """Tell whether an error is near its bound, and the tensor and its worst row are still more right than wrong.

    A tensor near its bound may have one row that is far beyond its own.
    """
    verdict, row = result.verdict, result.row
    error = verdict.value if verdict.metric == "row_rel_l2" else result.metrics.rel_l2
    if verdict.metric == "rel_l2" and row is not None and row.floor is not None:
        bound = max(verdict.bound, row_factor(widened(FACTOR, row.width), row.rows) * row.floor)
        if not row.error <= LUCK * bound:
            return False
    return verdict.margin <= LUCK and error < CEILING


def of_few(result: SiteResult) -> bool:
    """Tell whether an error is that of a few elements: nine of ten are within their bound, of integers all but 16.

    So it is where rounding crosses a threshold, an order or a step of a quantization: what changes there is as large as
    the step, however near the tie was, and one sample of the noise may have crossed none.
    """
    verdict, metrics = result.verdict, result.metrics
    if verdict.metric == "mismatched":
        return verdict.value <= LUCK
    if not 0 < metrics.rel_l2 < math.inf:
        return False
    usual = 1.0 if verdict.metric == "max_abs" else metrics.rms / metrics.rel_l2
    return metrics.p90 <= verdict.bound * usual


def enclosing(site: str) -> Iterator[str]:
    """Yield the paths of the modules around a site, innermost first: ``a.b:port`` -> ``a.b``, ``a``."""
    path, _, port = site.partition(":")
    if port:
        yield path
    while "." in path:
        path = path.rsplit(".", 1)[0]
        yield path
