"""Kinds of tensors that are judged in their own way: class maps, scales, long rows, outputs by another name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ditto_core import assert_close
from ditto_core.compare.metrics import measure
from ditto_core.compare.rows import row_errors, worst_row
from ditto_core.compare.tolerance import EPSILON, Tolerance
from ditto_core.compare.verdict import WITHIN
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.stepping.lockstep import single_step
from ditto_core.stepping.sides import Sides
from ditto_core.stepping.ties import without_ties

CLOSE, APART = 0.002, 0.2
"""Differences of the two best scores, below and above what a floor of 1e-3 at scores around 1 makes uncertain."""


class StandInSession:
    """Stands in for an engine or a model: it returns the outputs that it is given."""

    def __init__(self, dtype, outputs, taps=()):
        self.info, self._outputs, self.taps = SessionInfo("stand-in", "stand-in", dtype), outputs, taps

    def start(self, batch):
        pass

    def step(self, inputs, sink):
        for tap in self.taps:
            sink(tap.site, self._outputs[tap.value])
        return dict(self._outputs)

    def close(self):
        pass


def segmented(wrong, *, class_dim=1, error=1e-3, untapped=False, scores="scores"):
    """Compare class maps [2, 6, 6] of five classes: the engine has the second best at the elements ``wrong``.

    At [0, 0, 0] the two best are CLOSE, at [0, 0, 1] APART, elsewhere a whole unit. Floats are off by ``error``, in
    the engine and in the low-precision reference, whose classes are those of the reference.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(2, 5, 6, 6, generator=generator).argsort(1)
    theirs = order.double() - 2
    best, second = theirs.argmax(1), theirs.topk(2, dim=1).indices[:, 1]
    for x, gap in enumerate((CLOSE, APART)):
        theirs[0, second[0, 0, x], 0, x] = theirs[0, best[0, 0, x], 0, x] - gap
    classes = best.clone()
    for index in wrong:
        classes[index] = second[index]
    noise = error * theirs.square().mean().sqrt() * torch.randn(theirs.shape, generator=generator)
    maps = {"expected": best, "actual": classes, "scores": theirs, "noisy": theirs + noise}
    if class_dim == 3:
        maps |= {name: maps[name].movedim(1, 3) for name in ("scores", "noisy")}
    sides = [
        StandInSession(kind, {"classes": maps[own], scores: maps[floats]})
        for kind, own, floats in (
            ("float16", "actual", "noisy"),
            ("float32", "expected", "scores"),
            ("float16", "expected", "noisy"),
        )
    ]
    low = sides[2]
    if untapped:
        sides = [low, sides[1], low, sides[0]]
    return single_step(Sides(*sides), {})[0]


@pytest.mark.parametrize("untapped", [False, True])
@pytest.mark.parametrize("class_dim", [1, 3])
@pytest.mark.parametrize(
    ("wrong", "passes"),
    [([], True), ([(0, 0, 0)], True), ([(0, 0, 1)], False), ([(1, 3, 3)], False), ([(0, 0, 0), (1, 3, 3)], False)],
)
def test_a_class_may_differ_where_the_references_scores_nearly_tie_and_nowhere_else(wrong, passes, class_dim, untapped):
    """The low-precision reference has no tie on the wrong side: its own share of mismatches is 0."""
    run = segmented(wrong, class_dim=class_dim, untapped=untapped)
    assert bool(run) is passes
    counts = [r.metrics.mismatched for r in run.results if r.site.startswith("classes")]
    assert max(counts) == len([index for index in wrong if index != (0, 0, 0)])
    assert any("1 of 72 classes are near ties" in note for note in run.notes) is ((0, 0, 0) in wrong)


def test_without_a_usable_floor_no_class_is_excused():
    assert not segmented([(0, 0, 0)], error=0.3)


@pytest.mark.parametrize(("share", "near"), [(0.99, True), (1.01, False)])
def test_two_classes_nearly_tie_within_four_standard_deviations_of_their_difference(share, near):
    """The gap is that share of 4 sqrt(2) x floor x root mean square of the scores; class 0 is a class too."""
    gap = 0.05
    scores = torch.tensor([[10.0 - gap, 10.0, 0.0, -10.0]], dtype=torch.float64)
    floor = gap / share / (4 * math.sqrt(2) * math.sqrt(((10 - gap) ** 2 + 200) / 4))
    found = without_ties(torch.tensor([0]), torch.tensor([1]), {"x": scores}, {"x": floor})
    assert found.tolist() == [1 if near else 0]


@pytest.mark.parametrize("value", [-1, 5])
def test_a_class_that_does_not_exist_is_wrong(value):
    scores = torch.zeros(1, 5, 2)
    scores[:, 0] = 1
    ours = StandInSession("float16", {"classes": torch.tensor([[value, 0]]), "scores": scores})
    theirs = StandInSession("float32", {"classes": torch.tensor([[0, 0]]), "scores": scores})
    low = StandInSession("float16", {"classes": torch.tensor([[0, 0]]), "scores": 1.0001 * scores})
    assert not single_step(Sides(ours, theirs, low), {})[0]


@pytest.mark.parametrize(("rule", "passes"), [("logits", True), ("head", True), ("other", False)])
@pytest.mark.parametrize("bound", [{"rtol": 0.1}, {"rtol": 0.0, "atol": 0.1}])
def test_elements_of_an_output_that_is_a_tap_are_counted_by_the_rule_that_names_either(rule, passes, bound):
    taps = (Tap("head", "logits"), Tap("other", "other"))
    theirs = {"logits": torch.ones(2, 3, 8), "other": torch.ones(2, 3, 8)}
    ours = {**theirs, "logits": 1.05 * theirs["logits"]}
    sides = [StandInSession(dtype, out, taps) for dtype, out in (("float32", ours), ("float64", theirs))]
    tolerance = Tolerance.of({rule: {"max_mismatch_ratio": 0.01, **bound}})
    assert bool(single_step(Sides(*sides), {}, tolerance=tolerance)[0]) is passes


ROWS, WIDTH = 4096, 64


@pytest.mark.parametrize(("fault", "passes"), [(0.0, True), (2e-3, True), (5e-3, False), (0.1, False)])
def test_one_row_of_4096_in_float16_fails(fault, passes):
    """The worst of 4,096 rows may have 7.6 times its floor, which is at least half of epsilon: 3.7e-3.

    The whole tensor's error is a 64th of the row's: its bound of 2e-3 hides a fault of 10 %.
    """
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(1, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    noisy, actual = expected.half(), expected.half()
    actual[0, 77] = ((1 - fault) * expected[0, 77]).half()
    axes = ("batch", "length", "")
    floors = row_errors(noisy, expected, axes)
    row = worst_row(row_errors(actual, expected, axes), floors, expected.shape, axes)
    numbers, floor = measure(actual, expected), measure(noisy, expected).rel_l2
    verdict = Tolerance().judge(("x",), 0, numbers, "float16", floor, row=row)
    assert verdict.ok is passes
    if not passes:
        assert (verdict.metric, row.index) == ("row_rel_l2", (0, 77))
        assert verdict.bound == pytest.approx(4 * (1 + math.log10(ROWS) / 4) * EPSILON["float16"] / 2, rel=1e-3)
        assert numbers.rel_l2 < 4 * EPSILON["float16"] / 2


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_every_8_bit_float_is_judged_by_its_own_step(dtype):
    kind = getattr(torch, dtype)
    expected = torch.tensor([1.0, 2.0, 4.0, 8.0]).to(kind)
    assert Tolerance().judge(("x",), 0, measure(expected, expected), dtype).status == WITHIN
    assert not Tolerance().judge(("x",), 0, measure(torch.zeros(4).to(kind), expected), dtype).ok


@pytest.mark.parametrize("kind", [np.uint64, np.ulonglong, np.longlong])
def test_ids_of_64_bits_are_compared_by_any_of_their_names(kind):
    assert_close(np.array([1, 2**40], kind), np.array([1, 2**40], np.uint64))
    with pytest.raises(AssertionError, match="1 of 2 elements"):
        assert_close(np.array([1, 2**40 + 1], kind), np.array([1, 2**40], kind))
