"""Layouts between a file's values and the model's sites: found from shapes, applied at other sizes, written as text."""

import math

import numpy as np
import pytest
import torch

from ditto_core.align.alignment import Place
from ditto_core.align.layout import Layout, layouts
from ditto_core.align.verify import distance
from ditto_core.errors import UsageError

BATCHES = (2, 3)
B, T = BATCHES, (11, 17)


def c(size):
    return (size, size)


def texts(value, site):
    return [str(layout) for layout in layouts(value, site, BATCHES)]


def test_equal_shapes_are_plain_first():
    assert texts((B, T, c(64)), (B, T, c(64))) == ["b t c -> b t c"]


def test_heads_are_split_in_either_order():
    found = texts((B, T, c(64)), (B, c(4), T, c(16)))
    assert found == ["b t (c d) -> b c t d, c=4, d=16", "b t (d c) -> b c t d, c=4, d=16"]


def test_heads_that_are_merged_with_the_batch_are_split_in_either_order():
    found = texts((B, T, c(64)), ((8, 12), T, c(16)))
    assert "b t (c d) -> (b c) t d, c=4, d=16" in found
    assert "b t (d c) -> (b c) t d, c=4, d=16" in found


def test_merged_rows_are_split_by_the_batch():
    (layout,) = [x for x in layouts(((22, 51), c(64)), (B, T, c(64)), BATCHES) if str(x).startswith("(b t)")]
    rows = torch.arange(5 * 7 * 64).reshape(35, 64)
    assert torch.equal(layout.apply(rows, batch=5), rows.reshape(5, 7, 64))


def test_sizes_that_differ_have_no_layout():
    assert texts((B, T, c(64)), (B, T, c(32))) == []


def test_a_layout_found_on_one_length_holds_for_another():
    layout = layouts((B, T, c(64)), (B, c(4), T, c(16)), BATCHES)[0]
    value = np.arange(1 * 5 * 64).reshape(1, 5, 64)
    assert np.array_equal(layout.apply(value), value.reshape(1, 5, 4, 16).transpose(0, 2, 1, 3))


def test_channel_blocks_under_the_plain_shape():
    site = np.random.default_rng(0).normal(size=(2, 16, 3, 5))
    blocked = site.reshape(2, 2, 8, 3, 5).transpose(0, 1, 3, 4, 2).reshape(2, 16, 3, 5)
    found = layouts((B, c(16), c(3), c(5)), (B, c(16), c(3), c(5)), BATCHES)
    assert any(np.array_equal(layout.apply(blocked), site) for layout in found)


@pytest.mark.parametrize(
    "value, site",
    [
        ((B, T, c(64)), (B, c(4), T, c(16))),
        (((22, 51), c(64)), (B, T, c(64))),
        ((B, c(1), T, T), (B, c(1), T, T)),
        ((B, c(16), c(4), c(4)), (B, c(16), c(4), c(4))),
    ],
)
def test_text_and_layout_are_each_others_inverse(value, site):
    for layout in layouts(value, site, BATCHES):
        assert str(Layout.parse(str(layout))) == str(layout)


@pytest.mark.parametrize("text", ["b t c", "b t -> b c", "b (c d) -> b c d, c=four"])
def test_a_text_that_is_no_layout_is_refused(text):
    with pytest.raises(UsageError, match="layout"):
        Layout.parse(text)


def test_a_tensor_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="63"):
        Layout.parse("b t (c d) -> b c t d, c=4, d=16").apply(np.zeros((1, 2, 63)))


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, math.nan], [1.0, 0.0], math.inf),
        ([1.0, math.inf], [1.0, 1e-6], math.inf),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, -3e38], [1.0, -math.inf], 0.0),
        ([2.0, 0.0], [1.0, 0.0], 1.0),
    ],
)
def test_what_is_not_finite_on_one_side_is_not_left_out(actual, expected, error):
    """A NaN counted as 0, which a reference near 0 did not show."""
    axes = (("b",), ("c",))
    place = Place("x", "x", Layout(axes, axes))
    assert distance(place, np.float32([actual]), np.float32([expected]), None, 1) == error
