"""A norm that gives zeros because its sum of squares is beyond float16."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ditto_core.causes import FIRST, first_cause
from ditto_core.causes.guards import norm_overflow as norm
from tests.unit.test_cause_rules import evidence, kind_of

SITE = "layers.0.norm"
LARGEST = 65504.0


class ScaleNorm(nn.Module):
    """A norm without a bias, as in Llama."""

    def __init__(self, width=2):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def of_norm(x, actual, *, site=SITE, module=None, expected=None, dtype="float16"):
    """Evidence of a norm of ``x`` [token, 2]; the right output is ones."""
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Module()])
    root.layers[0].norm = module or ScaleNorm()
    x, actual = (torch.tensor(side, dtype=torch.float64) for side in (x, actual))
    right = torch.ones_like(actual) if expected is None else torch.tensor(expected, dtype=torch.float64)
    return evidence(site, actual, right, root=root, captured={f"{SITE}:in": x}, dtype=dtype)


def beside(square):
    """A token whose sum of squares is this, of two equal numbers."""
    return [math.sqrt(square / 2)] * 2


@pytest.mark.parametrize(
    ("factor", "kind"), [(0.999, None), (1.001, "norm overflow")], ids=["fits float16", "does not fit"]
)
def test_a_token_that_became_zero_has_squares_beyond_float16(factor, kind):
    """The other token is right, so it is no weight that is zero."""
    found = of_norm([beside(LARGEST * factor), [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]])
    assert kind_of(norm(found)) == kind


@pytest.mark.parametrize("gone", [math.nan, math.inf])
def test_what_is_not_finite_overflowed_too(gone):
    found = norm(of_norm([beside(1e6), [1.0, 1.0]], [[gone, 0.5], [1.0, 1.0]]))
    assert found.kind == "norm overflow"
    assert "of 1 tokens" in found.evidence[0]


def test_every_token_that_is_gone_has_to_be_too_large():
    x = [beside(1e6), beside(100.0)]
    assert norm(of_norm(x, [[0.0, 0.0], [0.0, 0.0]])) is None


def test_a_token_of_zeros_is_right_to_be_zero():
    found = of_norm([beside(1e6), [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], expected=[[1.0, 1.0], [0.0, 0.0]])
    assert "of 1 tokens" in norm(found).evidence[0]


def test_the_peak_and_the_sum_are_those_of_what_is_gone():
    x = [beside(80000.0), beside(200000.0), beside(1e9)]
    line = norm(of_norm(x, [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])).evidence[0]
    assert f"max |x| = {math.sqrt(100000):.4g}, sum x^2 = 2e+05 > 65504" in line
    assert line.endswith("float16's largest")


@pytest.mark.parametrize(("square", "kind"), [(LARGEST * 0.999, None), (LARGEST * 1.001, "norm overflow")])
def test_zeros_of_inputs_that_fit_are_no_overflow(square, kind):
    x = [beside(square), beside(square)]
    assert kind_of(norm(of_norm(x, [[0.0, 0.0], [0.0, 0.0]]))) == kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_another_dtype_some_tokens_have_to_be_right(dtype):
    """A norm whose weight was not loaded gives zeros for all, and a real model's tokens are all this large."""
    x = [beside(1e6), beside(1e5)]
    zeros = of_norm(x, [[0.0, 0.0], [0.0, 0.0]], dtype=dtype)
    assert first_cause(zeros, FIRST).kind == "weights zeroed"
    assert kind_of(norm(of_norm(x, [[0.0, 0.0], [1.0, 1.0]], dtype=dtype))) == "norm overflow"


def test_the_bias_alone_is_what_overflow_leaves():
    module = nn.LayerNorm(2)
    module.bias.data = torch.tensor([0.5, -1.0])
    x = [beside(1e6), [2.0, 1.0]]
    assert kind_of(norm(of_norm(x, [[0.5, -1.0], [1.0, 1.0]], module=module))) == "norm overflow"
    assert norm(of_norm(x, [[0.0, 0.0], [1.0, 1.0]], module=module)) is None


class Norm(nn.GroupNorm):
    """A norm over groups of channels, whose last dimension is no channel."""


@pytest.mark.parametrize(
    ("site", "module"),
    [
        (f"{SITE}:in", None),
        (SITE, nn.Linear(2, 2)),
        (SITE, nn.LayerNorm(2, elementwise_affine=False)),
        (SITE, ScaleNorm(3)),
        (SITE, Norm(1, 2)),
        (SITE, nn.BatchNorm1d(2)),
    ],
    ids=["a port", "no norm", "no weight", "another width", "groups", "a batch"],
)
def test_other_sites_are_left_alone(site, module):
    zeros = [[0.0, 0.0], [0.0, 0.0]]
    found = of_norm([[1.0, 2.0], [2.0, 1.0]], zeros, site=site, module=module)
    assert norm(found) is None
    assert not found.failures


def test_without_the_input_nothing_is_said():
    found = of_norm([[1.0, 2.0]], [[0.0, 0.0]])
    found.captured.pop(f"{SITE}:in")
    assert norm(found) is None
