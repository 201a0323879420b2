"""Limits of a gate that is not told any: the reference's own error in the engine's dtype, paired by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ditto_core.compare.tolerance import QUANTIZED
from ditto_core.gates import policy as names
from ditto_core.gates.bootstrap import ratio_interval
from ditto_core.gates.policy import Policy
from ditto_core.gates.record import Record

ERROR_MULTIPLE = 2.0
"""A healthy kernel's error over that of the reference in the same dtype: what FlashAttention's tests and torch's
``same()`` allow. Changes of likeliest tokens and of log-likelihoods grow in proportion to the error of the logits."""

KL_MULTIPLE = ERROR_MULTIPLE**2
"""KL grows with the square of the error: for a perturbation d of the logits, KL = Var_p(d) / 2 to second order."""

KL_LEAST = 2.0**-40
"""KL (nats) of rounding float32 logits of magnitude 16: half a unit in the last place is 2**-20, squared and halved.
A reference that repeats itself bit for bit has at least this floor."""


@dataclass(frozen=True)
class Limits:
    """What the records of an engine of ``dtype`` allow. A limit that the policy names goes over all that is here."""

    records: Sequence[Record]
    policy: Policy
    dtype: str

    @cached_property
    def measured(self) -> bool:
        """Tell whether the floor was measured on every sample; budgets judge quantized engines."""
        return self.dtype not in QUANTIZED and all(record.floor is not None for record in self.records)

    def kl(self) -> list[float] | None:
        """Return the KL (nats) that each sample is allowed in sum over its positions, None where a number decides."""
        if names.KL_MEAN in self.policy.limits or not self._has_floor_kl:
            return None
        return [KL_MULTIPLE * (math.fsum(r.floor_kl) + KL_LEAST * len(r.floor_kl)) for r in self.records]

    def flips(self) -> list[float] | None:
        """Return at how many positions each sample may have another likeliest token, None where a number decides.

        The floor's own count is uncertain: with none in n positions its rate is below -ln(alpha) / n (the rule of
        three), which is added to it.
        """
        if names.TOP1 in self.policy.limits or not self.measured:
            return None
        counts = [(flips(r), len(r.reference.top)) for r in self.records]
        total = sum(count for _, count in counts)
        unseen = rule_of_three(total, self.policy.alpha)
        return [ERROR_MULTIPLE * (found + unseen * count) for found, count in counts]

    def log_perplexity(self) -> float:
        """Return the limit of the logarithm of the ratio of perplexities.

        The mean of KL is what a calibrated model's log-likelihood loses, so a budget of KL is one of log-likelihood.
        A floor's is what the reference in that dtype may have moved, in either direction, times the multiple.
        """
        given = self.policy.limits.get(names.PERPLEXITY)
        if given is not None:
            return math.log(given)
        least = math.log(self.policy.limit(names.PERPLEXITY, self.dtype))
        if self.dtype in QUANTIZED:
            return max(least, QUANTIZED[self.dtype][0])
        texts = [r for r in self.records if r.is_text]
        moved = [r.floor.nll - r.reference.nll for r in texts if r.floor is not None]
        if not self.measured or not all(map(math.isfinite, moved)):
            return least
        weights = [float(r.tokens) for r in texts]
        found = ratio_interval(moved, weights, **self.policy.draws, clusters=[r.group for r in texts])
        return max(least, ERROR_MULTIPLE * max(abs(found.low), abs(found.high)))

    def sample_kl(self) -> list[float]:
        """Return the mean KL (nats a position) that each sample is allowed: its own floor's, at least that of all."""
        allowed = self.kl()
        if allowed is None:
            return [self.policy.limit(names.KL_MEAN, self.dtype)] * len(self.records)
        counts = [len(r.floor_kl) for r in self.records]
        pooled = math.fsum(allowed) / sum(counts)
        return [max(pooled, own / count) if count else pooled for own, count in zip(allowed, counts, strict=True)]

    @property
    def _has_floor_kl(self) -> bool:
        return self.measured and any(record.floor_kl for record in self.records)


def flips(record: Record) -> int:
    """Return at how many positions the floor has another likeliest token than the reference."""
    own = record.floor.top if record.floor is not None else ()
    return sum(a != b for a, b in zip(own, record.reference.top, strict=True))


def rule_of_three(n: int, alpha: float) -> float:
    """Return the upper bound, at confidence 1 - ``alpha``, of a rate of which ``n`` trials showed nothing.

    1 - alpha**(1/n), the Clopper-Pearson bound; about 3 / n at 5 %.
    """
    return 1 - alpha ** (1 / n) if n else 1.0
