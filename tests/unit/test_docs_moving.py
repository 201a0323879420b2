"""docs/moving.md: both sides of a row give the same verdict on pairs that are close, far, odd, and of other dtypes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ditto_core import assert_close

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/moving.md").read_text()
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


FAULTS = {
    "token id 128001 in place of 128000": (torch.tensor([5, 128001]), torch.tensor([5, 128000])),
    "int64 2^62 in place of -2^62": (torch.tensor([2**62]), torch.tensor([-(2**62)])),
    "a NaN, and the reference has it too": (torch.tensor([1.0, torch.nan]),) * 2,
    "an Inf, and the reference has it too": (torch.tensor([1.0, torch.inf]),) * 2,
    "one value in place of an array of that value": (torch.tensor(0.5), torch.full((4,), 0.5)),
    "one of two outputs is missing": ({"a": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(3)}),
    "`layer.10` in place of `layer.1`, the values differ by 1e-6": (
        {"layer.10": torch.full((3,), 1 + 1e-6)},
        {"layer.1": torch.ones(3)},
    ),
    "equal, in float16 where the reference is float32": (torch.ones(3, dtype=torch.float16), torch.ones(3)),
}
VERDICTS = re.findall(r"^\| ([^|]+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", TEXT, re.MULTILINE)


def passes(compare, *sides):
    try:
        compare(*sides)
    except AssertionError:
        return "fails"
    return "passes"


def in_numpy(a, b):
    return np.testing.assert_allclose(a.numpy(), b.numpy())


def in_polygraphy(a, b):
    comparator = pytest.importorskip("polygraphy.comparator")
    named = (
        {name: x.numpy() for name, x in (side if isinstance(side, dict) else {"out": side}).items()} for side in (a, b)
    )
    results = [comparator.IterationResult(side) for side in named]
    assert all(map(bool, comparator.SimpleCompareFunc()(*results).values()))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pair_has_the_four_verdicts_of_the_page(fault):
    a, b = FAULTS[fault]
    numpy = "-" if isinstance(a, dict) else passes(in_numpy, a, b)
    found = passes(assert_close, a, b), passes(torch.testing.assert_close, a, b), numpy, passes(in_polygraphy, a, b)
    assert {row[0]: row[1:] for row in VERDICTS}[fault] == found


def test_each_row_of_what_ditto_can_do_names_a_test_that_is_there():
    table = TEXT.partition("## What each can do")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| .*$", table, re.MULTILINE)][
        1:
    ]
    for question, here, *_, test in (row for row in rows if not row[0].startswith("---")):
        if here == "no":
            assert not test, question
            continue
        path, _, name = test.strip("`").partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), question
    assert len(rows) == 24  # the first is the line of dashes
