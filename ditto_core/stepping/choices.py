"""Choices of experts that nearly tie in the reference: what depends on them is left out, with a note.

A router picks the experts of the largest scores. Where two of the reference's scores are closer than its own rounding
tells apart, the engine may pick the other one, and everything behind is another computation. The rule is that of tokens
and classes: scores nearly tie up to 4 x sqrt(2) x floor x root mean square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ditto_core.sites import Tap
from ditto_core.stepping.prompts import valid_elements
from ditto_core.stepping.ties import SIGMAS


@dataclass(frozen=True)
class Tied:
    """From which step on a row of the batch depends on a choice that nearly tied, and which one, in words."""

    step: int
    reason: str


@dataclass
class Choices:
    """The near ties of one step of ``shape`` [batch, length]; ``known`` are those of the run, by row of the batch.

    A decoder's tokens hand a choice on to those after them, and to all later steps; other models' to their whole row.
    """

    step: int
    shape: tuple[int, int]
    known: dict[int, Tied]
    causal: bool = True
    _chosen: torch.Tensor = field(init=False)
    _ordered: torch.Tensor = field(init=False)
    _most: int = field(default=0, init=False)
    _reason: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._chosen = torch.zeros(self.shape, dtype=torch.bool)
        for row in self.known:
            self._chosen[row] = True
        self._ordered = torch.zeros(self.shape, dtype=torch.bool)

    def take(
        self, tap: Tap, actual: torch.Tensor, expected: torch.Tensor, noisy: Sequence[torch.Tensor], floor: float
    ) -> None:
        """Look at the scores [tokens, experts] of a router on all sides; ``floor`` is the usable noise floor there.

        ``noisy`` are those of the reference in the engine's dtype: where it chose otherwise itself, no floor behind it
        means anything.
        """
        if not tap.choice or expected.shape[:-1].numel() != self._chosen.numel() or actual.shape != expected.shape:
            return
        truth = expected.detach().cpu().double().flatten(0, -2)
        noise = SIGMAS * floor * float(truth.square().mean().sqrt())
        for side in (actual, *noisy):
            self._compare(tap, side.detach().cpu().double().flatten(0, -2), truth, noise)

    def _compare(self, tap: Tap, side: torch.Tensor, truth: torch.Tensor, noise: float) -> None:
        own, other = truth.topk(tap.choice).indices, side.topk(tap.choice).indices
        gap = (truth.gather(1, own) - truth.gather(1, other)).abs().amax(1)
        near = (own != other).any(1) & (gap <= noise) & side.isfinite().all(1)
        others = (own.sort().values != other.sort().values).any(1)
        self._most = max(self._most, tap.choice)
        for place in near.nonzero().flatten().tolist():
            row, position = divmod(place, self.shape[1])
            where = f"step {self.step}, row {row}, position {position}"
            reason = (
                f"experts nearly tie at {tap.site} ({where}: {float(gap[place]) / noise:.2g} x what rounding decides)"
            )
            self._ordered[row, position] = True
            self._reason = self._reason or reason
            if bool(others[place]):  # else the same experts in another order, which their sum does not show
                self._chosen[row, position if self.causal else 0 :] = True
                self.known.setdefault(row, Tied(self.step, reason))

    def left(self, tap: Tap, tensor: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor | None:
        """Return which elements of a tap are judged, broadcastable to it: ``valid`` without what depends on a near tie.

        A router's own scores depend on earlier ones only, as it is asked before they are looked at.
        """
        out = self._of(tap, tensor) if self._reason or self.known else None
        if out is None:
            return valid
        return ~out if valid is None else valid & ~out

    def reason(self) -> str:
        """Return the first near tie of the run, else of the step."""
        return next((tied.reason for tied in sorted(self.known.values(), key=lambda tied: tied.step)), self._reason)

    def _of(self, tap: Tap, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return which elements of a tap depend on a near tie; None for none, or where its rows cannot be told."""
        tokens = self._chosen.numel()
        if "batch" in tap.axes and tensor.ndim == len(tap.axes):
            return self._by_axes(tap) if bool(self._chosen.any()) else None
        rows = tensor.shape[0] if tensor.ndim else 0
        if not rows or rows % tokens:
            return None
        each = rows // tokens
        slots = each == self._most > 1 or (each == 1 and tensor.shape[-1] == self._most)
        flat = (self._chosen | self._ordered) if slots else self._chosen
        if not bool(flat.any()):
            return None
        return flat.flatten().repeat_interleave(each).reshape(-1, *[1] * (tensor.ndim - 1))

    def _by_axes(self, tap: Tap) -> torch.Tensor:
        if "length" in tap.axes:
            kept = valid_elements(tap.axes, ~self._chosen, self.shape[1])
            assert kept is not None
            return ~kept
        sizes = [1] * len(tap.axes)
        sizes[tap.axes.index("batch")] = self.shape[0]
        return self._chosen.any(1).reshape(sizes)


def in_order(actual: torch.Tensor, expected: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Return rows of experts, along a first axis such as ``2*tokens``, in the reference's order within each token.

    Which of a token's experts comes first is no contract: ``topk`` may leave its choices unsorted. A token whose rows
    are not nearest to one of the reference's each keeps its order.
    """
    count = axes[0].partition("*")[0] if axes and axes[0].endswith("*tokens") else ""
    if not count or actual.shape != expected.shape or not expected.is_floating_point():
        return actual
    slots = actual.reshape(-1, int(count), actual[0].numel())
    nearest = torch.cdist(expected.reshape(slots.shape).double(), slots.double()).argmin(-1)
    own = torch.arange(int(count), device=actual.device).expand(nearest.shape)
    order = torch.where((nearest.sort().values == own).all(-1, keepdim=True), nearest, own)
    return slots.gather(1, order[..., None].expand(slots.shape)).reshape(actual.shape)
