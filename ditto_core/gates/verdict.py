"""Records -> one verdict a metric: estimate, interval, bound, test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ditto_core.compare._record import encode
from ditto_core.gates import policy as names
from ditto_core.gates.bootstrap import Interval, quantile_interval, ratio_interval
from ditto_core.gates.limits import Limits, rule_of_three
from ditto_core.gates.policy import Policy
from ditto_core.gates.record import Record
from ditto_core.gates.statistics import sign_flip, unpaired_threshold

REACH = 2.0
"""A metric that passes excludes, at confidence 1 - alpha, an engine at so many times its limit."""


@dataclass(frozen=True)
class GateVerdict:
    """One metric of a gate; lower is better.

    Each of ``low`` and ``high`` is missed with probability alpha. It fails when the whole interval lies beyond
    ``limit`` (accuracy at a limit of 0: when the sign-flip test says p < alpha), or is not a number. ``decided`` is
    False when it does not fail and the samples are too few to pass it: the interval reaches beyond twice the limit, or
    not even all of them being worse would be significant; of answers, all that the reference gets right. ``p``: of the
    sign-flip test, else None. ``detail``: counts.
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
    decided: bool = True

    @property
    def judged(self) -> bool:
        """Tell whether there is a bound at all."""
        return not math.isinf(self.limit)

    @property
    def evidence(self) -> str:
        """What its test counts: an answer that the reference gets wrong cannot be lost."""
        return "answers that the reference gets right" if self.metric == names.ACCURACY else "samples"

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        return {name: encode(value) for name, value in asdict(self).items()}


def judge(records: Sequence[Record], policy: Policy, dtype: str, floor: str = "") -> tuple[GateVerdict, ...]:
    """Judge records of an engine of ``dtype`` and a floor of its own. A metric that no sample yields has no verdict."""
    limits = Limits(records, policy, dtype, floor)
    found = [
        accuracy(records, policy, dtype),
        perplexity(records, policy, limits),
        pooled(names.KL_MEAN, [(math.fsum(r.kl), len(r.kl)) for r in records], records, limits, limits.kl()),
        kl_by_sample(records, policy, limits),
        kl_quantile(records, policy, dtype),
        pooled(names.TOP1, [top1(r) for r in records], records, limits, limits.flips()),
        pooled(names.GREEDY, [greedy(r) for r in records], records, limits, None),
        worst_sample(records, policy, limits),
    ]
    return tuple(verdict for verdict in found if verdict is not None)


def accuracy(records: Sequence[Record], policy: Policy, dtype: str) -> GateVerdict | None:
    """Judge right and wrong: the sign-flip test (exact McNemar) for any loss, the bootstrap for more than a limit.

    Only what the reference gets right can be lost: of too few such answers it is undecided.
    """
    answered = [r for r in records if r.engine.correct is not None]
    if not answered:
        return None
    pairs = [(r.reference.correct is True, r.engine.correct is True) for r in answered]
    n, limit = len(pairs), policy.limit(names.ACCURACY, dtype)
    worse, better = (sum(a is x and b is not x for a, b in pairs) for x in (True, False))
    losses: dict[str, int] = {}
    for record, (theirs, ours) in zip(answered, pairs, strict=True):
        losses[record.group] = losses.get(record.group, 0) + theirs - ours
    groups = [r.group for r in answered]
    interval = ratio_interval([float(a - b) for a, b in pairs], [1.0] * n, **policy.draws, clusters=groups)
    p = sign_flip([*losses.values()])
    ok = p >= policy.alpha if limit == 0 else within(interval.low, limit)
    clusters = len({r.group for r in answered if r.reference.correct})
    decided = clusters >= policy.least_clusters and (limit == 0 or interval.high <= REACH * limit)
    test = "exact sign flip by cluster" if len(losses) < n else "exact McNemar"
    return GateVerdict(
        names.ACCURACY,
        *ends(interval),
        limit,
        ok,
        n,
        test if limit == 0 else "paired bootstrap",
        p,
        accuracy_detail(pairs, worse, better, policy.alpha),
        decided,
    )


def accuracy_detail(pairs: Sequence[tuple[bool, bool]], worse: int, better: int, alpha: float) -> str:
    """Return both sides' accuracies and what the unpaired test makes of them."""
    n = len(pairs)
    theirs, ours = (100 * sum(pair[i] for pair in pairs) / n for i in (0, 1))
    threshold = unpaired_threshold(theirs, n, alpha=alpha)
    unpaired = f"unpaired test {'passes' if ours >= threshold else 'fails'} (threshold {threshold:.2f})"
    return f"{ours:.2f} against {theirs:.2f} %; {worse} worse, {better} better; {unpaired}"


def perplexity(records: Sequence[Record], policy: Policy, limits: Limits) -> GateVerdict | None:
    """Judge the ratio of perplexities: exp of the paired difference of log-likelihoods over the tokens."""
    texts = [r for r in records if r.is_text]
    if not texts:
        return None
    tokens, groups = sum(r.tokens for r in texts), [r.group for r in texts]
    sides = [(r.engine.nll, r.reference.nll) for r in texts]
    differences = [ours - theirs for ours, theirs in sides]
    interval = ratio_interval(differences, [float(r.tokens) for r in texts], **policy.draws, clusters=groups)
    ours, theirs = (safe_exp(math.fsum(x) / tokens) for x in zip(*sides, strict=True))
    bound = limits.log_perplexity()
    made = verdict_of(names.PERPLEXITY, interval, bound, groups, policy, f"{ours:.4f} against {theirs:.4f}")
    low, high = safe_exp(made.low), safe_exp(made.high)
    detail = f"{made.detail}; {tokens} tokens"
    return replace(made, estimate=safe_exp(made.estimate), low=low, high=high, limit=safe_exp(bound), detail=detail)


def kl_by_sample(records: Sequence[Record], policy: Policy, limits: Limits) -> GateVerdict | None:
    """Judge the geometric mean over samples of KL over the reference's own in the engine's dtype.

    The two are draws of one kind for a healthy engine, so the logarithm of their ratio is as often above 0 as below,
    whatever a sample's length. Every sample weighs the same, where a sum hangs on the few with the largest KL.
    """
    found = [(ratio, r) for ratio, r in zip(limits.kl_ratios(), records, strict=False) if r.kl]
    if not found:
        return None
    logs = [math.log(ratio) if ratio > 0 else math.nan for ratio, _ in found]
    groups = [r.group for _, r in found]
    interval = ratio_interval(logs, [1.0] * len(logs), **policy.draws, clusters=groups)
    interval = Interval(*map(safe_exp, ends(interval)))
    detail = f"geometric mean of KL over the reference's own {limits.dtype}"
    return verdict_of(
        names.KL_BY_SAMPLE, interval, policy.limit(names.KL_BY_SAMPLE, limits.dtype), groups, policy, detail
    )


def kl_quantile(records: Sequence[Record], policy: Policy, dtype: str) -> GateVerdict | None:
    """Judge the 99th percentile of KL over all positions."""
    grouped: dict[str, list[float]] = {}
    for record in (r for r in records if r.kl):
        grouped.setdefault(record.group, []).extend(record.kl)
    if not grouped:
        return None
    interval = quantile_interval([*grouped.values()], 0.99, **policy.draws)
    detail = f"{sum(map(len, grouped.values()))} positions"
    return verdict_of(names.KL_P99, interval, policy.limit(names.KL_P99, dtype), [*grouped], policy, detail)


def pooled(
    metric: str,
    parts: Sequence[tuple[float, int]],
    records: Sequence[Record],
    limits: Limits,
    allowed: Sequence[float] | None,
) -> GateVerdict | None:
    """Judge a sum over a count, from (sum, count) of each sample.

    ``allowed``: the sum that each sample may have. The interval is then that of the ratio of sum to allowed sum, which
    pairs engine and floor by sample, at the scale of the metric. None: the policy's number decides.
    """
    rows = [i for i, (_, count) in enumerate(parts) if count]
    if not rows:
        return None
    policy, positions = limits.policy, sum(parts[i][1] for i in rows)
    values, groups = [parts[i][0] for i in rows], [records[i].group for i in rows]
    weights = [float(parts[i][1]) if allowed is None else allowed[i] for i in rows]
    found = ratio_interval(values, weights, **policy.draws, clusters=groups)
    scale = math.fsum(weights) / positions
    if not math.isfinite(scale):  # nothing is judged by a limit of infinity
        scale = math.nan
    detail = f"{positions} positions"
    if allowed is not None:
        detail += f"; limit from the reference's own {limits.dtype}" + ", which is not finite" * math.isnan(scale)
    limit = policy.limit(metric, limits.dtype) if allowed is None else scale
    # None of a kind of these quantities is negative, and no rate above 1; the studentized ends can be.
    most = 1.0 if metric in (names.TOP1, names.GREEDY) else math.inf
    interval = Interval(found.estimate * scale, positive(found.low * scale), min(found.high * scale, most))
    if interval.estimate == 0:
        interval = replace(interval, high=rule_of_three(positions, policy.alpha) if metric == names.TOP1 else 0.0)
    return verdict_of(metric, interval, limit, groups, policy, detail)


def worst_sample(records: Sequence[Record], policy: Policy, limits: Limits) -> GateVerdict | None:
    """Judge the sample that is furthest beyond what a sample is allowed on average: it fails a gate by itself.

    A bootstrap of a mean cannot see it: two broken samples of 171 are absent from 13 % of the resamples.
    """
    allowed = limits.sample_kl()
    found = [
        (sample_kl(record) / bound, record)
        for record, bound in zip(records, allowed, strict=True)
        if (record.kl or record.tokens) and 0 < bound < math.inf
    ]
    if not found:
        return None
    ratio, record = max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    limit = policy.limit(names.WORST, limits.dtype)
    ok = within(ratio, limit)
    return GateVerdict(
        names.WORST, ratio, ratio, ratio, limit, ok, len(found), "each sample", None, f"sample {record.id!r}"
    )


def sample_kl(record: Record) -> float:
    """Return a sample's mean KL (nats a position), or what its log-likelihood implies where that is more.

    To second order the log-likelihood of a token moves with variance 2 KL, so a mean shift s implies s**2 / 2.
    """
    mean = math.fsum(record.kl) / len(record.kl) if record.kl else 0.0
    shift = (record.engine.nll - record.reference.nll) / record.tokens if record.tokens else 0.0
    implied = shift**2 / 2
    return implied if math.isnan(implied) or implied > mean else mean


def top1(record: Record) -> tuple[float, int]:
    """Return at how many positions the likeliest tokens differ, of how many."""
    ours, theirs = record.engine.top, record.reference.top
    return float(sum(a != b for a, b in zip(ours, theirs, strict=True))), len(ours)


def greedy(record: Record) -> tuple[float, int]:
    """Return how many greedy tokens come after the sides part, of how many."""
    ours, theirs = record.engine.generated, record.reference.generated
    if not theirs:
        return 0.0, 0
    from ditto_core.compare.tokens import matching_prefix  # torch, which checking a result can do without

    return float(len(theirs) - matching_prefix(ours, theirs)), len(theirs)


def verdict_of(
    metric: str, interval: Interval, limit: float, groups: Sequence[str], policy: Policy, detail: str
) -> GateVerdict:
    """Return the verdict on an interval over samples of these groups."""
    ok, clusters = within(interval.low, limit), len(set(groups))
    # A limit of 0 asks for any loss at all, which has no double.
    precise = limit == 0 or interval.high <= REACH * limit
    decided = math.isinf(limit) or (clusters >= policy.least_clusters and precise)
    return GateVerdict(
        metric, *ends(interval), limit, ok, len(groups), "paired bootstrap", None, detail, decided or not ok
    )


def within(low: float, limit: float) -> bool:
    """Tell whether an interval's lower end allows the limit; NaN never does."""
    return low <= limit


def positive(low: float) -> float:
    """Return a lower end of a quantity that cannot be negative; NaN stays."""
    return 0.0 if low < 0 else low


def ends(interval: Interval) -> tuple[float, float, float]:
    """Return estimate, low and high."""
    return interval.estimate, interval.low, interval.high


def safe_exp(value: float) -> float:
    """Return exp, infinity where it overflows."""
    return math.exp(value) if not value > 700 else math.inf
