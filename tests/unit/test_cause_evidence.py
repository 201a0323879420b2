"""What a rule is told of a blamed site, and what becomes of what rules say."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ditto_core.causes.base import Evidence, attempt, first_cause, name_of, parameter, signed
from ditto_core.compare.blame import Blame
from ditto_core.compare.metrics import measure
from ditto_core.sites import Tap

T = torch.tensor([[3.0, 4.0], [6.0, 8.0]], dtype=torch.float64)


def evidence(
    site="block.attn:q", actual=T, expected=2 * T, *, bound=1e-2, valid=None, root=None, captured=(), inputs=()
):
    blame = Blame(site, "block", "", "", 0, (0,), 1.0, bound / 4, bound)
    numbers = measure(actual, expected)
    root = root or nn.Module()
    return Evidence(
        blame, Tap(site, site), actual, expected, valid, root, "float32", dict(inputs), dict(captured), {}, numbers
    )


def named(found):
    return found.cause("other weights", 0.9, ["seen"], "look")


def silent(found):
    return None


def failing(found):
    raise ValueError("no such head\nsecond line")


def test_a_site_has_a_port_a_module_and_siblings():
    root = nn.ModuleDict({"block": nn.Linear(2, 2)})
    found = evidence(root=root, captured={"block.attn:k": T.float(), "block.attn": T})
    assert (found.site, found.port, found.module) == ("block.attn:q", "q", root["block"])
    assert evidence("block.attn").port == ""
    assert found.sibling("k").dtype == torch.float64
    assert torch.equal(found.sibling("k"), T)
    assert found.sibling("v") is None
    assert torch.equal(found.tensor("block.attn"), T)


def test_the_configuration_is_the_decoders_own():
    text, plain = SimpleNamespace(hidden_size=8), SimpleNamespace(hidden_size=4)
    root = nn.Module()
    root.config = SimpleNamespace(get_text_config=lambda *, decoder: text if decoder else None)
    assert evidence(root=root).config is text
    root.config = plain
    assert evidence(root=root).config is plain
    assert evidence().config is None


@pytest.mark.parametrize(
    ("shapes", "past"),
    [({"attention_mask": (2, 7), "input_ids": (2, 3)}, 4), ({"attention_mask": (2, 7)}, 0), ({"input_ids": (2, 3)}, 0)],
)
def test_the_past_is_what_the_mask_counts_beyond_the_new_tokens(shapes, past):
    assert evidence(inputs={name: torch.ones(shape) for name, shape in shapes.items()}).past_length == past


def test_padding_is_left_out_of_distances():
    """Of [3, 4] and [6, 8] the second row is padding: 5 off of 10, not 11.2 of 22.4."""
    other = 2 * T
    other[1] = 100.0
    found = evidence(valid=torch.tensor([[True], [False]]))
    assert found.chosen(T).tolist() == [3.0, 4.0]
    assert found.distance(other) == pytest.approx(0.5)
    assert evidence().chosen(T).tolist() == [3.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize(("distance", "same"), [(0.0009, True), (0.0011, False)])
def test_a_formula_is_the_models_own_within_a_tenth_of_the_local_bound(distance, same):
    """The bound is 0.01."""
    found = evidence()
    assert found.reproduces(found.expected * (1 + distance)) is same
    assert not found.reproduces(None)
    assert not found.reproduces(found.expected[:1])


def test_a_cause_names_the_site_and_keeps_what_it_is_told():
    cause = named(evidence())
    assert (cause.kind, cause.site, cause.confidence) == ("other weights", "block.attn:q", 0.9)
    assert (cause.evidence, cause.next_step) == (("seen",), "look")


def test_a_parameter_is_read_in_float64_and_what_is_none_is_none():
    layer = nn.Linear(2, 2, bias=False)
    assert parameter(layer, "weight").dtype == torch.float64
    assert parameter(layer, "bias") is None
    assert parameter(layer, "in_features") is None
    assert parameter(layer, "nothing") is None


def test_the_first_rule_that_names_a_cause_decides_and_signs_it():
    second = lambda found: replace(named(found), kind="scale")  # noqa: E731
    found = evidence()
    assert first_cause(found, [silent, named, second]).kind == "other weights"
    assert first_cause(found, [silent, named]).rule == "test_cause_evidence.named"
    assert first_cause(found, [silent]) is None
    assert found.failures == []


def test_a_finer_rules_signature_stays():
    cause = replace(named(evidence()), rule="linear.transposed")
    assert signed(cause, named).rule == "linear.transposed"
    assert signed(named(evidence()), silent).rule == "test_cause_evidence.silent"


def test_a_rule_that_fails_names_nothing_and_is_written_down_in_one_line():
    found = evidence()
    assert attempt(found, failing) is None
    assert found.failures == ["rule test_cause_evidence.failing failed at block.attn:q: ValueError: no such head"]
    assert first_cause(found, [failing, named]).kind == "other weights"


def test_a_rule_is_called_by_its_family_and_name():
    assert name_of(attempt) == "base.attempt"
