"""Keys and values of decoders that compute attention by their own code: sites, compared and blamed like any other."""

import pytest

from ditto_core.localize import EVERYTHING
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, graph
from tests.zoo import factory

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
HEADS = {"falcon": "transformer.h.1.self_attention:k_rope", "mpt": "transformer.blocks.1.attn:k_states"}


def run(workspace, family):
    pair = Pair(workspace, EngineSpec.of(factory(family), outputs=EVERYTHING), PairOptions(observer=False))
    found = pair.generate(PROMPTS, max_new_tokens=2, localize=True)
    pair.close()
    return found


@pytest.mark.parametrize("family", HEADS)
def test_keys_and_values_are_sites_at_every_step(workspace, family):
    found = run(workspace, family)
    assert found, found
    key = HEADS[family]
    assert {result.step for result in found if result.site == key} == {0, 1}
    assert key.rpartition(":")[0] + ":v_states" in found.sites
    assert found.localization.first is None


@pytest.mark.parametrize(
    ("fault", "site"),
    [
        (graph.rolled("present.1.key", axis=-1), "transformer.blocks.1.attn:k_states"),
        (graph.replaced("transformer.blocks.1.attn:out.1", "Identity"), "transformer.blocks.1.attn:out.1"),
    ],
    ids=["a key of the cache", "probabilities that are returned after they were used"],
)
def test_what_is_wrong_in_attention_is_blamed_where_it_is_made(workspace, tmp_path, fault, site):
    found = run(FaultyWorkspace(workspace.cache, fault, tmp_path), "mpt")
    assert not found
    assert found.localization.first.site == site
