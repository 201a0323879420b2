"""Causes that show in a run as a whole, or in two runs side by side, rather than at one site."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ditto_core.causes.confidence import confidence
from ditto_core.causes.evidence import name_of
from ditto_core.compare.blame import Cause
from ditto_core.compare.tolerance import EPSILON, TABLE

if TYPE_CHECKING:
    from ditto_core.compare.blame import Blame
    from ditto_core.compare.comparison import Comparison
    from ditto_core.compare.result import SiteResult

SURE = confidence("runs")


def run_causes(comparison: Comparison | None, blamed: Sequence[Blame]) -> tuple[Cause, ...]:
    """Return the causes that the whole run shows."""
    return () if comparison is None else asked(ONE_RUN, comparison, blamed)


def two_run_causes(first: Comparison, second: Comparison) -> tuple[Cause, ...]:
    """Return what explains the difference of two runs of one prompt on healthy engines.

    Either the prompt alone and in a batch (as its first row), or two builds of one spec. None of it is a fault; where a
    run is not within its tolerances, there is no cause.
    """
    return asked(TWO_RUNS, first, second)


def asked(rules: Sequence[Callable[..., Cause | None]], *runs: Any) -> tuple[Cause, ...]:
    """Return what rules name."""
    return tuple(replace(cause, rule=name_of(rule)) for rule in rules if (cause := rule(*runs)) is not None)


def near_tie(comparison: Comparison, blamed: Sequence[Blame]) -> Cause | None:
    """Tokens differ only where the reference nearly tied, and no site is to blame."""
    ties = [(i, step) for i, row in enumerate(comparison.tokens) for step in row.differences if step in row.near_ties]
    if blamed or not ties or any(row.flips for row in comparison.tokens) or comparison.failures:
        return None
    row, step = ties[0]
    line = f"{len(ties)} tokens differ where the reference's two best logits nearly tie, first row {row}, step {step}"
    return Cause("near tie", "logits", SURE, (line,), "no fault: compare logits, or accept near ties", False)


def observer_effect(comparison: Comparison, blamed: Sequence[Blame]) -> Cause | None:
    """Tapping changed the engine's final outputs beyond what rounding does."""
    effect = comparison.observer
    if effect is None:
        return None
    floors = [r.floor for r in final_results(comparison) if r.floor and comparison.tolerance.usable(r.floor)]
    # Without a floor the two engines may be as far apart as an engine and its reference.
    bound = comparison.tolerance.factor * max(floors) if floors else TABLE.get(comparison.engine.judged_as, math.inf)
    if effect.rel_l2 <= max(bound, 4 * epsilon(comparison)):
        return None
    line = f"the untapped engine's {effect.output} differ by {effect.rel_l2:.1e} at step {effect.step}"
    step = "trust the untapped engine's outputs; tap fewer or other sites until the two agree"
    return Cause("observer effect", effect.output, SURE, (line, f"rounding explains {bound:.1e}"), step)


def hidden_by_input(comparison: Comparison, blamed: Sequence[Blame]) -> Cause | None:
    """A site is wrong on its own, yet the final outputs pass: this input does not carry the fault to the end."""
    finals = list(final_results(comparison))
    passes = all(r.ok and r.verdict.judged for r in finals) and not any(row.flips for row in comparison.tokens)
    if not blamed or not finals or not passes:
        return None
    worst = max(finals, key=lambda r: r.verdict.margin)
    failing = [r for r in comparison.results if r.step == blamed[0].step and not r.verdict.ok]
    last = max(failing, key=lambda r: r.order).site if failing else ""
    lines = (
        f"{blamed[0].site} adds {blamed[0].local:.1e}, yet {worst.site} passes with {worst.verdict.value:.1e}",
        f"{last} is the last site that shows it" if last else "no site differs beyond rounding from the reference's",
        f"the run had {comparison.steps} steps of {len(comparison.tokens) or 1} rows",
    )
    step = "test with representative inputs: longer prompts, padding; a test of final outputs alone would pass"
    return Cause("hidden by this input", blamed[0].site, SURE, lines, step)


def final_results(comparison: Comparison) -> Iterator[SiteResult]:
    """Yield the results of the final outputs; where none is known to be one, of the sites that come last."""
    outputs = [r for r in comparison.results if r.final]
    yield from outputs
    if comparison.results and not outputs:
        last = max(r.order for r in comparison.results)
        yield from (r for r in comparison.results if r.order == last)


def epsilon(comparison: Comparison) -> float:
    """Return the engine dtype's machine epsilon; infinity for a quantized engine, whose rounding has no such bound."""
    return EPSILON.get(comparison.engine.judged_as, math.inf)


def batch_rounding(alone: Comparison, batched: Comparison) -> Cause | None:
    """Two runs of one prompt, alone and in a batch: greedy texts differ, and both runs are within rounding.

    No fault: kernels are chosen by shape, and each rounds in its own way.
    """
    if not (alone and batched) or not 0 < len(alone.tokens) < len(batched.tokens):
        return None
    first, second = alone.tokens[0], batched.tokens[0]
    step = next((i for i, (a, b) in enumerate(zip(first.engine, second.engine, strict=False)) if a != b), None)
    if first.flips or second.flips or step is None:
        return None
    line = f"alone and in a batch the engine's tokens part at step {step}; both runs are within rounding"
    advice = "no fault: kernels differ by shape; compare in float32 to be sure"
    return Cause("batch-shape rounding", "logits", SURE, (line,), advice, False)


def build_spread(first: Comparison, second: Comparison) -> Cause | None:
    """Two builds of one spec on one input: they differ, and both are within rounding."""
    if not (first and second) or len(first.tokens) != len(second.tokens):
        return None
    other = {(r.step, r.site): r.metrics for r in second.results}
    differing = [r for r in first.results if (r.step, r.site) in other and r.metrics != other[r.step, r.site]]
    if not differing:
        return None
    where = min(differing, key=lambda r: (r.step, r.order))
    values = (where.metrics.rel_l2, other[where.step, where.site].rel_l2)
    line = (
        f"two builds differ at {len(differing)} of {len(first.results)} results, first at {where.site}: "
        f"errors {values[0]:.2e} and {values[1]:.2e}, both within rounding"
    )
    step = "keep a timing cache, and a tolerance above the spread"
    return Cause("build-to-build spread", where.site, SURE, (line,), step, False)


ONE_RUN = (near_tie, observer_effect, hidden_by_input)
TWO_RUNS = (batch_rounding, build_spread)
