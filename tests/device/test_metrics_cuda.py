"""The fused Triton kernel against the CPU's numbers. With ``TRITON_INTERPRET=1`` it runs without a GPU."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import fields

import pytest
import torch

from ditto_core.compare import _launch, cuda
from ditto_core.compare._assemble import assemble
from ditto_core.compare.metrics import make_rules, measure, prepare

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernel needs Triton"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="the kernel needs a GPU"),
]

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
]
SHAPES = [(1,), (), (0, 3), (3, 5, 7), (1, 1025), (2, 3, 4, 1031)]
BY_OCTAVE = {"p50", "p90", "p99", "p999"}
EXACT = {"count", "mismatched", "first_mismatch", "worst_mismatch", "max_abs_index", "histogram", "first_nonfinite"}


def fused(actual, expected, axes=(), valid=None, rtol=None, atol=None, equal_nan=False):
    """Measure on the device; under the interpreter, call the kernel's entry on CPU tensors."""
    if not INTERPRETED:
        valid = valid if valid is None else valid.to(DEVICE)
        sides = actual.to(DEVICE), expected.to(DEVICE)
        return measure(*sides, axes=axes, valid=valid, rtol=rtol, atol=atol, equal_nan=equal_nan)
    pair = prepare(actual, expected, valid, axes)
    rules = make_rules(pair, rtol, atol, equal_nan)
    try:
        return assemble(cuda.accumulate(pair.plan(cuda.block((pair.actual, pair.expected))), rules), actual, expected)
    except cuda.OutOfRange:
        return measure(actual, expected, axes=axes, valid=valid, rtol=rtol, atol=atol, equal_nan=equal_nan)


def check(actual, expected, rounded=False, **options):
    """Every field of the device's metrics equals the CPU's; sums and ratios as far as :func:`limits` says."""
    found, wanted = fused(actual, expected, **options), measure(actual, expected, **options)
    for item in fields(wanted):
        got, want = getattr(found, item.name), getattr(wanted, item.name)
        exact = item.name in EXACT or not isinstance(want, float | tuple) or isinstance(want, bool)
        if item.name not in BY_OCTAVE and (exact or (rounded and item.name == "max_abs")):
            assert got == want, item.name
        else:
            assert got == pytest.approx(want, **limits(item.name, wanted, rounded)), item.name


def limits(name, wanted, rounded):
    """How far a field may be from the CPU's: by the order of summing, or by float32's rounding."""
    if name in BY_OCTAVE:
        return {"rel": 1.0}
    if not rounded:
        return {"rel": 1e-9, "abs": 3e-8 if "scale" in name else 1e-12}
    own = {"scale_residual": {"rel": 1e-5, "abs": 1e-4 * wanted.rel_l2}, "snr_db": {"abs": 2e-5}}
    return own.get(name, {"rel": 2e-6})


def pair(shape, first, second, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = 20 * torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return tuple(cast(x, dtype) for x, dtype in ((base + noise, first), (base, second)))


def cast(x, dtype):
    if dtype == torch.bool:
        return x > 0
    return (x.abs() if dtype == torch.uint8 else x).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(dtype, shape):
    check(*pair(shape, dtype, dtype))


@pytest.mark.parametrize(
    ("first", "second"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float64), (torch.int64, torch.float32)]
)
def test_dtypes_may_differ(first, second):
    check(*pair((5, 411), first, second))


@pytest.mark.parametrize("equal_nan", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_nan_and_inf_on_either_side(dtype, equal_nan):
    actual, expected = pair((4, 700), dtype, dtype)
    actual[1, 5], actual[3, 699], actual[2, 2], actual[0, 7] = math.nan, math.inf, math.inf, -math.inf
    expected[1, 5], expected[0, 3], expected[2, 2], expected[0, 8] = math.nan, math.nan, math.inf, math.inf
    check(actual, expected, equal_nan=equal_nan)


def test_elements_that_are_not_valid_count_nowhere():
    actual, expected = pair((3, 4, 333), torch.float32, torch.float32)
    actual[1, 2, 3] = math.nan
    valid = torch.ones(3, 1, 333, dtype=torch.bool)
    valid[1, :, :50] = False
    check(actual, expected, valid=valid, axes=("batch", "head", ""))


@pytest.mark.parametrize("axes", [("batch", "head", "length", ""), ("batch", "", "total", "head")])
def test_splits_by_axis(axes):
    check(*pair((2, 3, 5, 77), torch.float16, torch.float16), axes=axes)


def test_strides():
    actual, expected = pair((6, 90, 11), torch.float32, torch.float32)
    check(actual.transpose(0, 2), expected.transpose(0, 2), axes=("length", "", "batch"))
    check(actual[:, ::2], expected[:, 1::2])


def test_integers_of_64_bits_are_exact():
    check(torch.tensor([1, 2**62]), torch.tensor([1, -(2**62)]))
    check(torch.tensor([5, 2**62 + 1]), torch.tensor([5, 2**62]))


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_masks_that_hold_the_lowest_number(dtype):
    low = torch.finfo(dtype).min
    check(torch.tensor([[0.0, low], [1.0, low]], dtype=dtype), torch.tensor([[0.0, low], [0.0, 0.0]], dtype=dtype))


LARGE = 3 * _launch.TILE + 700
"""Three tiles of the quick kernel and a rest."""


@pytest.fixture
def always_quick(monkeypatch):
    monkeypatch.setattr(_launch, "QUICK", 1)
    monkeypatch.setattr(_launch, "QUICK_PROGRAMS_PER_CORE", 1)


def close(actual, expected, **options):
    """Counts, places and the largest error are the CPU's; sums and ratios to float32's precision."""
    check(actual, expected, rounded=True, **options)


@pytest.mark.parametrize("first", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("second", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("error", [1.0, 1e-3])
def test_the_quick_kernel(always_quick, first, second, error):
    generator = torch.Generator().manual_seed(1)
    expected = torch.randn(LARGE, generator=generator)
    actual = expected + error * torch.randn(LARGE, generator=generator)
    close(actual.to(first), expected.to(second))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_quick_kernel_declines_what_it_cannot_measure(always_quick, dtype):
    generator = torch.Generator().manual_seed(2)
    expected = torch.randn(LARGE, generator=generator)
    actual = expected + 1e-2 * torch.randn(LARGE, generator=generator)
    actual[7], expected[8], expected[5000] = math.nan, math.inf, -math.inf
    actual[8000:8300] *= 200
    expected[10000:10100] = 0
    close(actual.to(dtype), expected.to(dtype))
    valid = torch.ones(LARGE, dtype=torch.bool)
    valid[::4501] = False
    close(actual.to(dtype), expected.to(dtype), valid=valid)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rtol", "atol"), [(0.0, 0.0), (0.0, 0.125), (0.25, 0.0), (0.5, 0.25)])
def test_the_quick_kernel_on_errors_that_lie_on_the_bound(always_quick, dtype, rtol, atol):
    generator = torch.Generator().manual_seed(3)
    expected = torch.randint(-4, 5, (LARGE,), generator=generator) / 4
    actual = expected + torch.randint(-2, 3, (LARGE,), generator=generator) / 8
    close(actual.to(dtype), expected.to(dtype), rtol=rtol, atol=atol)
    close(expected.to(dtype), expected.to(dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e25])
def test_the_quick_kernel_on_numbers_far_from_one(always_quick, size):
    generator = torch.Generator().manual_seed(4)
    expected = size * torch.randn(LARGE, generator=generator)
    close(expected * (1 + 1e-3 * torch.randn(LARGE, generator=generator)), expected)
    close(torch.zeros(LARGE), expected)


def test_the_quick_kernel_resolves_a_constant_factor(always_quick):
    expected = torch.randn(LARGE, generator=torch.Generator().manual_seed(5))
    found = fused((expected * 1.25).half(), expected.half())
    assert found.scale == pytest.approx(1.25, rel=1e-4)
    close(-expected, expected)
    close(1e-4 * expected.flip(0), expected)


def test_the_quick_kernel_gives_the_same_bits_twice(always_quick):
    generator = torch.Generator().manual_seed(6)
    expected = torch.randn(LARGE, generator=generator).half()
    actual = expected + 1e-3 * torch.randn(LARGE, generator=generator).half()
    actual[123] = math.nan
    assert fused(actual, expected).to_json() == fused(actual, expected).to_json()


def test_counters_hold_the_most_tiles_that_a_program_gets(always_quick, monkeypatch):
    monkeypatch.setattr(_launch, "cores", lambda tensor: 1)
    expected = torch.ones(_launch.TILES_A_PROGRAM * _launch.TILE)
    found = fused(expected + 0.5, expected)
    assert found.histogram == ((0.5, expected.numel()),)


def test_of_two_errors_that_tie_in_float32_one_is_shown(always_quick):
    expected = torch.zeros(2 * _launch.TILE)
    actual = expected.clone()
    actual[5], expected[5] = 2.0, 1.0
    actual[_launch.TILE + 9], expected[_launch.TILE + 9] = 1.0, -(2.0**-24)
    found = fused(actual, expected, rtol=0.0, atol=0.5)
    assert found.max_abs == pytest.approx(1.0, rel=2.0**-23)
    assert found.max_abs_index in ((5,), (_launch.TILE + 9,))
