"""Many pairs measured at once give what each gives alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ditto_core.compare import packed
from ditto_core.compare.metrics import ShapeMismatch, measure
from ditto_core.compare.packed import TensorPair, measure_all
from tests.unit.packed_pairs import ROWS, check, healthy, noisy, odd

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def matrices(monkeypatch):
    """The numbers of pairs that were measured as a matrix."""
    seen, real = [], packed.on_cpu
    monkeypatch.setattr(packed, "on_cpu", lambda sides, *rest: (seen.append(len(sides[0])), real(sides, *rest))[1])
    return seen


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_every_metric_and_row_is_that_of_the_pair_alone(first, second, matrices):
    check(healthy(first, second))
    assert sum(matrices) == 28


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_ties_and_numbers_that_are_not_finite(dtype, matrices):
    check(odd(dtype, dtype))
    assert sum(matrices) == 24


@pytest.mark.parametrize("size", [2.0**600, 2.0**-600])
def test_numbers_whose_squares_leave_the_range_are_measured_alone(size, matrices):
    pairs = [noisy((2, 3, 4), ROWS, torch.float64, torch.float64, seed) for seed in range(4)]
    pairs[1].expected[0, 0, 0] = size
    for side in pairs[2][:2]:
        side.mul_(size)
    check(pairs)
    assert matrices == [4]


def test_integers_empty_and_complex_pairs_are_measured_alone(matrices):
    ids = torch.arange(12).view(3, 4)
    empty = torch.zeros(0, 4)
    part = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    kinds = (ids, ids > 3, empty, torch.complex(part, part), part.to(torch.float8_e5m2))
    check([TensorPair(each, each.clone(), ("batch", "")) for each in kinds for _ in range(4)])
    assert not matrices


def test_two_shapes_are_an_error_of_their_pair_alone():
    pairs = [noisy((2, 3, 4), ROWS, torch.float32, torch.float32, seed) for seed in range(4)]
    pairs[1] = pairs[1]._replace(actual=torch.zeros(2, 3, 5))
    found = measure_all(pairs)
    assert isinstance(found[1], ShapeMismatch)
    assert str(found[1]) == "shapes differ: actual [2, 3, 5], expected [2, 3, 4]"
    check([pairs[0], *pairs[2:]])


def test_more_pairs_than_a_matrix_holds(monkeypatch, matrices):
    monkeypatch.setattr(packed, "CPU_MATRIX", 100)
    check([noisy((2, 3, 4), ROWS, torch.float32, torch.float32, seed) for seed in range(9)])
    assert matrices == [4, 4, 1]


def test_a_pass_on_a_gpu_takes_so_many_elements_of_one_dtype(monkeypatch):
    monkeypatch.setattr(packed, "GPU_PASS", 10)

    def kind(size, dtype=torch.float32):
        return packed.Kind(True, torch.device("cuda"), (dtype, dtype), False, torch.Size([size]), ()), ()

    alike = {kind(4): [0, 1, 2, 3], kind(10): [4, 5], kind(1): [6, 7], kind(2, torch.float16): [8]}
    assert list(packed.passes(alike)) == [[[0, 1]], [[2, 3]], [[4]], [[5]], [[6, 7]], [[8]]]
    assert list(packed.passes({kind(4): [0], kind(3): [1, 2]})) == [[[0], [1, 2]]]


def test_a_record_is_copied_with_its_own_fields_and_not_with_the_columns_of_all():
    pairs = [noisy((2, 3, 4), ROWS, torch.float32, torch.float32, seed) for seed in range(4)]
    actual, expected, axes, *_ = pairs[2]
    wanted = measure(actual, expected, axes=axes)
    for taken in (copy.copy, lambda metrics: pickle.loads(pickle.dumps(metrics))):
        found = taken(measure_all(pairs)[2].metrics)
        assert vars(found).keys() == vars(wanted).keys()
        assert (found.max_abs, found.max_abs_index, found.histogram) == (
            *(wanted.max_abs, wanted.max_abs_index),
            wanted.histogram,
        )
    with pytest.raises(AttributeError, match="Metrics has no 'columns'"):
        measure_all(pairs)[0].metrics.columns  # noqa: B018


def test_quantiles_are_linear_in_an_octave_where_nothing_finer_was_counted(monkeypatch):
    """As on CUDA. Half of the errors are 1, half 1.75, all of them in [1, 2): the median by octave is 1.5."""
    pair = TensorPair(torch.tensor([1.0, -1.75]).repeat(32), torch.zeros(64))
    fine = measure_all([pair] * 4)[3].metrics
    real = packed.on_cpu
    monkeypatch.setattr(packed, "on_cpu", lambda *given: real(*given)._replace(quantiles=None))
    coarse = measure_all([pair] * 4)[3].metrics
    assert (fine.p50, fine.p90, fine.p999) == pytest.approx((1.0, 1.75, 1.75), rel=2**-8)
    assert (coarse.p50, coarse.p90, coarse.p999) == (1.5, 1.75, 1.75)  # the largest error is the limit


def test_strided_pairs():
    pairs = [noisy((4, 3, 40), ROWS, torch.float32, torch.bfloat16, seed) for seed in range(3)]
    check([TensorPair(p.actual.transpose(0, 2), p.expected.transpose(0, 2), ("", "length", "batch")) for p in pairs])
