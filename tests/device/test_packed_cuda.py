"""Many pairs in one kernel against the CPU's numbers. With ``TRITON_INTERPRET=1`` the kernel runs without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import pytest
import torch

from ditto_core.compare import packed
from ditto_core.compare.packed import TensorPair, measure_all
from tests.unit.packed_pairs import ROWS, check, healthy, noisy, odd

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernel needs Triton"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="the kernel needs a GPU"),
]


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """The numbers of pairs that went into each launch; the interpreter gets the pairs that CUDA would."""
    seen, real = [], packed.on_cuda
    monkeypatch.setattr(
        packed, "on_cuda", lambda sides, *rest: (seen.append(sum(map(len, sides[0]))), real(sides, *rest))[1]
    )
    if INTERPRETED:
        monkeypatch.setattr(packed, "usable", lambda tensor: True)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return seen


def there(pairs):
    """Bring pairs to the device."""
    if INTERPRETED:
        return pairs
    return [TensorPair(*(x.cuda() if torch.is_tensor(x) else x for x in pair)) for pair in pairs]


@pytest.mark.parametrize("first", [torch.float32, torch.float16, torch.bfloat16])
def test_pairs_of_many_shapes_are_one_launch(first, launches):
    check(there(healthy(first, torch.float32)), by_octave=True)
    assert launches == [24, 4]  # with masks and without


def test_zeros_ties_and_numbers_that_are_not_finite(launches):
    check(there(odd(torch.float32, torch.float32)), by_octave=True)
    assert launches == [24]


def test_twice_the_same_pairs_give_the_same_bits():
    pairs = there([noisy((1, 3, 700), ROWS, torch.bfloat16, torch.float32, seed) for seed in range(5)])
    first, second = ([found.metrics.to_json() for found in measure_all(pairs)] for _ in range(2))
    assert first == second
