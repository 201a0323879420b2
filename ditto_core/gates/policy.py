"""What a gate asks for: error rates, limits, seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ditto_core.compare.tolerance import QUANTIZED
from ditto_core.errors import UsageError, nearest

ACCURACY, PERPLEXITY = "accuracy_drop", "perplexity_ratio"
KL_MEAN, KL_BY_SAMPLE, KL_P99 = "kl_mean", "kl_by_sample", "kl_p99"
KL = (KL_MEAN, KL_BY_SAMPLE, KL_P99)
TOP1, GREEDY = "top1_disagreement", "greedy_disagreement"
WORST = "worst_sample"
METRICS = (ACCURACY, PERPLEXITY, KL_MEAN, KL_BY_SAMPLE, KL_P99, TOP1, GREEDY, WORST)
"""All read "more is worse": loss of accuracy (0..1), engine's perplexity over the reference's, KL in nats, KL of the
usual sample over the reference's own in the engine's dtype, share of positions with another likeliest token, share of
greedy tokens after the first that differs, the largest KL of a single sample over what that sample is allowed on
average."""

BY_SAMPLE_LIMIT = 1.15
"""KL of an engine's usual sample over that of the reference in the engine's dtype. Eager with other kernels or another
order of sums, which are further draws of that floor, lies at 0.97 on 57 texts, each end of the interval 4 % away; with
one layer of 30 in fp8 it lies at 1.3 to 1.5. Figures: benchmarks/gates.md."""

PERPLEXITY_LIMIT = 1.001
"""Below what healthy 16-bit engines lose, so that a difference that is significant and tiny does not fail a gate."""

WORST_LIMIT = 16.0
"""Of a single sample's KL over what samples are allowed on average: four times the error. Healthy samples of SmolLM2 in
bfloat16 stay below 1 (benchmarks/gates.md); a broken one is beyond 100."""


@dataclass(frozen=True)
class Policy:
    """How a gate decides.

    ``alpha``: chance that a healthy engine fails, for each metric that is judged. ``beta``: chance that an effect of
    the smallest detectable size is missed. What is expected, for the plan alone: ``discordant``, the share of answers
    that differ, and ``spread``, the standard deviation over texts of the difference of log-likelihoods, nats a token.
    ``limits``: bound by metric; infinity reports without judging, and what is not named gets its default.
    """

    alpha: float = 0.05
    beta: float = 0.2
    discordant: float = 0.05
    spread: float = 0.01
    resamples: int = 10_000
    seed: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "discordant"):
            if not 0 < getattr(self, name) < 0.5:
                raise UsageError(f"a gate's {name} is {getattr(self, name)!r}, expected a number between 0 and 0.5")
        if not 0 < self.spread < math.inf:
            raise UsageError(f"a gate's spread is {self.spread!r}, expected nats a token above 0")
        if self.resamples < 100:
            raise UsageError(f"a gate's resamples are {self.resamples}, expected at least 100")
        if self.seed < 0:
            raise UsageError(f"a gate's seed is {self.seed}, expected 0 or more")
        for name, value in self.limits.items():
            check_limit(name, value)

    @property
    def draws(self) -> dict[str, Any]:
        """How the bootstrap draws."""
        return {"alpha": self.alpha, "seed": self.seed, "resamples": self.resamples}

    @property
    def least_clusters(self) -> int:
        """The fewest independent samples of which all being worse is significant: 2**-n < alpha."""
        return math.floor(-math.log2(self.alpha)) + 1

    def limit(self, metric: str, dtype: str) -> float:
        """Return a metric's bound for an engine of ``dtype`` where no floor was measured, or none is needed.

        KL and top-1 default to what llama.cpp measured on healthy quantizations of the engine's kind; an engine that is
        not quantized must at least be as close as int8. p99 of KL and greedy agreement are reported, not judged.
        """
        kl, agreement = QUANTIZED.get(dtype, QUANTIZED["int8"])
        default = {ACCURACY: 0.0, PERPLEXITY: PERPLEXITY_LIMIT, KL_MEAN: kl, TOP1: 1 - agreement, WORST: WORST_LIMIT}
        if KL_MEAN not in self.limits:  # a budget of KL that is named goes over the floor
            default[KL_BY_SAMPLE] = BY_SAMPLE_LIMIT
        return float(self.limits.get(metric, default.get(metric, math.inf)))

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON: no bound is written as null."""
        limits = {name: None if math.isinf(value) else value for name, value in sorted(self.limits.items())}
        return {**asdict(self), "limits": limits}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Inverse of :meth:`to_json`; also reads a table of ``pyproject.toml``. Raises :class:`UsageError`."""
        known = [item.name for item in fields(cls)]
        for name in data:
            if name not in known:
                raise UsageError(f"a gate has no setting {name!r}{nearest(name, known)} (known: {', '.join(known)})")
        limits = {n: math.inf if v is None else v for n, v in data.get("limits", {}).items()}
        return cls(**{**data, "limits": limits})


def check_limit(name: str, value: Any) -> None:
    """Raise :class:`UsageError` for an unknown metric or a bound that is no number of its range."""
    if name not in METRICS:
        raise UsageError(f"a gate has no metric {name!r}{nearest(name, METRICS)} (known: {', '.join(METRICS)})")
    least = 1.0 if name == PERPLEXITY else 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise UsageError(f"the limit of {name} is {value!r}, expected a number of at least {least:g}")
