"""Fields of a configuration as causes: which values are tried, and which models are no explanation."""

import pytest
import torch

from ditto_core.compare.blame import LocalResult
from ditto_core.compare.metrics import measure
from ditto_core.localize.settings import (
    choices,
    difference,
    limit,
    moved,
    part_of,
    rebuilt,
    right_elsewhere,
    uniform,
)
from ditto_core.model.loading import tiny_decoder


@pytest.fixture(scope="module")
def llama():
    return tiny_decoder("llama")


def test_a_field_that_adds_weights_explains_nothing(llama):
    """A bias of zeros would give the very same numbers."""
    assert rebuilt(llama, llama, "attention_bias", True) is None


def test_a_rebuilt_model_shares_the_weights_and_has_another_field(llama):
    before = torch.get_rng_state()
    other = rebuilt(llama, llama, "rms_norm_eps", 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert (llama.config.rms_norm_eps, other.config.rms_norm_eps) == (pytest.approx(1e-6), 0.5)
    assert (llama.model.norm.variance_epsilon, other.model.norm.variance_epsilon) == (pytest.approx(1e-6), 0.5)
    pairs = zip(llama.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert torch.equal(llama.model.rotary_emb.inv_freq, other.model.rotary_emb.inv_freq)


def test_a_rebuilt_model_stands_where_its_own_stood(llama):
    around = torch.nn.ModuleDict({"inner": llama, "head": torch.nn.Linear(2, 2)})
    other = rebuilt(around, llama, "rms_norm_eps", 0.5)
    assert other["inner"].config.rms_norm_eps == 0.5
    assert torch.equal(other["head"].weight, around["head"].weight)
    assert llama.config.rms_norm_eps == pytest.approx(1e-6)


def test_a_model_that_ties_its_head_takes_the_embedding_for_it(llama):
    """A head that was loaded from the embedding's table is what the field does, not the reverse."""
    other = rebuilt(llama, llama, "tie_word_embeddings", True)
    assert torch.equal(other.lm_head.weight, llama.model.embed_tokens.weight)
    assert not torch.equal(other.lm_head.weight, llama.lm_head.weight)


@pytest.mark.parametrize(
    ("value", "other", "part"),
    [
        (1e-6, 1e-5, ("field",)),
        ({"a": 1.0, "b": 2}, {"a": 3.0, "b": 2}, ("field", "a")),
        ({"a": 1.0, "b": 2}, {"a": 3.0}, ("field", "a", "b")),
        ({"a": 1.0}, None, ("field",)),
    ],
)
def test_what_another_value_changes_is_the_field_or_an_entry_of_its_table(value, other, part):
    assert part_of("field", value, other) == part


def test_a_site_that_is_what_it_was_has_not_moved():
    tensor = torch.tensor([1.0, 2.0, -torch.inf], dtype=torch.float64)
    assert not moved(tensor, tensor.clone())
    assert not moved(tensor[:2] * (1 + 1e-15), tensor[:2])
    assert moved(tensor[:2] * (1 + 1e-9), tensor[:2])
    assert moved(tensor, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


def test_values_are_neighbours_and_none_but_a_rotary_base_is_large(llama):
    tried = list(choices(llama.config))
    names = {name for name, _, _ in tried}
    assert {"rms_norm_eps", "hidden_act", "rope_parameters"} <= names
    assert not names & {"vocab_size", "hidden_size", "num_hidden_layers", "attention_dropout"}
    numbers = [other for name, _, other in tried if isinstance(other, float)]
    assert max(numbers) < 100
    (same,) = {type(v) for name, v, _ in tried if name == "rope_parameters"}
    assert same is dict


@pytest.mark.parametrize(("now", "most"), [(7e-7, 0.25 * 7e-7), (1e-5, 6e-7), (0.5, 6e-7)])
def test_a_wrong_site_has_to_become_right(now, most):
    """An error just above the bound is not explained by one just below it."""
    ones = torch.ones(4, dtype=torch.float64)
    wrong = LocalResult(0, "site", 0, measure(ones * (1 + now), ones), 1e-7, 6e-7)
    assert limit(wrong, 6.0) <= most * (1 + 1e-6)


def test_a_healthy_site_may_differ_a_little_more_than_its_bound():
    ones = torch.ones(4, dtype=torch.float64)
    healthy = LocalResult(0, "site", 0, measure(ones * (1 + 1e-7), ones), 1e-7, 6e-7)
    assert limit(healthy, 6.0) == pytest.approx(9e-7)


def test_a_field_is_said_with_both_values():
    assert difference("eps", 1e-6, 1e-5) == "config.eps is 1e-05 in place of 1e-06"
    assert difference("rope", {"a": 1.0, "b": 2}, {"a": 3.0, "b": 2}) == "config.rope['a'] is 3.0 in place of 1.0"


def result(step, site, error):
    ones = torch.ones(4, dtype=torch.float64)
    return (step, site), LocalResult(step, site, 0, measure(ones * (1 + error), ones), 1e-7, 6e-7)


@pytest.mark.parametrize(
    ("others", "right"),
    [
        ([result(0, "layers.0.mlp", 0.0)], True),
        ([result(0, "layers.0.mlp", 0.5)], False),
        ([result(1, "layers.0.mlp", 0.0)], False),  # at another step
        ([result(0, "layers.0.attn", 0.0)], False),
        ([], False),
    ],
)
def test_a_field_of_all_layers_is_not_the_cause_where_another_layer_is_right(others, right):
    assert right_elsewhere(dict([result(0, "layers.1.mlp", 0.5), *others])) is right


def test_layers_are_alike_unless_a_list_tells_them_apart(llama):
    assert uniform(llama.config)
    assert not uniform(tiny_decoder("gemma3").config)
