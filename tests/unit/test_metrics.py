"""Every metric against a float64 numpy value that is worked out whole, without blocks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ditto_core.compare._blocks import plan
from ditto_core.compare.metrics import Metrics, ShapeMismatch, measure
from ditto_core.compare.ulp import tolerance, ulp
from ditto_core.errors import UsageError
from tests.unit.metric_truth import check

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.bool]
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32)


def random(shape, dtype, generator, spread):
    """Numbers of a dtype: bits at random with ``spread``, else normal ones."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        low, high = (0 if dtype in UNSIGNED else -100), 100
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    base = torch.randn(shape, generator=generator, dtype=torch.float64)
    if spread:
        base = base * torch.exp(4 * torch.randn(shape, generator=generator, dtype=torch.float64))
    limit = torch.finfo(dtype).max
    return base.clamp(-limit, limit).to(dtype)


@st.composite
def pairs(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17, 31]), min_size=0, max_size=4)))
    first, second = draw(st.sampled_from(FLOATS + INTEGERS)), draw(st.sampled_from(FLOATS + INTEGERS))
    spread = draw(st.booleans())
    b = random(shape, second, generator, spread)
    a = random(shape, first, generator, spread)
    if draw(st.booleans()):
        a = (b.double() + 1e-2 * torch.randn(shape, generator=generator)).to(first)
    for side in (a, b):
        values = [v for v in (math.nan, math.inf, -math.inf) if side.dtype in FLOATS]
        values = values[:1] if side.dtype == torch.float8_e4m3fn else values  # it has no infinity
        if values and side.numel() and draw(st.integers(0, 3)) == 0:
            for _ in range(draw(st.integers(1, 3))):
                side.view(-1)[draw(st.integers(0, side.numel() - 1))] = draw(st.sampled_from(values))
    form = draw(st.sampled_from(["plain", "transposed", "strided", "expanded"]))
    return restride(a, form), restride(b, draw(st.sampled_from([form, "plain"])))


def restride(x, form):
    """The same values with other strides."""
    if form == "transposed" and x.dim() >= 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "strided" and x.dim() >= 1:
        return torch.stack([x, x], dim=-1)[..., 0]
    return x


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs(), st.booleans())
def test_every_metric_equals_whole_array_float64(pair, equal_nan):
    actual, expected = pair
    check(actual, expected, measure(actual, expected, equal_nan=equal_nan), equal_nan=equal_nan)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs(), st.integers(0, 2**31))
def test_elements_that_are_not_valid_count_nowhere(pair, seed):
    actual, expected = pair
    generator = torch.Generator().manual_seed(seed)
    shape = [size if i % 2 else 1 for i, size in enumerate(actual.shape)]
    valid = torch.rand(shape, generator=generator) < 0.6
    check(actual, expected, measure(actual, expected, valid=valid), valid=valid)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs())
def test_json_round_trip_is_strict_and_lossless(pair):
    metrics = measure(*pair)
    text = json.dumps(metrics.to_json(), allow_nan=False)
    assert str(Metrics.from_json(json.loads(text))) == str(metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_blocks_and_threads_give_the_same_numbers(dtype, threads):
    generator = torch.Generator().manual_seed(3)
    expected = random((7, 81001), dtype, generator, spread=False)
    actual = (expected.double() + 1e-3 * torch.randn(expected.shape, generator=generator)).to(dtype)
    actual[5, 70000] = 3
    metrics = measure(actual, expected, threads=threads)
    check(actual, expected, metrics)
    transposed = measure(actual.t(), expected.t(), threads=threads)
    assert transposed.rel_l2 == pytest.approx(metrics.rel_l2, rel=1e-12)
    assert transposed.max_abs_index == metrics.max_abs_index[::-1]


@pytest.mark.parametrize(
    "axes", [("batch", "head", "length", ""), ("batch", "", "total", "head"), ("", "past", "head", "batch")]
)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 2, 4, 70001), (1, 1, 140003, 1)])
@pytest.mark.parametrize("strided", [False, True])
def test_error_is_split_by_row_position_and_head(axes, shape, strided):
    generator = torch.Generator().manual_seed(5)
    expected = torch.randn(shape, generator=generator)
    actual = expected + 1e-2 * torch.randn(shape, generator=generator)
    if strided:
        actual = restride(actual, "transposed")
    metrics = measure(actual, expected, axes=axes)
    for field, names in (("by_row", ["batch"]), ("by_position", ["length", "total", "past"]), ("by_head", ["head"])):
        dim = next((axes.index(name) for name in names if name in axes), None)
        if dim is None:
            assert getattr(metrics, field) == ()
            continue
        whole_a, whole_b = actual.double().numpy(), expected.double().numpy()
        d, b = (np.moveaxis(x, dim, 0).reshape(shape[dim], -1) for x in (whole_a - whole_b, whole_b))
        wanted = np.sqrt((d**2).sum(1)) / np.sqrt((b**2).sum(1))
        assert getattr(metrics, field) == pytest.approx(wanted.tolist(), rel=1e-9)


def test_shapes_must_be_equal_and_both_are_named():
    with pytest.raises(ShapeMismatch, match=r"actual \[2, 1\], expected \[2, 3\]"):
        measure(torch.zeros(2, 1), torch.zeros(2, 3))
    with pytest.raises(ShapeMismatch):
        measure(torch.zeros(2, 3), torch.zeros(2, 3), valid=torch.ones(4, dtype=torch.bool))


def test_axes_must_name_every_dimension():
    with pytest.raises(UsageError, match="2 axes for 1 dimensions"):
        measure(torch.zeros(2), torch.zeros(2), axes=("batch", "length"))


def test_complex_numbers_are_compared_by_magnitude():
    """3 + 4i against 3: |d| = 4, |b| = 3; i against 2i: |d| = 1, |b| = 2."""
    actual, expected = torch.tensor([[3 + 4j], [1j]]), torch.tensor([[3 + 0j], [2j]])
    metrics = measure(actual, expected, axes=("batch", ""), rtol=0.6, atol=0.0)
    assert (metrics.max_abs, metrics.max_abs_index, metrics.max_rel) == (4.0, (0, 0), pytest.approx(4 / 3))
    assert (metrics.max_abs_actual, metrics.max_abs_expected) == (5.0, 3.0)
    assert (metrics.mismatched, metrics.first_mismatch) == (1, (0, 0))
    assert metrics.rel_l2 == pytest.approx(math.sqrt((16 + 1) / (9 + 4)))
    assert metrics.by_row == pytest.approx((4 / 3, 1 / 2))
    assert metrics.scale == pytest.approx((9 + 2) / (9 + 4))
    valid = torch.tensor([[False], [True]])
    assert measure(actual, expected, valid=valid).rel_l2 == pytest.approx(1 / 2)


def test_a_small_part_beside_a_large_one_is_no_error_of_a_complex_number():
    close = measure(torch.tensor([1e-9 + 1j]), torch.tensor([2e-9 + 1j]), atol=0.0)
    assert (close.mismatched, close.rel_l2) == (0, pytest.approx(1e-9, rel=1e-6))
    assert measure(torch.tensor([2 + 0j]), torch.tensor([2.0])).rel_l2 == 0.0


@pytest.mark.parametrize(
    "other",
    [complex(-math.inf, 0), complex(0, math.inf), complex(math.nan, 0), 1 + 0j],
    ids=["-inf", "infj", "nan", "1"],
)
def test_a_complex_infinity_equals_itself_alone(other):
    infinite = torch.tensor([complex(math.inf, 0)])
    assert measure(infinite, infinite).rel_l2 == 0.0
    for pair in ((infinite, torch.tensor([other])), (torch.tensor([other]), infinite)):
        metrics = measure(*pair, equal_nan=True)
        assert (metrics.rel_l2, metrics.mismatched) == (math.inf, 1)


def test_unsigned_integers_of_64_bits_are_exact():
    expected = torch.tensor([2**64 - 1, 7], dtype=torch.uint64)
    metrics = measure(torch.tensor([2**64 - 2, 7], dtype=torch.uint64), expected)
    assert (metrics.max_abs, metrics.mismatched, metrics.max_ulp) == (1, 1, 1)
    assert (metrics.max_abs_actual, metrics.max_abs_expected) == (2**64 - 2, 2**64 - 1)
    assert measure(torch.tensor([1, 7]), torch.tensor([1, 7], dtype=torch.uint64)).rel_l2 == 0.0
    assert measure(torch.tensor([-1, 7]), expected).max_abs == 2.0**64


def test_powers_of_two_are_equal_or_not():
    """float8_e8m0fnu holds scales; one step is a factor of two."""
    scales = torch.tensor([0.5, 1.0, 4.0]).to(torch.float8_e8m0fnu)
    assert measure(scales, scales).mismatched == 0
    assert measure(torch.tensor([0.5, 1.0, 8.0]).to(torch.float8_e8m0fnu), scales).mismatched == 1
    assert measure(torch.tensor([2.0**-120] * 3), scales).mismatched == 3


@pytest.mark.parametrize("size", [3, 20_000, 400_000])
def test_an_error_where_the_reference_is_zero_is_infinite(size):
    """Two zeros are equal, and say nothing of the mean."""
    expected = torch.zeros(size)
    expected[0] = 2.0
    actual = expected.clone()
    actual[0] += 1.0
    metrics = measure(actual, expected)
    assert (metrics.max_rel, metrics.mean_rel) == (0.5, 0.5)
    actual[-1] = 1e-3
    metrics = measure(actual, expected)
    assert (metrics.max_rel, metrics.mean_rel) == (math.inf, math.inf)
    assert metrics.max_ulp == pytest.approx(1e-3 / torch.finfo(torch.float32).tiny / 2**-23)


@pytest.mark.parametrize(
    ("first", "second", "gap"), [(2**62, -(2**62), 2.0**63), (128001, 128000, 1), (2**62 + 1, 2**62, 1)]
)
def test_integers_of_64_bits_are_exact(first, second, gap):
    metrics = measure(torch.tensor([7, first]), torch.tensor([7, second]))
    assert (metrics.max_abs, metrics.mismatched, metrics.max_ulp) == (gap, 1, gap)
    assert (metrics.max_abs_actual, metrics.max_abs_expected, metrics.max_abs_index) == (first, second, (1,))
    assert metrics.rel_l2 > 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_error_of_one_ulp_is_one_ulp(dtype):
    expected = torch.tensor([1.0, 1.5, 4.0]).to(dtype)
    actual = expected.double().clone()
    actual[1] += ulp(1.5, dtype)
    metrics = measure(actual.to(dtype), expected)
    assert metrics.max_ulp == 1.0
    assert metrics.max_abs_index == (1,)


def test_the_largest_ulp_is_found_beside_a_larger_relative_error():
    """Just below a power of two an error is more ULP than it is relative to the number."""
    expected = torch.ones(20000, dtype=torch.float64)
    expected[7] = 1.9375
    actual = expected.clone()
    actual[3] += 2**-7
    actual[7] += 1.875 * 2**-7
    metrics = measure(actual, expected)
    assert metrics.max_rel == 2**-7
    assert metrics.max_ulp == 1.875 * 2**45


def test_ulp_is_counted_in_the_coarser_dtype():
    metrics = measure(torch.tensor([1.0], dtype=torch.float16), torch.tensor([1.0 + 2**-11]))
    assert metrics.max_ulp == 0.5
    assert metrics.rtol == tolerance(torch.float16)[0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_one_wrong_element_in_a_hundred_million_is_found(dtype):
    expected = torch.zeros(100_000_000, dtype=dtype)
    actual = expected.clone()
    actual[87_654_321] = 1
    metrics = measure(actual, expected)
    assert (metrics.mismatched, metrics.first_mismatch, metrics.max_abs) == (1, (87_654_321,), 1.0)
    assert metrics.mismatch_ratio == 1e-8
    assert metrics.rel_l2 == math.inf


def test_a_memory_mapped_file_is_measured(tmp_path):
    for name in ("a", "b"):
        np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (3, 500_000))[:] = 2.0
    np.lib.format.open_memmap(tmp_path / "a.npy", "r+")[2, 499_999] = 3.0
    actual, expected = (torch.from_numpy(np.load(tmp_path / f"{name}.npy", mmap_mode="r+")) for name in ("a", "b"))
    metrics = measure(actual, expected)
    assert (metrics.first_mismatch, metrics.mismatched) == ((2, 499_999), 1)
    assert metrics.rel_l2 == pytest.approx(1 / (2 * math.sqrt(1.5e6)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masks_that_hold_the_lowest_number_do_not_overflow(dtype):
    low = torch.finfo(dtype).min
    expected = torch.tensor([[0.0, low], [0.0, 0.0]], dtype=dtype)
    actual = torch.tensor([[0.0, low], [1.0, low]], dtype=dtype)
    metrics = measure(actual, expected, axes=("batch", ""))
    assert metrics.rel_l2 == pytest.approx(1.0)
    assert metrics.by_row == (0.0, math.inf)
    assert metrics.max_abs == pytest.approx(-low)
    assert metrics.headroom == 1.0
    small = measure(torch.tensor([low, 1.0], dtype=dtype), torch.tensor([low, 2.0], dtype=dtype))
    assert small.rms == pytest.approx(math.sqrt(0.5))


def test_float64_opposites_of_the_lowest_number_are_two_apart():
    low = torch.finfo(torch.float64).min
    metrics = measure(torch.tensor([-low], dtype=torch.float64), torch.tensor([low], dtype=torch.float64))
    assert metrics.rel_l2 == pytest.approx(2.0)
    assert metrics.cosine == pytest.approx(-1.0)


def test_float64_numbers_too_small_to_square_are_compared():
    metrics = measure(torch.tensor([1.5e-200, 0], dtype=torch.float64), torch.tensor([1e-200, 0], dtype=torch.float64))
    assert metrics.rel_l2 == pytest.approx(0.5)
    assert metrics.rms == pytest.approx(0.5e-200 / math.sqrt(2))


@pytest.mark.parametrize("factor", [1.01, -1.0, 0.125, 300.0])
def test_a_constant_scale_is_measured(factor):
    expected = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    metrics = measure(expected.double() * factor, expected)
    assert metrics.scale == pytest.approx(factor, rel=1e-9)
    assert metrics.scale_residual < 1e-6
    assert metrics.rel_l2 == pytest.approx(abs(factor - 1), rel=1e-9)


def test_nan_on_both_sides_is_equal_only_on_request():
    both = torch.tensor([1.0, math.nan, math.inf])
    strict, lenient = measure(both, both), measure(both, both, equal_nan=True)
    assert (strict.rel_l2, strict.mismatched, strict.nan_mismatch) == (math.inf, 1, 0)
    assert (lenient.rel_l2, lenient.mismatched) == (0.0, 0)
    assert strict.first_nonfinite == ((1,), "both")
    assert (strict.nonfinite_mismatch, lenient.nonfinite_mismatch) == (1, 0)


def test_the_side_of_the_first_nonfinite_element_is_named():
    metrics = measure(torch.tensor([[1.0, 2.0], [3.0, -math.inf]]), torch.ones(2, 2))
    assert metrics.first_nonfinite == ((1, 1), "actual")
    assert metrics.worst_mismatch == (1, 1)
    assert metrics.first_mismatch == (0, 1)
    assert metrics.max_abs == 2.0


def test_zero_against_something_is_infinite_and_zero_against_zero_is_nothing():
    assert measure(torch.ones(3), torch.zeros(3)).rel_l2 == math.inf
    assert measure(torch.zeros(3), torch.zeros(3)).rel_l2 == 0.0
    vanished = measure(torch.zeros(3), torch.ones(3))
    assert (vanished.rel_l2, vanished.all_zero_actual, vanished.all_zero_expected, vanished.cosine) == (
        1.0,
        True,
        False,
        0.0,
    )


def test_an_empty_pair_counts_nothing():
    metrics = measure(torch.zeros(0, 4), torch.zeros(0, 4), axes=("batch", "head"))
    assert (metrics.count, metrics.rel_l2, metrics.max_abs_index) == (0, 0.0, None)
    assert (metrics.by_row, metrics.by_head) == ((), (0.0,) * 4)


def test_inputs_are_left_as_they_are():
    actual, expected = torch.tensor([1.0, math.nan, -3.0]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    before = actual.clone(), expected.clone()
    measure(actual, expected)
    assert torch.equal(actual.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(expected, before[1])


def test_boxes_cover_a_strided_tensor_once_and_in_order():
    tensor = torch.arange(4 * 6 * 10).view(10, 6, 4).permute(2, 1, 0)
    layout = plan([tensor], [], block=7)
    seen = [(start, box[0].reshape(-1).tolist()) for start, box in layout.boxes(0, layout.count)]
    flat = tensor.reshape(-1).tolist()
    assert [value for _, values in seen for value in values] == flat
    assert all(flat[start : start + len(values)] == values and len(values) <= 7 for start, values in seen)
