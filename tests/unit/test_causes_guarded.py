"""Explaining a site never ends a run: a rule that fails, and a norm that is not what the norm rules are about."""

import pytest
import torch
from torch import nn

from ditto_core.causes import FIRST, LAST, Evidence, first_cause
from ditto_core.compare.blame import Cause


def evidence(module, x, actual):
    """The evidence of a module called ``0`` whose output should be ``module(x)``, all float64."""
    with torch.no_grad():
        expected = module.double()(x)
    captured = {"0": actual(expected), "0:in": x}
    shown = ("0", 0, captured["0"], None, {}, captured, 6e-7, 1e-7)
    return Evidence(*shown, expected, nn.Sequential(module), "0", "float32", False, {})


def filled(norm):
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
    return norm.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(6), (4, 6, 5)),
        (nn.BatchNorm2d(6), (2, 6, 3, 5)),
        (nn.BatchNorm2d(5), (2, 5, 3, 5)),
        (nn.GroupNorm(2, 6), (2, 6, 3, 5)),
        (nn.InstanceNorm2d(6, affine=True), (2, 6, 3, 5)),
        (nn.LayerNorm((3, 5)), (2, 6, 3, 5)),
    ],
    ids=["BatchNorm1d", "BatchNorm2d", "as many channels as columns", "GroupNorm", "InstanceNorm2d", "two axes"],
)
def test_a_norm_over_other_axes_is_no_rules_business_and_fails_none(norm, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = evidence(filled(norm), x, lambda y: y + 0.1 * y.square())
    assert first_cause(found, (*FIRST, *LAST)) is None
    assert found.failures == []


def test_a_norm_over_the_last_axis_is_still_named():
    norm = filled(nn.LayerNorm(6))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cause = first_cause(evidence(norm, x, torch.zeros_like), FIRST)
    assert cause.kind == "weights zeroed"


def test_a_rule_that_fails_is_written_down_and_the_others_go_on():
    def broken(evidence):
        raise IndexError("index 7 is out of range")

    def sound(evidence):
        return Cause("sign", evidence.site, 0.9, ("negated",), "look")

    found = evidence(nn.Identity(), torch.ones(3, dtype=torch.float64), torch.neg)
    assert first_cause(found, (broken, sound)).kind == "sign"
    (line,) = found.failures
    assert "broken failed at 0: IndexError: index 7 is out of range" in line
