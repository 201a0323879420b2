"""The error of each row [batch, position], worked out by hand."""

import json
import math

import numpy as np
import pytest
import torch

from ditto_core.compare.row_error import RowError
from ditto_core.compare.rows import BLOCK, row_dimensions, row_errors, usual, worst_row

AXES = ("batch", "length", "")


def rows(*values):
    """Return a tensor [1, rows, 2]."""
    return torch.tensor([values], dtype=torch.float32)


@pytest.mark.parametrize(
    ("axes", "dims"),
    [
        (("batch", "length", ""), (0, 1)),
        (("batch", "head", "length", "total"), (0, 2)),
        (("batch", "head", "total", ""), (0, 2)),
        (("batch", ""), (0,)),
        (("", ""), ()),
    ],
)
def test_rows_are_numbered_by_batch_and_position(axes, dims):
    assert row_dimensions(axes) == dims


def test_each_row_has_an_error_of_its_own():
    errors = row_errors(rows((3, 4), (0, 0), (3, 4)), rows((3, 4), (3, 4), (3, 4)), AXES)
    assert errors.tolist() == [0, 1, 0]
    assert row_errors(rows((3, 4), (3, 9)), rows((3, 4), (3, 4)), AXES).tolist() == [0, 1]


def test_a_row_of_zeros_is_measured_against_the_usual_row():
    wide = torch.ones(1, 2, 32)
    wide[0, 0] = 0
    actual = wide.clone()
    actual[0, 0, 0] = 1e-6
    assert row_errors(actual, wide, AXES)[0] == pytest.approx(1e-6 / (2**-10 * math.sqrt(32 / 2)))


def test_a_narrow_row_is_measured_against_the_usual_row():
    """One number near 0 has a large relative error of its own, which says nothing."""
    errors = row_errors(rows((1e-3, 0), (3, 4)), rows((1e-4, 0), (3, 4)), AXES)
    assert errors[0] == pytest.approx(9e-4 / (5 / math.sqrt(2)), rel=1e-3)


def test_padding_does_not_count():
    valid = torch.tensor([[[False], [True]]])
    assert row_errors(rows((9, 9), (3, 4)), rows((3, 4), (3, 4)), AXES, valid).tolist() == [0, 0]


@pytest.mark.parametrize(("value", "error"), [(math.nan, math.inf), (math.inf, math.inf)])
def test_what_is_not_finite_on_one_side_only_is_infinitely_wrong(value, error):
    assert row_errors(rows((value, 4), (3, 4)), rows((3, 4), (3, 4)), AXES).tolist() == [error, 0]
    assert row_errors(rows((3, 4), (3, 4)), rows((value, 4), (3, 4)), AXES).tolist() == [error, 0]
    assert row_errors(rows((value, 4), (3, 4)), rows((value, 4), (3, 4)), AXES).tolist() == [0, 0]


def test_a_tensor_of_one_row_or_of_integers_has_no_rows():
    assert row_errors(rows((1, 2)), rows((1, 2)), AXES) is None
    assert row_errors(torch.zeros(3, 2), torch.zeros(3, 2), ("", "")) is None
    ids = torch.arange(4).reshape(1, 4, 1)
    assert row_errors(ids, ids, AXES) is None


def test_the_worst_row_is_the_one_furthest_beyond_its_own_floor():
    errors, floors = np.array([0.4, 0.2, 0.1, 0.01]), np.array([0.3, 0.01, 0.02, 0.001])
    found = worst_row(errors, floors, (2, 2, 8), AXES)
    assert (found.index, found.rows, found.width) == ((0, 1), 4, 8)
    assert (found.error, found.floor) == (pytest.approx(0.2), pytest.approx(0.01))  # the median floor is 0.01


def test_without_floors_the_worst_row_has_the_largest_error():
    found = worst_row(np.array([0.1, math.inf, 0.2]), None, (1, 3, 5), AXES)
    assert (found.index, found.error, found.floor) == ((0, 1), math.inf, None)
    assert RowError.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


def test_an_error_of_exactly_1_is_an_error():
    a, b = torch.zeros(2, 32), torch.zeros(2, 32)
    a[:, 0], b[:, 0] = torch.tensor([4.0, 5.0]), 4.0
    errors = row_errors(a, b, ("batch", "width"))
    assert errors.tolist() == [0, 0.25]
    assert worst_row(np.array([1.0, 0.5]), np.array([0.5, 0.5]), (2, 32), ("batch", "width")).index == (0,)


def test_a_number_that_is_none_on_both_sides_adds_nothing_to_its_rows_size():
    a, b = torch.zeros(2, 32), torch.zeros(2, 32)
    a[:, 0] = b[:, 0] = torch.nan
    a[:, 1], b[:, 1] = 2.5, 2.0
    assert row_errors(a, b, ("batch", "width")).tolist() == [0.25, 0.25]


def test_an_equal_row_is_not_the_worst():
    found = worst_row(np.array([0.0, 0.005]), np.array([0.01, 0.01]), (2, 32), ("batch", "width"))
    assert (found.index, found.floor) == ((1,), pytest.approx(0.01))


@pytest.mark.parametrize(
    ("floors", "least"),
    [([0.03, 0.01, 0.02], 0.02), ([0.0, 0.0, 0.02], 0.02), ([0.0, 0.0, 0.0], 0.0), ([3.0, 0.0, 0.2], 0.2)],
)
def test_a_rows_floor_is_at_least_the_median_of_rows_that_have_one(floors, least):
    """Padding has none. Of an even number the smaller middle one is taken."""
    assert usual(np.array(floors)) == pytest.approx(least)


def test_a_wide_row_is_measured_in_full():
    """Rows of more elements than are widened at a time."""
    a = torch.ones(2, BLOCK + 1)
    b = a.clone()
    a[1, -1] = 1 + 2.0**10
    assert row_errors(a, b, ("batch", "width")).tolist() == pytest.approx([0, 2.0**10 / math.sqrt(BLOCK + 1)])
