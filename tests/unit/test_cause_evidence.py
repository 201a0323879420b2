"""What a rule is told of a blamed site, and what becomes of what rules say."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ditto_core.causes.evidence import Evidence, attempt, first_cause, left, name_of, rel_l2, slope

T = torch.tensor([[3.0, 4.0], [6.0, 8.0]], dtype=torch.float64)


def evidence(site="block.attn:q", actual=T, expected=2 * T, *, valid=None, root=None, captured=(), inputs=()):
    shown = (site, 0, actual, valid, dict(inputs), dict(captured), 1e-2, 1e-3)
    return Evidence(*shown, expected, root or nn.Module(), "block", "float32", False, {})


def named(found):
    return found.cause("other weights", 0.9, ["seen"], "look")


def silent(found):
    return None


def failing(found):
    raise ValueError("no such head\nsecond line")


def test_a_site_has_a_port_and_a_module_and_tensors_by_any_name():
    root = nn.ModuleDict({"block": nn.Linear(2, 2)})
    found = evidence(root=root, captured={"block.attn:k": T.float()})
    assert (found.port, found.module) == ("q", root["block"])
    assert evidence("block.attn").port == ""
    assert found.tensor("block.attn:k").dtype == torch.float64
    assert torch.equal(found.tensor("block.attn:k"), T)
    assert found.tensor("block.attn:v") is None


@pytest.mark.parametrize(
    ("shapes", "past"),
    [({"attention_mask": (2, 7), "input_ids": (2, 3)}, 4), ({"attention_mask": (2, 7)}, 0), ({"input_ids": (2, 3)}, 0)],
)
def test_the_past_is_what_the_mask_counts_beyond_the_new_tokens(shapes, past):
    assert evidence(inputs={name: torch.ones(shape) for name, shape in shapes.items()}).past_length == past


def test_padding_does_not_count():
    found = evidence(valid=torch.tensor([[True], [False]]))
    assert found.chosen(T).tolist() == [3.0, 4.0]
    assert found.rows(T).tolist() == [[3.0, 4.0]]
    assert evidence().chosen(T).tolist() == [3.0, 4.0, 6.0, 8.0]
    assert evidence().rows(T).tolist() == [[3.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize(
    ("now", "bound", "floor", "most"),
    [
        (0.4, 0.05, 0.0, 0.04),  # a tenth of the error
        (0.4, 0.03, 0.0, 0.03),  # the local bound
        (0.4, 0.5, 0.06, 0.06),  # the noise floor
        (0.4, 0.5, 0.3, 0.1),  # which is a quarter of the error at most
    ],
)
def test_an_explanation_leaves_little(now, bound, floor, most):
    assert left(now, bound, floor) == pytest.approx(most)


def test_zeros_are_infinitely_far_from_all_but_zeros():
    assert rel_l2(T, 0 * T) == math.inf
    assert rel_l2(0 * T, 0 * T) == 0
    assert rel_l2(torch.tensor([5.0, 0.0]), torch.tensor([3.0, 4.0])) == pytest.approx(20**0.5 / 5)
    assert rel_l2(T, T * math.nan) == math.inf


def test_a_slope_is_the_factor_of_least_squares():
    """(1, 2) on (3, 4): (3 + 8) / (9 + 16)."""
    assert slope(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])) == pytest.approx(11 / 25)
    assert slope(T, 0 * T) == 0


def test_a_cause_names_the_site_and_keeps_what_it_is_told():
    cause = named(evidence())
    assert (cause.kind, cause.site, cause.confidence) == ("other weights", "block.attn:q", 0.9)
    assert (cause.evidence, cause.next_step) == (("seen",), "look")


def test_the_first_rule_that_names_a_cause_decides_and_signs_it():
    second = lambda found: replace(named(found), kind="scale")  # noqa: E731
    found = evidence()
    assert first_cause(found, [silent, named, second]).kind == "other weights"
    assert first_cause(found, [silent, named]).rule == "test_cause_evidence.named"
    assert first_cause(found, [silent]) is None
    assert found.failures == []


def test_a_rule_that_fails_names_nothing_and_is_written_down_in_one_line():
    found = evidence()
    assert attempt(found, failing) is None
    assert found.failures == ["rule test_cause_evidence.failing failed at block.attn:q: ValueError: no such head"]
    assert first_cause(found, [failing, named]).kind == "other weights"


def test_a_rule_is_called_by_its_family_and_name():
    assert name_of(attempt) == "evidence.attempt"
