"""Default limits of a gate: the reference's own error in the engine's dtype, paired by sample."""

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

KL_MULTIPLE = 1.5
"""KL of a healthy engine over that of the reference in the engine's dtype, as a mean over a suite.

KL = Var(d) / 2 to second order in the error d of the logits, so that independent errors add in KL: an engine may add to
what its dtype costs an error of half that KL. The sum over a suite hangs on few texts, and its interval is wide; the
usual sample is held to less (:data:`~ditto_core.gates.policy.BY_SAMPLE_LIMIT`). Figures: benchmarks/gates.md."""

ERROR_MULTIPLE = math.sqrt(KL_MULTIPLE)
"""Changes of likeliest tokens grow in proportion to the error of the logits."""

SHIFT_MULTIPLE = 2.0
"""Of the shift of log-likelihoods: either sign is as likely, and one draw of it from few texts is a poor scale."""

KL_LEAST = 1e-8
"""Nats a position that are allowed beside the floor: an error of 1.4e-4 in the logits. Float32 kernels that sum in
another order stay far below it, float16 is far above."""


@dataclass(frozen=True)
class Limits:
    """What the records of an engine of ``dtype`` allow. A limit that the policy names goes over all that is here.

    ``floor``: the dtype of the eager model that the records hold, the engine's own where it is empty.
    """

    records: Sequence[Record]
    policy: Policy
    dtype: str
    floor: str = ""

    @property
    def parts(self) -> int:
        """Of how many independent errors a healthy KL is the sum.

        The floor of a reference in the engine's own dtype is its distance from a higher one: that of one side alone.
        """
        return 2 if self.floor not in ("", self.dtype) else 1

    @cached_property
    def measured(self) -> bool:
        """Tell whether the floor was measured on every sample; budgets judge quantized engines."""
        return self.dtype not in QUANTIZED and all(record.floor is not None for record in self.records)

    def kl(self) -> list[float] | None:
        """Return the KL (nats) that each sample is allowed in sum over its positions, None where a number decides."""
        if names.KL_MEAN in self.policy.limits or not self._has_floor_kl:
            return None
        return [KL_MULTIPLE * own for own in self.own_kl]

    @property
    def own_kl(self) -> list[float]:
        """The KL (nats) of the reference's own error in the engine's dtype, summed over each sample's positions."""
        return [self.parts * (math.fsum(r.floor_kl) + KL_LEAST * len(r.floor_kl)) for r in self.records]

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
        factor = math.sqrt(self.parts) * ERROR_MULTIPLE
        return [factor * (found + unseen * count) for found, count in counts]

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
        return max(least, math.sqrt(self.parts) * SHIFT_MULTIPLE * max(abs(found.low), abs(found.high)))

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

    def kl_ratios(self) -> list[float]:
        """Return each sample's KL over the reference's own, NaN for one without; empty where no floor was measured."""
        if not self._has_floor_kl:
            return []
        ours = [math.fsum(r.kl) + KL_LEAST * len(r.kl) for r in self.records]
        return [kl / own if own else math.nan for kl, own in zip(ours, self.own_kl, strict=True)]


def flips(record: Record) -> int:
    """Return at how many positions the floor has another likeliest token than the reference."""
    own = record.floor.top if record.floor is not None else ()
    return sum(a != b for a, b in zip(own, record.reference.top, strict=True))


def rule_of_three(n: int, alpha: float) -> float:
    """Return the upper bound, at confidence 1 - ``alpha``, of a rate of which ``n`` trials showed nothing.

    1 - alpha**(1/n), the Clopper-Pearson bound; about 3 / n at 5 %.
    """
    return 1 - alpha ** (1 / n) if n else 1.0
