"""Metrics of logits and tokens: divergence, agreement, perplexity, and which token flips are only near ties."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from ditto_core.compare._blocks import unravel
from ditto_core.compare._record import decode, encode
from ditto_core.compare.metrics import ShapeMismatch
from ditto_core.compare.ulp import coarser, ulp
from ditto_core.errors import UsageError
from ditto_core.spec import DTYPES, parse_dtype

IGNORED = -100
"""The target that does not count, as in torch's cross entropy."""

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Logits in one chunk of positions: 2 MB in float64, 64 MB on a GPU, where a chunk costs its launches."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A position where the two sides prefer different tokens.

    ``gap`` is by how much the reference prefers ``expected`` to ``actual`` (in logits), ``ulp`` the unit in the last
    place of the engine's dtype at the reference's largest logit. A near tie has ``gap <= near_tie_ulp * ulp``.
    """

    index: tuple[int, ...]
    actual: int
    expected: int
    gap: float
    ulp: float
    near_tie: bool


@dataclass(frozen=True, slots=True)
class LogitsMetrics:
    """What :func:`measure_logits` found over ``positions`` rows of logits.

    ``kl_*``: KL(expected || actual) in nats by position. ``top1_agreement``: share of positions with the same argmax;
    ``topk_agreement``: mean share of the ``k`` likeliest tokens that both sides have. ``perplexity_*``: exp of the mean
    negative log-likelihood of the targets (at a run's prefill: of all tokens of the prompts), None without targets. NaN
    logits make the KL of their position NaN, and so ``kl_mean`` and ``kl_max``. ``step``: of a run.
    """

    positions: int
    dtype: str
    k: int
    near_tie_ulp: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    topk_agreement: float
    perplexity_actual: float | None
    perplexity_expected: float | None
    flips: tuple[Flip, ...]
    step: int = 0

    @property
    def top1_disagreement(self) -> float:
        """Share of positions with another argmax: 5 of 100 are 0.05, where 1 - 0.95 is a little more."""
        return len(self.flips) / self.positions

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON: NaN and Inf become strings."""
        data = {item.name: encode(getattr(self, item.name)) for item in fields(self) if item.name != "flips"}
        flips = [{item.name: encode(getattr(flip, item.name)) for item in fields(Flip)} for flip in self.flips]
        return {**data, "flips": flips}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LogitsMetrics:
        """Inverse of :meth:`to_json`."""
        flips = tuple(Flip(**{name: decode(value) for name, value in flip.items()}) for flip in data["flips"])
        numbers = {name: decode(value) for name, value in data.items() if name not in ("flips", "dtype")}
        return cls(**numbers, dtype=data["dtype"], flips=flips)


@dataclass(slots=True)
class Rows:
    """What the chunks of positions add up to."""

    kl: list[float] = field(default_factory=list)
    shared: int = 0
    loss_actual: float = 0.0
    loss_expected: float = 0.0
    targets: int = 0
    flips: list[Flip] = field(default_factory=list)


def measure_logits(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: str,
    k: int = 5,
    near_tie_ulp: float = 2.0,
    targets: torch.Tensor | None = None,
    step: int = 0,
) -> LogitsMetrics:
    """Compare logits [..., vocab] of the engine with the reference's, in one pass over chunks of positions in float64.

    ``dtype`` is the engine's: its ULP decides which flips are near ties. ``targets`` [...] are token ids for the
    perplexity; -100 does not count. ``step`` is kept. Raises :class:`~ditto_core.compare.metrics.ShapeMismatch` for
    different shapes, :class:`~ditto_core.errors.UsageError` for tensors without a position or a vocabulary.
    """
    if actual.shape != expected.shape:
        raise ShapeMismatch(actual.shape, expected.shape)
    if not actual.dim() or not actual.numel():
        raise UsageError(f"logits of shape {list(actual.shape)} hold no position, expected [..., vocab]")
    shape, vocab = actual.shape[:-1], actual.shape[-1]
    if targets is not None and targets.shape != shape:
        raise ShapeMismatch(targets.shape, shape)
    k, name, rows = min(k, vocab), parse_dtype(dtype), Rows()
    places = math.prod(shape)
    for part in chunks(actual, places):
        both = pick(part, actual, expected)
        add_divergence(rows, both, k)
        found = flips(both, getattr(torch, name), near_tie_ulp)
        rows.flips += [replace(flip, index=unravel(part.start + row, shape)) for row, flip in found]
        if targets is not None:
            add_losses(rows, both, targets.reshape(-1)[part])
    return LogitsMetrics(
        positions=places,
        dtype=name,
        k=k,
        near_tie_ulp=near_tie_ulp,
        kl_mean=float(np.mean(rows.kl)),
        kl_p99=quantile(rows.kl, 0.99),
        kl_max=float(np.max(rows.kl)),
        top1_agreement=1 - len(rows.flips) / places,
        topk_agreement=rows.shared / (k * places),
        perplexity_actual=perplexity(rows.loss_actual, rows.targets),
        perplexity_expected=perplexity(rows.loss_expected, rows.targets),
        flips=tuple(rows.flips),
        step=step,
    )


def rounded_as(stored: torch.dtype, engine: str) -> str:
    """Return the dtype whose rounding shows in logits: the engine's, or that in which they are stored if it is coarser.

    A quantized engine's name is no dtype; what its logits are stored in counts.
    """
    computed = getattr(torch, engine) if engine in DTYPES else stored
    return str(coarser(stored, computed)).removeprefix("torch.")


def chunks(logits: torch.Tensor, positions: int) -> Iterator[slice]:
    """Yield slices of so many positions whose copies in float64 stay small; ``logits`` [..., vocab]."""
    step = max(1, CHUNK.get(logits.device.type, CHUNK["cpu"]) // logits.shape[-1])
    for start in range(0, positions, step):
        yield slice(start, min(positions, start + step))


def pick(part: slice, *sides: torch.Tensor) -> torch.Tensor:
    """Return some positions of each side's logits [..., vocab] as float64 [sides, positions, vocab], on the first one's
    device: together they cost half the launches. Raises :class:`~ditto_core.compare.metrics.ShapeMismatch`."""
    for side in sides[1:]:
        if side.shape != sides[0].shape:
            raise ShapeMismatch(sides[0].shape, side.shape)
    rows = [side.detach().reshape(-1, side.shape[-1])[part] for side in sides]
    picked = rows[0].new_empty((len(sides), *rows[0].shape), dtype=torch.float64)
    for own, side in zip(picked, rows, strict=True):
        own.copy_(side)
    return picked


def add_divergence(rows: Rows, both: torch.Tensor, k: int) -> None:
    """Add KL(expected || actual) of each position, and the size of the common top k; ``both`` [2, positions, vocab]."""
    log_a, log_b = both.log_softmax(-1)
    weight = log_b.exp()
    terms = torch.where(weight == 0, 0.0, weight * (log_b - log_a))
    top_a, top_b = both.topk(k).indices
    shared = (top_a.unsqueeze(-1) == top_b.unsqueeze(-2)).sum((-2, -1))
    kl, counts = torch.stack([terms.sum(-1), shared.double()]).tolist()
    rows.kl += [max(0.0, value) if not math.isnan(value) else value for value in kl]
    rows.shared += int(sum(counts))


def flips(both: torch.Tensor, dtype: torch.dtype, near_tie_ulp: float) -> Iterator[tuple[int, Flip]]:
    """Yield the rows of ``both`` [2, rows, vocab] where the argmax differs, each judged by the reference's own gap; the
    index is left empty.

    NaN has no argmax: a row where only the engine has some is a flip, and no near tie.
    """
    (best_a, best_b), (nan_a, nan_b), b = both.argmax(-1), both.isnan().any(-1), both[1]
    lost = nan_a & ~nan_b
    rows = ((best_a != best_b) | lost).nonzero().flatten()
    if not rows.numel():
        return
    chosen, kept = best_a[rows], best_b[rows]
    columns = rows, chosen, kept, b[rows, kept], b[rows, chosen], lost[rows]
    for row, mine, theirs, top, other, gone in zip(*(each.tolist() for each in columns), strict=True):
        gap = math.nan if gone else top - other
        unit = ulp(top, dtype) if math.isfinite(top) else math.nan
        yield row, Flip((), mine, theirs, gap, unit, gap <= near_tie_ulp * unit)


def add_losses(rows: Rows, both: torch.Tensor, targets: torch.Tensor) -> None:
    """Add the negative log-likelihood of the targets on both sides [2, positions, vocab]."""
    targets = targets.to(both.device)
    losses = [torch.nn.functional.cross_entropy(x, targets, ignore_index=IGNORED, reduction="sum") for x in both]
    rows.loss_actual += float(losses[0])
    rows.loss_expected += float(losses[1])
    rows.targets += int((targets != IGNORED).sum())


def perplexities(
    actual: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor
) -> tuple[float | None, float | None]:
    """Return the perplexity of ``targets`` [...] by the logits [..., vocab] of both sides, None where none counts.

    Positions without a target (-100) cost nothing; an id beyond the vocabulary has no likelihood and does not count.
    """
    rows, vocab = Rows(), actual.shape[-1]
    known = ((targets.reshape(-1) >= 0) & (targets.reshape(-1) < vocab)).nonzero().flatten()
    for part in chunks(actual, known.numel()):
        at = known[part]
        sides = [side.detach().reshape(-1, vocab)[at.to(side.device)] for side in (actual, expected)]
        add_losses(rows, pick(slice(None), *sides), targets.reshape(-1)[at])
    return perplexity(rows.loss_actual, rows.targets), perplexity(rows.loss_expected, rows.targets)


def next_tokens(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the token that follows each in a prompt [batch, length]; -100 at its last one and in padding."""
    targets = torch.full_like(ids, IGNORED)
    real = mask.bool()
    targets[:, :-1] = torch.where(real[:, :-1] & real[:, 1:], ids[:, 1:], IGNORED)
    return targets


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between two values; infinity, not NaN, where one of the two is infinite."""
    with np.errstate(invalid="ignore"):
        found = float(np.quantile(values, share))
    return math.inf if math.isnan(found) and not any(map(math.isnan, values)) else found


def perplexity(loss: float, count: int) -> float | None:
    """Return exp of the mean loss, None where nothing was counted; NaN stays NaN."""
    if not count:
        return None
    return math.inf if loss / count >= 700 else math.exp(loss / count)


def matching_prefix(first: Sequence[int] | torch.Tensor, second: Sequence[int] | torch.Tensor) -> int:
    """Return how many leading tokens two sequences [length] have in common."""
    a, b = (x.tolist() if isinstance(x, torch.Tensor) else list(x) for x in (first, second))
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
