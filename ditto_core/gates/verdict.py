"""Records -> one verdict a metric: estimate, interval, bound, test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ditto_core.compare._record import decode, encode
from ditto_core.gates import policy as names
from ditto_core.gates.bootstrap import Interval, quantile_interval, ratio_interval
from ditto_core.gates.policy import Policy
from ditto_core.gates.record import Record
from ditto_core.gates.statistics import mcnemar, unpaired_threshold


@dataclass(frozen=True)
class GateVerdict:
    """One metric of a gate; more is worse.

    ``low`` and ``high`` bound the estimate, each missed with probability alpha. It fails when the whole interval lies
    beyond ``limit`` (accuracy at a limit of 0: when the exact McNemar test says p < alpha), or is not a number.
    ``p``: of McNemar's test, else None. ``detail``: the counts behind it.
    """

    metric: str
    estimate: float
    low: float
    high: float
    limit: float
    ok: bool
    n: int
    test: str
    p: float | None = None
    detail: str = ""

    @property
    def judged(self) -> bool:
        """Tell whether there is a bound at all."""
        return not math.isinf(self.limit)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        return {name: encode(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GateVerdict:
        """Inverse of :meth:`to_json`."""
        return cls(**{name: decode(value) for name, value in data.items()})


def judge(records: Sequence[Record], policy: Policy, dtype: str) -> tuple[GateVerdict, ...]:
    """Judge records of an engine of ``dtype``. A metric that no sample yields has no verdict."""
    found = [accuracy(records, policy, dtype), perplexity(records, policy, dtype)]
    found += [rate(names.KL_MEAN, [(math.fsum(r.kl), len(r.kl)) for r in records if r.kl], policy, dtype)]
    found += [kl_quantile(records, policy, dtype)]
    found += [rate(names.TOP1, [top1(r) for r in records if r.engine.top], policy, dtype)]
    found += [rate(names.GREEDY, [greedy(r) for r in records if r.reference.generated], policy, dtype)]
    return tuple(verdict for verdict in found if verdict is not None)


def accuracy(records: Sequence[Record], policy: Policy, dtype: str) -> GateVerdict | None:
    """Judge right and wrong: exact McNemar for any loss at all, the bootstrap for more than a limit."""
    pairs = [(r.reference.correct, r.engine.correct) for r in records if r.engine.correct is not None]
    if not pairs:
        return None
    n, limit = len(pairs), policy.limit(names.ACCURACY, dtype)
    worse, better = (sum(a is x and b is not x for a, b in pairs) for x in (True, False))
    interval = ratio_interval([float(bool(a)) - float(bool(b)) for a, b in pairs], [1.0] * n, **drawn(policy))
    theirs, ours = (100 * sum(bool(pair[i]) for pair in pairs) / n for i in (0, 1))
    p = mcnemar(worse, better)
    ok = p >= policy.alpha if limit == 0 else within(interval.low, limit)
    threshold = unpaired_threshold(theirs, n, alpha=policy.alpha)
    unpaired = f"unpaired test {'passes' if ours >= threshold else 'fails'} (threshold {threshold:.2f})"
    detail = f"{ours:.2f} against {theirs:.2f} %; {worse} worse, {better} better; {unpaired}"
    test = "exact McNemar" if limit == 0 else "paired bootstrap"
    return GateVerdict(names.ACCURACY, *ends(interval), limit, ok, n, test, p, detail)


def perplexity(records: Sequence[Record], policy: Policy, dtype: str) -> GateVerdict | None:
    """Judge the ratio of perplexities: exp of the paired difference of log-likelihoods over the tokens."""
    texts = [r for r in records if r.tokens and r.engine.correct is None]
    if not texts:
        return None
    tokens = sum(r.tokens for r in texts)
    sides = [(r.engine.nll, r.reference.nll) for r in texts]
    differences = [ours - theirs for ours, theirs in sides]
    interval = mapped(safe_exp, ratio_interval(differences, [float(r.tokens) for r in texts], **drawn(policy)))
    ours, theirs = (safe_exp(math.fsum(x) / tokens) for x in zip(*sides, strict=True))
    limit = policy.limit(names.PERPLEXITY, dtype)
    detail = f"{ours:.4f} against {theirs:.4f}; {tokens} tokens"
    return verdict_of(names.PERPLEXITY, interval, limit, len(texts), detail)


def kl_quantile(records: Sequence[Record], policy: Policy, dtype: str) -> GateVerdict | None:
    """Judge the 99th percentile of KL over all positions."""
    groups = [r.kl for r in records if r.kl]
    if not groups:
        return None
    interval = quantile_interval(groups, 0.99, **drawn(policy))
    detail = f"{sum(map(len, groups))} positions"
    return verdict_of(names.KL_P99, interval, policy.limit(names.KL_P99, dtype), len(groups), detail)


def rate(metric: str, parts: Sequence[tuple[float, int]], policy: Policy, dtype: str) -> GateVerdict | None:
    """Judge a sum over a count, from (sum, count) of each sample."""
    if not parts:
        return None
    values, counts = zip(*parts, strict=True)
    interval = ratio_interval(values, counts, **drawn(policy))
    return verdict_of(metric, interval, policy.limit(metric, dtype), len(parts), f"{sum(counts)} positions")


def top1(record: Record) -> tuple[float, int]:
    """Return at how many positions the likeliest tokens differ, of how many."""
    ours, theirs = record.engine.top, record.reference.top
    return float(sum(a != b for a, b in zip(ours, theirs, strict=True))), len(ours)


def greedy(record: Record) -> tuple[float, int]:
    """Return how many greedy tokens come after the sides part, of how many."""
    from ditto_core.compare.tokens import matching_prefix  # torch, which checking a result can do without

    ours, theirs = record.engine.generated, record.reference.generated
    return float(len(theirs) - matching_prefix(ours, theirs)), len(theirs)


def verdict_of(metric: str, interval: Interval, limit: float, n: int, detail: str) -> GateVerdict:
    """Return the verdict on an interval."""
    ok = within(interval.low, limit)
    return GateVerdict(metric, *ends(interval), limit, ok, n, "paired bootstrap", None, detail)


def within(low: float, limit: float) -> bool:
    """Tell whether an interval's lower end allows the limit; NaN never does."""
    return low <= limit


def drawn(policy: Policy) -> dict[str, Any]:
    """Return how a policy draws its bootstrap."""
    return {"alpha": policy.alpha, "seed": policy.seed, "resamples": policy.resamples}


def ends(interval: Interval) -> tuple[float, float, float]:
    """Return estimate, low and high."""
    return interval.estimate, interval.low, interval.high


def mapped(function: Callable[[float], float], interval: Interval) -> Interval:
    """Apply an increasing function to an interval."""
    return Interval(*map(function, ends(interval)))


def safe_exp(value: float) -> float:
    """Return exp, infinity where it overflows."""
    return math.exp(value) if not value > 700 else math.inf
