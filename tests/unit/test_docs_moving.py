"""docs/moving.md: both sides of a row give the same verdict on pairs that are close, far, odd, and of other dtypes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ditto_core import assert_close

TEXT = (Path(__file__).parents[2] / "docs/moving.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", TEXT, re.MULTILINE)


def pairs():
    base = torch.linspace(0.5, 2.0, 24).reshape(4, 6)
    changes = [0.0, 2e-8, 3e-7, 2e-6, 5e-5, 2e-4, 9e-4, 1e-2]
    close_and_far = [(base * (1 + change), base) for change in changes]
    shifts = [(base + change, base) for change in (5e-9, 8e-6, 9e-5, 2e-4)]
    holes = base.clone()
    holes[1, 2] = torch.nan
    infinite = base.clone()
    infinite[0, 0] = torch.inf
    odd = [(holes, holes.clone()), (holes, base), (infinite, infinite.clone()), (infinite, base)]
    turned = base.t().contiguous().t()
    return [*close_and_far, *shifts, *odd, (turned, base), (base.double(), base), (base.half(), base.half() * 1.002)]


def holds(code, a, b):
    names = {"a": a, "b": b, "x": a.numpy(), "y": b.numpy(), "torch": torch, "np": np, "assert_close": assert_close}
    if code.startswith("CompareFunc"):
        comparator = pytest.importorskip("polygraphy.comparator")
        compare = eval(code, {"CompareFunc": comparator.CompareFunc})
        sides = [comparator.IterationResult({"out": np.ascontiguousarray(names[side])}) for side in "xy"]
        return all(map(bool, compare(*sides).values()))
    try:
        exec(code, names)
    except (AssertionError, RuntimeError):  # torch.allclose raises the latter for two dtypes
        return False
    return True


def test_the_page_has_rows_for_all_three():
    assert len(ROWS) == 14
    assert {left.split("(")[0].split(".")[0].removeprefix("assert ") for left, _ in ROWS} == {
        "torch",
        "np",
        "CompareFunc",
    }


@pytest.mark.parametrize(("there", "here"), ROWS, ids=[left for left, _ in ROWS])
def test_both_sides_of_a_row_agree(there, here):
    # Polygraphy takes Inf on both sides for a difference, as the page says.
    chosen = [
        pair for pair in pairs() if not (there.startswith("Compare") and all(side.isinf().any() for side in pair))
    ]
    verdicts = [(holds(there, a, b), holds(here, a, b)) for a, b in chosen]
    assert [theirs for theirs, _ in verdicts] == [ours for _, ours in verdicts]
    assert {theirs for theirs, _ in verdicts} == {True, False}
