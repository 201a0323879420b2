"""Additive attention masks: two engines may hide the same entries with other numbers."""

from __future__ import annotations

import torch

from ditto_core.compare._record import Metrics


def as_masks(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what two additive attention masks hide, as bool, for engines hide with other numbers than the reference.

    One whose numbers are too weak shows in the attention's weights. Where the engine's tensor is no mask (NaN, a number
    above 0) both come back as they are. In attention scores [batch, head, length, total] with a mask added, what both
    sides hide is 0.
    """
    if expected.ndim != 4 or not expected.is_floating_point() or expected.itemsize == 1 or not expected.numel():
        return actual, expected
    if is_mask(expected) and bool((actual <= 0).all()):
        return actual < 0, expected < 0
    if not bool(is_hidden(expected).any()) or actual.shape != expected.shape or not actual.is_floating_point():
        return actual, expected
    hidden = is_hidden(expected) & is_hidden(actual).to(expected.device)
    return actual.masked_fill(hidden.to(actual.device), 0), expected.masked_fill(hidden, 0)


def may_hide(expected: torch.Tensor, metrics: Metrics) -> bool:
    """Tell by a pair's metrics whether :func:`as_masks` may change it; cheaper than a look at the tensors."""
    if expected.ndim != 4 or not expected.is_floating_point():
        return False
    largest = metrics.max_expected
    return not largest or metrics.inf_expected > 0 or largest >= torch.finfo(expected.dtype).max / 2


def is_hidden(scores: torch.Tensor) -> torch.Tensor:
    """Tell which floating numbers an additive mask made: about the dtype's most negative one, or -inf."""
    return scores <= torch.finfo(scores.dtype).min / 2


def is_mask(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is an additive attention mask: zeros and the dtype's most negative number only."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.ndim != 4 or not tensor.numel():
        return False
    return bool(((tensor == 0) | is_hidden(tensor)).all())
