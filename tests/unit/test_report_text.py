"""A comparison as text. The numbers are worked out by hand: bounds are 4 times a floor of 1e-3."""

import math
import re

import pytest

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.result import STEPS, ObserverEffect, TokenResult
from ditto_core.compare.table import BARS, site_rows, sparkline, table
from ditto_core.compare.text import failure_message, headline, summary_line, token_message
from tests.unit.hand_made import ENGINE, REFERENCE, SITES, compared

DOWN, BLOCK, ROPE, HEAD = "model.layers.0.mlp.down_proj", "model.layers.0", SITES[0], "lm_head"
NOT_ALL_STEPS = "not all steps could be compared: 2 in a, 1 in b"
INHERITED = {(0, DOWN): 0.4, (0, BLOCK): 0.04, (0, HEAD): 0.02, (0, SITES[1]): 2e-3, (1, ROPE): 0.05}


def lines(run: Comparison) -> list[str]:
    return failure_message(run).splitlines()


def test_the_message_names_site_step_number_bound_rule_source_and_what_next():
    tokens = (TokenResult("p", (1, 2), (1, 3)),)
    run = compared(INHERITED, tokens=tokens, observer=ObserverEffect(0.0, 0, "logits"), dump="/d")
    assert lines(run) == [
        f"engine diverges at {DOWN}, step 0: rel_l2 4.0e-01 > 4.0e-03 (4 x noise floor 1.0e-03)",
        "  first bad site: Linear, model.py:3 forward: x3",
        "  there: max abs 4.0e-01 at [0] (engine 1.4, reference 1), cosine 1.000000, scale 1.40000",
        f"  worst: {DOWN} step 0 (100 x bound); {BLOCK} step 0 (10 x bound); {HEAD} step 0 (5 x bound)",
        "  bad: 3 of 6 sites in 2 steps; recovered downstream: 1; before it at most 0.5 x bound",
        "  at the output: lm_head step 0, rel_l2 2.0e-02 > 4.0e-03 (4 x noise floor 1.0e-03); "
        "1 of 2 greedy tokens agree",
        "  observer effect: none, the engine without taps gives the same outputs",
        "  dump: /d",
        "  next: ditto compare /d/engine /d/reference",
    ]


def test_the_message_has_at_most_ten_lines_whatever_is_in_it():
    everything = compared(INHERITED, missing={"x": "refused"}, observer=ObserverEffect(0.5, 1, "logits"))
    assert len(lines(everything)) == 10
    assert "  observer effect: taps change logits by rel_l2 5.0e-01 at step 1" in lines(everything)
    assert f"  next: the taps themselves disturb this engine; tap less, for instance outputs=['{DOWN}']" in lines(
        everything
    )
    assert "  1 of 7 sites could not be compared: x: refused" in lines(everything)


def test_what_is_not_finite_is_counted_and_placed():
    found = lines(compared({(0, HEAD): math.nan}))
    assert found[0] == "engine diverges at lm_head, step 0: rel_l2 inf > 4.0e-03 (4 x noise floor 1.0e-03)"
    assert found[2] == "  not finite: engine 64 NaN and 0 Inf, reference 0 NaN and 0 Inf of 64, first at [0] (actual)"


def test_missing_sites_and_empty_comparisons_have_headlines_of_their_own():
    run = compared({}, missing={"a.b": "the reference did not compute it"})
    assert headline(run) == "1 of 7 sites could not be compared: a.b: the reference did not compute it"
    at_one_step = compared({}, missing={DOWN: "only in the reference, step 1"})
    assert headline(at_one_step) == f"1 of 6 sites could not be compared: {DOWN}: only in the reference, step 1"
    steps = compared({}, missing={"a.b": "refused", STEPS: "2 in a, 1 in b"})
    assert headline(steps).endswith("1 of 7 sites could not be compared: a.b: refused; " + NOT_ALL_STEPS)
    assert headline(compared({}, missing={STEPS: "2 in a, 1 in b"})) == NOT_ALL_STEPS
    assert lines(run)[-1] == "  next: leave these sites out of outputs=, or take a reference that has them"
    empty = Comparison(ENGINE, REFERENCE, ())
    assert headline(empty) == "nothing was compared: the engine has no outputs in common with its reference"


def test_success_says_its_margin_too():
    run = compared({(1, DOWN): 2e-3})
    assert summary_line(run) == (
        "onnxruntime float16 against eager float32, 2 steps, 6 sites: engine agrees: worst is "
        f"{DOWN}, step 1: rel_l2 2.0e-03 <= 4.0e-03 (4 x noise floor 1.0e-03)"
    )


def test_the_table_is_worst_first_and_says_what_it_leaves_out():
    text = table(compared(INHERITED), rows=4).splitlines()
    assert text[0] == summary_line(compared(INHERITED))
    assert text[1].startswith("rel_l2 by depth at step 0, 2e-03 to 4e-01:")
    assert text[2].split("  ")[0] == "margin"
    assert [re.split(r"  +", line)[:4] for line in text[3:7]] == [
        ["100 !", "1 of 2", "0", DOWN],
        ["12.5 recovered", "0 of 2", "1", ROPE],
        ["10 !", "1 of 2", "0", BLOCK],
        ["5 !", "1 of 2", "0", HEAD],
    ]
    assert text[7] == "and 2 more sites with smaller margins"
    assert len({line.index("rel_l2") for line in text[3:7]}) == 1, "columns are aligned"


def test_the_sparkline_is_logarithmic():
    assert sparkline([1e-7, 1e-3, 1e0]) == BARS[0] + BARS[4] + BARS[7]
    assert sparkline([0.0, 1.0, math.inf, math.nan]) == " " + BARS[7] + "!!"
    assert sparkline([]) == ""


def test_a_site_has_one_row_whose_worst_step_fails_where_any_does():
    run = compared({(0, ROPE): 4e-2, (1, ROPE): 8e-3, (1, SITES[2]): 8e-3, (1, BLOCK): 8e-3}, steps=3)
    row = next(row for row in site_rows(run) if row.worst.site == ROPE)
    assert [r.healed for r in run.results if r.site == ROPE] == [True, False, False]
    assert (row.worst.step, row.failed, row.steps) == (1, 1, 3)
    assert len(table(run, rows=6).splitlines()) == 3 + 6 + 1  # the risk


@pytest.mark.parametrize("count", [60, 61, 1000])
def test_the_sparkline_keeps_every_peak_in_its_width(count):
    values = [1e-6] * count
    values[count // 2] = 1.0
    drawn = sparkline(values)
    assert len(drawn) == 60
    assert drawn.count(BARS[7]) == 1


def test_the_token_message_shows_the_earliest_flip_and_both_texts():
    rows = (
        TokenResult("a", (1, 2, 3), (1, 2, 4), "one two three", "one two four"),
        TokenResult("b", (1, 7, 3), (1, 8, 9), near_ties=(2,)),
    )
    assert token_message(compared({}, tokens=rows)).splitlines() == [
        "engine generates another token at step 1, row 1: 7, expected 8 (no near tie)",
        "  2 flips in 2 of 2 rows, 1 near ties",
        "  engine   : 1 7 3",
        "  reference: 1 8 9",
        "  every site is in bounds",
    ]
