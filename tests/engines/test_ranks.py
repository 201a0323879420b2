"""A model on two ranks, by gloo on the CPU or NCCL on two GPUs: shares are joined, a fault of one rank is named."""

import pytest
import torch

from ditto_core.backends.ranks.joining import split_axis
from ditto_core.backends.registry import get_backend
from ditto_core.errors import BackendError, RunError, UsageError
from ditto_core.localize import EVERYTHING
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import ranks
from tests.models import llama

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="each rank needs a GPU of its own, here is one")
PADDED = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23]]


def compare(workspace, steps=2, localize=False, **options):
    spec = EngineSpec.of(llama, backend="torch-tp", outputs=EVERYTHING, options=options)
    pair = Pair(workspace, spec, PairOptions(observer=False))
    try:
        comparison = pair.generate(PADDED, max_new_tokens=steps, localize=localize)
        return pair.sessions.engine.axes, comparison
    finally:
        pair.close()


def test_a_model_on_two_ranks_agrees_at_every_site_and_its_shares_are_joined(workspace):
    axes, comparison = compare(workspace)
    assert comparison, comparison
    assert comparison.missing == {}
    attention = [f"model.layers.0.self_attn{port}" for port in (":q_rope", ":k_rope", ":probs", ":context", ".q_proj")]
    assert [axes.get(site) for site in attention] == [1, 1, 1, 2, 2]  # heads, and features
    assert not {"model.layers.0.self_attn.o_proj", "model.layers.0.mlp", "model.norm", "lm_head"} & set(axes)


@pytest.mark.parametrize(
    ("options", "site", "kind", "words"),
    [
        ({"plan": ranks.NOT_REDUCED}, "model.layers.0.self_attn.o_proj", "all-reduce missing", "rank 0 of 2"),
        ({"load": "tests.faults.ranks:wrong_shard"}, f"{ranks.MLP}.up_proj", "weight rows changed", "rank 1 of 2"),
        ({"load": "tests.faults.ranks:exchanged"}, f"{ranks.MLP}.down_proj", "ranks exchanged", "ranks 0 and 1 of 2"),
    ],
    ids=["all-reduce", "shard", "exchanged"],
)
def test_a_fault_of_the_ranks_is_blamed_and_named(workspace, options, site, kind, words):
    _, comparison = compare(workspace, localize=True, **options)
    assert not comparison
    assert comparison.localization.first.site == site
    cause = comparison.localization.cause
    assert (cause.kind, cause.site) == (kind, site)
    assert words in cause.evidence[0]


def test_ranks_that_should_hold_the_same_and_do_not_are_named_with_the_first_site(workspace):
    _, comparison = compare(workspace, load="tests.faults.ranks:other_norm")
    assert not comparison
    ((site, reason),) = comparison.missing.items()
    assert site == "model.layers.1.post_attention_layernorm"
    assert reason.startswith("rank 1 disagrees at model.layers.1.post_attention_layernorm: max abs difference ")


def test_vocabulary_split_over_the_ranks_is_joined(workspace):
    axes, comparison = compare(workspace, steps=1, plan={"lm_head": "colwise"})
    assert comparison, comparison
    assert axes["logits"] == 2


def test_a_rank_that_fails_ends_the_others_and_says_why(workspace):
    with pytest.raises(RunError, match=r"rank 1 .* the weights of rank 1 are gone"):
        compare(workspace, load="tests.faults.ranks:fails")


def test_a_rank_that_dies_while_it_is_stepped_ends_the_others(workspace):
    with pytest.raises(RunError, match=r"rank 1 .*code 3"):
        compare(workspace, load="tests.faults.ranks:dies")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ranks": 1}, "from 2 on"), ({"rank": 2}, "'ranks'"), ({"load": "made"}, "module:function")],
    ids=["one", "unknown", "load"],
)
def test_bad_options_are_one_line(options, words):
    with pytest.raises(UsageError, match=words) as caught:
        get_backend("torch-tp").check(EngineSpec.of(llama, backend="torch-tp", options=options))
    assert len(str(caught.value).splitlines()) == 1


def test_too_few_gpus_are_an_error_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackendError, match="GPU for each of 2 ranks, here are 1"):
        get_backend("torch-tp").check(EngineSpec.of(llama, backend="torch-tp"))


@pytest.mark.parametrize(
    ("whole", "parts", "axis"),
    [((2, 8), [(2, 4), (2, 4)], 1), ((2, 7), [(2, 4), (2, 3)], 1), ((4, 8), [(4, 8)] * 2, None)],
)
def test_the_axis_is_that_along_which_the_shapes_add_up(whole, parts, axis):
    assert split_axis(whole, parts) == axis


@pytest.mark.parametrize("parts", [[(2, 4), (2, 3)], [(4, 8), (2, 4)], [(8,), (8,)]])
def test_shapes_that_do_not_add_up_are_refused(parts):
    with pytest.raises(ValueError, match=r"the model \[2, 8\]"):
        split_axis((2, 8), parts)
