"""Additive masks are compared by what they leave of each key's weight in a softmax."""

import math

import pytest
import torch

from ditto_core.backends.called import CalledSession
from ditto_core.compare.masks import as_masks, hidden_share
from ditto_core.stepping.lockstep import single_step
from ditto_core.stepping.sides import Sides

LOWEST = torch.finfo(torch.float32).min


def mask(*rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype)[None, None]


RIGHT = mask([0.0, LOWEST, LOWEST], [0.0, 0.0, LOWEST])


@pytest.mark.parametrize("number", [-20.0, -1e4, LOWEST, -math.inf])
def test_numbers_that_hide_are_all_the_same(number):
    actual, expected = as_masks(
        RIGHT.clamp(min=number) if number > LOWEST else RIGHT.masked_fill(RIGHT < 0, number), RIGHT
    )
    assert actual.dtype == torch.bool
    assert torch.equal(actual, expected)
    assert expected.flatten().tolist() == [False, True, True, False, False, True]


@pytest.mark.parametrize("number", [-1.0, -5.0, -10.0])
def test_numbers_too_weak_to_hide_show_what_they_leave(number):
    actual, expected = as_masks(RIGHT.clamp(min=number), RIGHT)
    lost = 1 - math.exp(number)
    assert actual.flatten().tolist() == pytest.approx([0, lost, lost, 0, 0, lost], abs=1e-15)
    assert expected.flatten().tolist() == [0, 1, 1, 0, 0, 1]


def test_what_is_left_below_the_rounding_of_the_dtype_is_nothing():
    """exp(-10) is 4.5e-5, float16's epsilon 9.8e-4."""
    right = mask([0.0, torch.finfo(torch.float16).min], dtype=torch.float16)
    assert torch.equal(*as_masks(right.clamp(min=-10.0), right))
    assert not torch.equal(*as_masks(right.clamp(min=-5.0), right))


def test_a_number_on_a_whole_row_changes_nothing():
    assert torch.equal(*as_masks(RIGHT.clamp(min=-1e9) - 3, RIGHT))


def test_a_row_that_shows_nothing_hides_everything():
    actual, expected = as_masks(mask([LOWEST] * 3, [0.0, 0.0, LOWEST]), RIGHT)
    assert actual.flatten().tolist() == [True, True, True, False, False, True]
    assert not torch.equal(actual, expected)
    assert hidden_share(mask([-2e4, -1e4])).tolist() == [[[[1.0, 1.0]]]]


def test_a_row_that_should_show_nothing_hides_with_any_number():
    right = mask([LOWEST] * 3, [0.0, 0.0, LOWEST])
    assert torch.equal(*as_masks(right.clamp(min=-20.0), right))
    assert not torch.equal(*as_masks(torch.zeros_like(right), right))


def test_what_is_no_mask_is_compared_as_it_is():
    actual, expected = as_masks(RIGHT.masked_fill(RIGHT < 0, math.nan), RIGHT)
    assert torch.isnan(actual).sum() == 3
    assert torch.equal(expected, RIGHT)
    assert torch.equal(as_masks(-RIGHT, RIGHT)[0], -RIGHT)


@pytest.mark.parametrize("shape", [(1, 8, 4, 4), (2, 8, 1, 1)])
def test_zeros_that_hide_nothing_are_compared_as_numbers(shape):
    """What a ReLU leaves of channels that are off is zeros too; without the ReLU they are below 0."""
    zeros, below = torch.zeros(shape), torch.full(shape, -5.0)
    assert torch.equal(as_masks(below, zeros)[0], below)
    sides = (CalledSession(lambda x, out=out: {"out": out}, "float32") for out in (below, zeros))
    assert not single_step(Sides(*sides), {"x": torch.ones(1)})[0]
