"""Additive attention masks: two engines may hide the same entries with other numbers."""

from __future__ import annotations

import torch

from ditto_core.compare._record import Metrics

WEAK = 4.0
"""What a mask leaves of hidden weights is rounding up to so many epsilons of its dtype, rel-L2: as much as a site may
add, see :data:`ditto_core.localize.FACTORS`."""

NOTHING = -1e4
"""A row of a mask without a larger number shows nothing."""

HALF = 0.5
"""Share of its weight from which a key counts as hidden, where all keys lose nearly nothing or nearly all of theirs."""


def as_masks(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what two additive attention masks hide, as bool, for engines hide with other numbers than the reference.

    Where the engine's numbers are too weak to hide, both come back as the share of each weight that they hide, float64
    from 0 to 1. Where the engine's tensor is no additive mask (NaN, a number above 0, integers), and where the
    reference's hides nothing, both come back as they are: zeros may be any tensor. In attention scores [batch, head,
    length, total] with a mask added, what both sides hide is 0.
    """
    if expected.ndim != 4 or not expected.is_floating_point() or expected.itemsize == 1 or not expected.numel():
        return actual, expected
    if not actual.is_floating_point():
        return actual, expected
    if not bool(is_hidden(expected).any()) or actual.shape != expected.shape:
        return actual, expected
    if is_mask(expected) and bool((actual <= 0).all()):
        right = hidden_share(expected)
        # a row that shows nothing, as that of padding, hides with any number
        shows = (right < 1).any(-1, keepdim=True).to(actual.device)
        left = torch.where(shows, hidden_share(actual), (actual < 0).double())
        remaining = float((1 - left[(left > 0) & (left < 1)]).norm())
        weak = remaining > WEAK * torch.finfo(actual.dtype).eps * float(right.norm())
        return (left, right) if weak else (left > HALF, right > HALF)
    hidden = is_hidden(expected) & is_hidden(actual).to(expected.device)
    return actual.masked_fill(hidden.to(actual.device), 0), expected.masked_fill(hidden, 0)


def may_hide(expected: torch.Tensor, metrics: Metrics) -> bool:
    """Tell by a pair's metrics whether :func:`as_masks` may change it; cheaper than a look at the tensors."""
    if expected.ndim != 4 or not expected.is_floating_point():
        return False
    return metrics.inf_expected > 0 or metrics.max_expected >= torch.finfo(expected.dtype).max / 2


def hidden_share(mask: torch.Tensor) -> torch.Tensor:
    """Return 1 - exp(mask) relative to the row's largest, float64: what each key loses of its weight in a softmax.

    A row that shows nothing is 1.
    """
    numbers = mask.double()
    top = numbers.amax(-1, keepdim=True)
    return torch.where(top > NOTHING, -(numbers - top).expm1(), 1.0)


def is_hidden(scores: torch.Tensor) -> torch.Tensor:
    """Tell which floating numbers an additive mask made: about the dtype's most negative one, or -inf."""
    return scores <= torch.finfo(scores.dtype).min / 2


def is_mask(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is an additive attention mask: zeros and the dtype's most negative number only."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.ndim != 4 or not tensor.numel():
        return False
    return bool(((tensor == 0) | is_hidden(tensor)).all())
