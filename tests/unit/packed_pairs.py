"""Pairs of every kind that a step has, and the check that many measured at once give what each gives alone."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from ditto_core.compare.metrics import ShapeMismatch, measure
from ditto_core.compare.packed import TensorPair, measure_all
from ditto_core.compare.rows import row_errors

BY_OCTAVE = {"p50", "p90", "p99", "p999"}
ROWS = ("batch", "length", "")
HEADS = ("batch", "head", "length", "")
SHAPES = [
    ((1, 1, 1024), ROWS),
    ((2, 3, 4, 16), HEADS),
    ((4, 3, 40), ROWS),
    ((5, 7), ("", "batch")),
    ((3,), ()),
    ((), ()),
]


def noisy(shape, axes, first, second, seed, **options):
    """Normal numbers of size 20 with an error of 0.01."""
    generator = torch.Generator().manual_seed(seed)
    expected = 20 * torch.randn(shape, generator=generator)
    actual = expected + 1e-2 * torch.randn(shape, generator=generator)
    return TensorPair(actual.to(first), expected.to(second), axes, **options)


def healthy(first, second):
    """Four pairs of each shape, whole and with elements that do not count."""
    pairs = [noisy(shape, axes, first, second, seed) for shape, axes in SHAPES for seed in range(4)]
    valid = (torch.arange(12) % 4 > 0).view(4, 3, 1)
    return [*pairs, *(noisy((4, 3, 40), ROWS, first, second, seed, valid=valid) for seed in range(4))]


def odd(first, second):
    """Zeros on either side, ties, numbers alike, errors on their bound, NaN and Inf, among pairs of the same shape."""
    pairs = [noisy((4, 3, 16), ROWS, first, second, seed) for seed in range(12)]
    pairs[0].actual[0], pairs[0].expected[0, 1], pairs[0].expected[1, 0] = 0, 0, 0
    pairs[1].actual.copy_(pairs[1].expected)
    pairs[2].expected.zero_()
    pairs[3].actual.zero_()
    pairs[4].actual.copy_(pairs[4].expected + 0.5)
    pairs[5].actual[0, 0, 3] = math.nan
    pairs[6].expected[1, 2, 0], pairs[6].actual[3, 2, 1] = math.inf, -math.inf
    pairs[7].expected[2], pairs[7].actual[2] = math.nan, math.nan
    pairs[8].actual.copy_(-pairs[8].expected)
    pairs[9].expected.mul_(1e-6)
    pairs[10].actual.copy_(torch.randint(-2, 3, (4, 3, 16)) / 8)
    pairs[10].expected.zero_()
    return pairs + [pair._replace(rtol=0.0, atol=0.125, equal_nan=True) for pair in pairs]


def check(pairs, by_octave=False):
    """Everything about each pair is what it is alone, but for the order of summing."""
    found = measure_all(pairs)
    assert len(found) == len(pairs)
    for each, pair in zip(found, pairs, strict=True):
        assert not isinstance(each, ShapeMismatch)
        actual, expected, axes, valid, rtol, atol, equal_nan = (x.cpu() if torch.is_tensor(x) else x for x in pair)
        wanted = measure(actual, expected, axes=axes, valid=valid, rtol=rtol, atol=atol, equal_nan=equal_nan)
        for item in fields(wanted):
            got, want = getattr(each.metrics, item.name), getattr(wanted, item.name)
            assert type(got) is type(want), item.name
            if by_octave and item.name in BY_OCTAVE:
                assert got == pytest.approx(want, rel=1.0), item.name
            elif isinstance(want, float) or (item.name.startswith("by_") and want):
                assert got == pytest.approx(want, rel=1e-9, abs=3e-8 if "scale" in item.name else 1e-12), item.name
            else:
                assert got == want, item.name
        for least in (1.0, 2.0**-10):
            rows, errors = each.row_errors(least), row_errors(actual, expected, axes, valid, least=least)
            assert (rows is None) == (errors is None)
            if errors is not None:
                torch.testing.assert_close(rows, errors, rtol=1e-9, atol=0.0)
