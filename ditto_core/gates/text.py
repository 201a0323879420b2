"""A gate in words: what it can detect, before it runs, and what it found."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from ditto_core.gates.policy import ACCURACY, PERPLEXITY, Policy
from ditto_core.gates.result import GateResult
from ditto_core.gates.statistics import detectable_drop, detectable_mean, unpaired_detectable
from ditto_core.gates.suite import CHOICE, MATCH, TEXT, Suite
from ditto_core.gates.verdict import GateVerdict

WIDTH = 120


def plan(suite: Suite, policy: Policy, dtype: str) -> Iterator[str]:
    """Yield what a gate of an engine of ``dtype`` can detect on this suite, before it runs."""
    n = len(suite.samples)
    yield f"suite {suite.name}: {n} samples, alpha {policy.alpha:g}, power {1 - policy.beta:.0%}, seed {policy.seed}"
    answers = sum(sample.kind in (CHOICE, MATCH) for sample in suite.samples)
    texts = sum(sample.kind == TEXT for sample in suite.samples)
    if suite.clusters < policy.least_clusters:
        yield f"too few samples: {suite.clusters} independent, expected at least {policy.least_clusters}; undecided"
    if answers:
        yield accuracy_plan(answers, policy, policy.limit(ACCURACY, dtype))
    if texts:
        yield perplexity_plan(texts, policy, policy.limit(PERPLEXITY, dtype))
    if not answers and not texts:
        yield "smallest detectable effect: none of the samples has an answer or is a text"


def accuracy_plan(n: int, policy: Policy, limit: float) -> str:
    """Return the smallest detectable drop of accuracy. The unpaired test is TensorRT-LLM's, at a sigma of 50 points."""
    rates = {"alpha": policy.alpha, "beta": policy.beta}
    if math.isinf(limit):
        return f"accuracy of {n} samples is reported, not judged"
    drop = detectable_drop(n, discordant=policy.discordant, **rates)
    if limit > 0:
        drop = limit + detectable_mean(n, sigma=math.sqrt(policy.discordant), **rates)
    found = "none at all, there are too few samples" if drop is None or drop > 1 else f"{100 * drop:.2f} points"
    beyond = f" (limit {100 * limit:g})" if limit else ""
    return (
        f"smallest detectable drop of accuracy on {n} samples: {found}{beyond}, if {policy.discordant:.0%} of the "
        f"pairs differ ({unpaired_detectable(n, **rates):.2f} points by the unpaired test)"
    )


def perplexity_plan(n: int, policy: Policy, limit: float) -> str:
    """Return the smallest detectable ratio of perplexities."""
    if math.isinf(limit):
        return f"perplexity of {n} texts is reported, not judged"
    ratio = limit * math.exp(detectable_mean(n, sigma=policy.spread, alpha=policy.alpha, beta=policy.beta))
    return (
        f"smallest detectable ratio of perplexities on {n} texts: {ratio:.4f} (limit {limit:g}), if their differences "
        f"spread by {policy.spread:g} nats a token"
    )


def table(result: GateResult) -> str:
    """Return the verdicts as a table; empty for a result that lacks samples."""
    if result.missing:
        return ""
    made = Table("metric", "value", f"{1 - 2 * result.policy.alpha:.0%} interval", "limit", "", "why", box=None)
    for verdict in result.verdicts:
        made.add_row(*cells(verdict))
    console = Console(width=WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(made)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def cells(verdict: GateVerdict) -> tuple[str, ...]:
    """Return a verdict's row."""
    bound = "-" if math.isinf(verdict.limit) else f"{verdict.limit:.4g}"
    state = "failed" if not verdict.ok else "" if not verdict.judged else "ok" if verdict.decided else "undecided"
    p = "" if verdict.p is None else f"p {verdict.p:.2g}; "
    interval = f"{verdict.low:.4g} .. {verdict.high:.4g}"
    return verdict.metric, f"{verdict.estimate:.4g}", interval, bound, state, p + verdict.detail
