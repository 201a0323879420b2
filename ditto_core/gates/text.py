"""A gate in words: what it can detect, before it runs, and what it found."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from ditto_core.gates.policy import Policy
from ditto_core.gates.result import GateResult
from ditto_core.gates.statistics import detectable_drop, unpaired_detectable
from ditto_core.gates.suite import CHOICE, MATCH, Suite
from ditto_core.gates.verdict import GateVerdict

WIDTH = 120


def plan(suite: Suite, policy: Policy) -> Iterator[str]:
    """Yield what a gate on this suite can detect. The unpaired test is TensorRT-LLM's, at its sigma of 50 points."""
    n, right = len(suite.samples), sum(sample.kind in (CHOICE, MATCH) for sample in suite.samples)
    yield f"suite {suite.name}: {n} samples, alpha {policy.alpha:g}, power {1 - policy.beta:.0%}, seed {policy.seed}"
    if not right:
        yield "smallest detectable drop of accuracy: none of the samples is right or wrong"
        return
    drop = detectable_drop(right, alpha=policy.alpha, beta=policy.beta, discordant=policy.discordant)
    unpaired = unpaired_detectable(right, alpha=policy.alpha, beta=policy.beta)
    found = "none at all, there are too few samples" if drop is None else f"{100 * drop:.2f} points"
    yield (
        f"smallest detectable drop of accuracy on {right} samples: {found}, if {policy.discordant:.0%} of the pairs "
        f"differ ({unpaired:.2f} points by the unpaired test)"
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
    state = "failed" if not verdict.ok else "ok" if verdict.judged else ""
    p = "" if verdict.p is None else f"McNemar p {verdict.p:.2g}; "
    interval = f"{verdict.low:.4g} .. {verdict.high:.4g}"
    return verdict.metric, f"{verdict.estimate:.4g}", interval, bound, state, p + verdict.detail
