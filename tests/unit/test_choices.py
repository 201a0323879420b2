"""A choice of experts that the reference nearly ties excuses what depends on it, and nothing else."""

import math

import pytest
import torch

from ditto_core.compare.judging import judge
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.verdict import DIVERGED, INCONCLUSIVE, WITHIN
from ditto_core.model.experts import expert_axis
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.stepping.choices import Choices, in_order
from ditto_core.stepping.comparer import Comparer
from ditto_core.stepping.measured import Measured

ROUTER = Tap("mlp.gate", "gate", dtype="float32", axes=("", ""), choice=1)
PAIRS = Tap("mlp.experts.act_fn", "act", dtype="float32", axes=("", ""))
BLOCK = Tap("mlp", "mlp", dtype="float32", axes=("batch", "length", ""))
KEYS = Tap("k_proj", "k", dtype="float32", axes=("batch", "", "total", ""))
NOISE = 1e-3
"""Of the scores, whose root mean square is about 1: closer than 0.0057 x that nearly ties."""


def scores(gap, engine=-1.0):
    """Scores [2 x 3 tokens, 3 experts]: at row 0, position 1 the first two experts are ``gap`` apart."""
    truth = torch.tensor([1.0, 0.2, -1.0]).repeat(6, 1)
    truth[1] = torch.tensor([1.0, 1.0 - gap, -1.0])
    side = truth.clone()
    side[1, 1] = 1.0 + engine * gap
    return truth, side


def run(gap, *, wrong=(0, 1), step=0, found=None, noisy=False, taps=(ROUTER, BLOCK), causal=True):
    """Compare one step in which the engine's block is wrong at [row, position …] where it took another expert."""
    truth, side = scores(gap, engine=0.1)
    if noisy:
        side, other = truth, side
    else:
        other = truth * (1 + NOISE * (1 - 2 * torch.rand(truth.shape, generator=torch.Generator().manual_seed(0))))
        other[1] = truth[1]
    ids = torch.ones(2, 3, dtype=torch.int64)
    found = found or Measured()
    comparer = Comparer(
        taps, step, {"input_ids": ids, "attention_mask": ids}, found, Tolerance(), "float16", generated=causal
    )
    block = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    ours = block.clone()
    ours[wrong] = 7.0
    for tap, mine, low, theirs in ((ROUTER, side, other, truth), (BLOCK, ours, block * (1 + 1e-3), block)):
        comparer.take_engine(tap.site, mine)
        comparer.take_noisy(tap.site, ours if noisy and tap is BLOCK else low)
        comparer.take_reference(tap.site, theirs)
    comparer.flush()
    results = judge(found.results, Tolerance(), taps, SessionInfo("e", "e", "float16"))
    return {(r.site, r.step): r.verdict for r in results}, found


def test_a_row_behind_a_near_tie_of_experts_is_left_out_and_said_with_its_margin():
    verdicts, found = run(1e-3)
    assert verdicts["mlp", 0].status == WITHIN
    (note,) = found.notes
    assert note.startswith("experts nearly tie at mlp.gate (step 0, row 0, position 1: 0.")
    assert "not judged" in note


def test_an_expert_that_the_reference_clearly_prefers_excuses_nothing():
    verdicts, found = run(0.1)
    assert verdicts["mlp", 0].status == DIVERGED
    assert not found.notes


@pytest.mark.parametrize("wrong", [(0, 0), (1, 2)], ids=["before it", "another row"])
def test_rows_that_do_not_depend_on_the_near_tie_are_judged(wrong):
    assert run(1e-3, wrong=wrong)[0]["mlp", 0].status == DIVERGED


def test_tokens_after_a_near_tie_depend_on_it_and_earlier_ones_too_where_attention_is_not_causal():
    assert run(1e-3, wrong=(0, 2))[0]["mlp", 0].status == WITHIN
    assert run(1e-3, wrong=(0, 0), causal=False)[0]["mlp", 0].status == WITHIN


def test_later_steps_of_the_row_depend_on_it_and_are_inconclusive_where_nothing_else_is_left():
    _, found = run(1e-3)
    found.results.clear()
    choices = Choices(1, (1, 1), found.tied)
    left = choices.left(BLOCK, torch.zeros(1, 1, 64), None)
    assert left is not None
    assert not left.any()
    verdicts, _ = run(0.1, wrong=(0, 0), step=1, found=found)
    assert verdicts["mlp", 1].status == WITHIN  # row 1 is judged


def test_a_site_of_which_nothing_is_left_is_inconclusive_with_the_near_tie_as_the_reason():
    verdicts, found = run(1e-3, causal=False)
    found.tied[1] = found.tied[0]
    verdicts, _ = run(0.1, step=1, found=found)
    assert verdicts["mlp", 1].status == INCONCLUSIVE
    assert verdicts["mlp", 1].rule.startswith("experts nearly tie at mlp.gate (step 0, row 0, position 1")


def test_a_site_of_which_nothing_is_left_leaves_no_floor():
    """It would be 0, for an engine that does not tie there, too."""
    _, found = run(1e-3, causal=False)
    found.tied[1] = found.tied[0]
    run(0.1, step=1, found=found, noisy=True)
    assert 1 not in found.floor.get("mlp", {})


def test_where_the_reference_in_the_engines_dtype_chooses_otherwise_its_floor_is_left_out():
    verdicts, found = run(1e-3, noisy=True)
    assert verdicts["mlp", 0].status == WITHIN
    assert found.floor["mlp"][0].rel_l2 < 0.01


def test_scores_that_are_not_finite_excuse_nothing():
    truth, side = scores(1e-3)
    side[1] = math.nan
    choices = Choices(0, (2, 3), {})
    choices.take(ROUTER, side, truth, (), NOISE)
    assert choices.left(BLOCK, torch.zeros(2, 3, 64), None) is None


def test_the_same_experts_in_another_order_are_left_out_by_slot_alone():
    two = Tap("mlp.gate", "gate", axes=("", ""), choice=2)
    truth, side = scores(1e-3, engine=0.1)
    choices = Choices(0, (2, 3), {})
    choices.take(two, side, truth, (), NOISE)
    assert choices.left(BLOCK, torch.zeros(2, 3, 64), None) is None
    slots = choices.left(PAIRS, torch.zeros(12, 8), None)
    assert slots.flatten().tolist() == [True] * 2 + [False] * 2 + [True] * 8
    assert choices.reason().startswith("experts nearly tie")


def test_the_same_experts_in_another_order_leave_tensors_of_tokens_judged():
    two = Tap("mlp.gate", "gate", axes=("", ""), choice=2)
    truth, side = scores(1e-3, engine=0.1)
    choices = Choices(0, (2, 3), {})
    choices.take(two, side, truth, (), NOISE)
    valid = torch.ones(6, 1, dtype=torch.bool)
    assert choices.left(PAIRS, torch.zeros(6, 8), valid) is valid
    assert choices.left(two, torch.zeros(6, 2), valid).flatten().tolist() == [True, False, True, True, True, True]


@pytest.mark.parametrize("shape", [(7, 8), (0, 8), ()], ids=["other rows", "no rows", "a number"])
def test_tensors_whose_rows_are_not_the_tokens_are_judged_whole(shape):
    truth, side = scores(1e-3, engine=0.1)
    choices = Choices(0, (2, 3), {})
    choices.take(ROUTER, side, truth, (), NOISE)
    assert choices.left(PAIRS, torch.zeros(shape), None) is None
    assert choices.left(PAIRS, torch.zeros(6, 8), None).flatten().tolist() == [True, False, False, True, True, True]


def test_keys_of_a_row_with_a_near_tie_are_left_out_and_other_rows_stay():
    truth, side = scores(1e-3, engine=0.1)
    choices = Choices(0, (2, 3), {})
    choices.take(ROUTER, side, truth, (), NOISE)
    assert choices.left(KEYS, torch.zeros(2, 4, 3, 8), None).flatten().tolist() == [False, True]


def test_which_of_a_tokens_experts_comes_first_is_no_error_and_another_tokens_rows_are():
    wanted = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))  # two experts of three tokens
    swapped = wanted[[1, 0, 2, 3, 5, 4]] * (1 + 1e-3)
    assert torch.equal(in_order(swapped, wanted, ("2*tokens", "")), wanted * (1 + 1e-3))
    others = wanted[[2, 3, 0, 1, 4, 5]]
    assert not torch.allclose(in_order(others, wanted, ("2*tokens", "")), wanted, rtol=0.1)
    twice = wanted[[0, 0, 2, 3, 4, 5]]  # one expert in the place of both
    assert torch.equal(in_order(twice, wanted, ("2*tokens", "")), twice)


def test_only_rows_of_a_modules_own_experts_have_the_name_of_their_axis():
    block = torch.nn.Module()
    block.top_k, block.experts, block.norm = 2, torch.nn.Module(), torch.nn.Module()
    block.experts.act_fn = torch.nn.SiLU()
    root = torch.nn.Module()
    root.mlp, root.attn = block, torch.nn.Module()
    root.attn.q_norm = torch.nn.Identity()
    assert expert_axis(root, "mlp.experts.act_fn:in", ("2*tokens", "")) == ("2*tokens", "")
    assert expert_axis(root, "mlp.experts.act_fn", ("4*tokens", "")) == ("", "")
    assert expert_axis(root, "attn.q_norm", ("2*tokens", "")) == ("", "")  # two heads
    assert expert_axis(root, "attn.q_norm", ("tokens", "batch")) == ("tokens", "batch")


@pytest.mark.parametrize(
    ("axes", "rows"), [(("tokens", ""), 6), (("batch", "2*tokens"), 6), ((), 6), (("2*tokens", ""), 4)]
)
def test_other_tensors_keep_their_order(axes, rows):
    actual = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
    assert in_order(actual, actual.flip(0)[:rows], axes) is actual
