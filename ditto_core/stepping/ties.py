"""Class maps: where the reference's scores nearly tie, either class is right."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

SIGMAS = 4 * math.sqrt(2)
"""Four standard deviations of the difference of two numbers that each have the noise floor's error."""


def without_ties(
    classes: torch.Tensor, expected: torch.Tensor, outputs: Mapping[str, torch.Tensor], floors: Mapping[str, float]
) -> torch.Tensor:
    """Return a class map of the engine with the reference's class wherever the reference nearly ties.

    ``outputs`` are the reference's, ``floors`` the usable noise floors (rel-L2) of some of them. The scores are the
    output whose argmax along a dimension is ``expected``; without one the map comes back as it is. Two classes nearly
    tie where their scores differ by at most 4 x sqrt(2) x floor x root mean square, as two tokens do.
    """
    for name, floor in floors.items():
        scores = outputs[name]
        for dim in range(scores.dim()):
            if scores.shape[:dim] + scores.shape[dim + 1 :] != expected.shape or not scores.is_floating_point():
                continue
            if not torch.equal(scores.argmax(dim), expected.long()):
                continue
            known = (classes >= 0) & (classes < scores.shape[dim])
            chosen = scores.gather(dim, torch.where(known, classes, 0).long().unsqueeze(dim)).squeeze(dim)
            noise = SIGMAS * floor * float(scores.double().square().mean().sqrt())
            return torch.where(known & (scores.amax(dim) - chosen <= noise), expected, classes)
    return classes


def is_class_map(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor may hold the numbers of classes."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
