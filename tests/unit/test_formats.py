"""Number formats: values worked out by hand."""

import pytest
import torch

from ditto_core.compare import formats

ROW = torch.tensor([[1.0, -0.5, 0.26, 127.0], [0.0, 0.1, -0.2, 0.3]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("number", "bits", "rounded"), [(1.25, 1, 1.0), (1.75, 1, 2.0), (1.26, 1, 1.5), (-40.9, 3, -40.0)]
)
def test_mantissas_are_rounded_to_nearest_even(number, bits, rounded):
    assert formats.round_bits(torch.tensor([number], dtype=torch.float64), bits).tolist() == [rounded]


def test_integers_have_a_scale_a_row_a_group_or_one():
    assert formats.integers(ROW, 8)[0].tolist() == [1.0, 0.0, 0.0, 127.0]
    assert formats.integers(ROW, 8)[1] == pytest.approx([0.0, 42 * 0.3 / 127, -85 * 0.3 / 127, 0.3])
    assert formats.integers(ROW, 8, per_tensor=True)[1].tolist() == [0.0] * 4
    assert formats.integers(ROW, 8, group=2)[0] == pytest.approx([1.0, -64 / 127, 0.0, 127.0])


def test_a_group_that_does_not_divide_a_row_leaves_it():
    assert formats.integers(ROW, 8, group=3) is ROW
    assert formats.affine_rows(ROW, 4, group=3) is ROW


def test_unsigned_integers_reach_from_the_least_to_the_largest():
    """2 bits from -1 to 2: steps of 1."""
    row = torch.tensor([[-1.0, 0.4, 1.6, 2.0]], dtype=torch.float64)
    assert formats.affine_rows(row, 2).tolist() == [[-1.0, 0.0, 2.0, 2.0]]
    assert formats.affine(row, 2).tolist() == [[-1.0, 0.0, 2.0, 2.0]]
    by_group = [-2 * 1.4 / 3, 1.4 / 3, 2 * 2 / 3, 2.0]  # zero is code 2 of the first group, 0 of the second
    assert formats.affine_rows(row, 2, group=2)[0] == pytest.approx(by_group)


def test_a_narrow_sum_loses_what_is_half_a_step_away():
    """Above 2048 float16 holds even numbers only: 2048 + 1 + 1 is 2048 one by one, and 2050 in one chunk of three."""
    x, y = torch.tensor([[2048.0, 1.0, 1.0]], dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    assert formats.narrow_sum(x, y, torch.float16, 1).item() == 2048.0
    assert formats.narrow_sum(x, y, torch.float16, 4).item() == 2050.0


def test_a_sum_that_would_take_for_ever_is_refused(monkeypatch):
    monkeypatch.setattr(formats, "LARGEST_SUM", 2)
    with pytest.raises(ValueError, match="1 x 3 roundings"):
        formats.narrow_sum(torch.ones(1, 3), torch.ones(3, 1), torch.float16, 1)
