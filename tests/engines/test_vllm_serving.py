"""Ways of serving with the real vLLM, where it is installed (`make vllm`); skipped, and counted, elsewhere."""

import pytest
import torch
from hypothesis import find, given, settings

from ditto_core.strategies import histories
from tests.vllm_pairs import pair_of, saved_llama

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"))


SEVERAL_BLOCKS = torch.randint(3, 60, (260,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_ways_of_serving_agree(workspace, model, dtype):
    pair = pair_of(workspace, model, ["model.layers.*"], dtype=dtype, compiled="off")
    found = pair.served_relations(SEVERAL_BLOCKS)
    assert all(found), "\n".join(map(str, found))
    assert len(found) == 4
    assert found[0].comparison.worst.verdict.metric == "differing elements"  # what is in the cache has no tolerance
    assert all(pair.relations().check(SEVERAL_BLOCKS[:20], "row_in_batch", "same_bits", "warm_cache"))
    pair.close()


def test_one_cached_number_that_is_a_rounding_off_breaks_the_relation(workspace, model, monkeypatch):
    from ditto_core.backends.vllm.session import VllmSession

    start = VllmSession.start

    def spoil(self, batch):
        start(self, batch)
        for cache in self._runner.kv_caches:  # values of all blocks, the null block among them
            cache.copy_(cache.nextafter(torch.tensor(torch.inf)))

    monkeypatch.setattr(VllmSession, "start", spoil)
    pair = pair_of(workspace, model, ["model.layers.*"], compiled="off")
    (relation,) = pair.served_relations(SEVERAL_BLOCKS, "prefix_cache")
    pair.close()
    assert not relation
    (logits,) = relation.comparison.results
    assert logits.metrics.rel_l2 < logits.floor  # which would not find it


def test_log_probabilities_of_a_prompt_that_are_one_token_late_break_the_relation(workspace, model, monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    given = GPUModelRunner._get_prompt_logprobs_dict

    def late(self, hidden, tokens):
        return given(self, hidden.roll(1, 0), tokens)

    monkeypatch.setattr(GPUModelRunner, "_get_prompt_logprobs_dict", late)
    pair = pair_of(workspace, model, [], compiled="off")
    (relation,) = pair.served_relations(SEVERAL_BLOCKS[:40], "prompt_logprobs")
    pair.close()
    assert not relation
    assert relation.first.site == "logprobs"


SMALL = {"batch": (1, 2, 3), "length": (1, 16, 64), "past": (0, 16, 96)}
LONG = [torch.randint(3, 60, (60,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(2)]
SHARED = [*LONG, LONG[0][:40] + LONG[1][:10]]
"""Two prompts that fill the cache together, and one that begins as the first does."""


@pytest.fixture
def server(request, workspace, model):
    options = {"compiled": "off", **getattr(request, "param", {})}
    pair = pair_of(workspace, model, profile=SMALL, **options)
    yield pair
    pair.close()


def without_recomputing(monkeypatch):
    """Break vLLM: a request that lost its blocks goes on as if what they held were in its new ones."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request

    def keep(self, request, *args, **kwargs):
        computed = request.num_computed_tokens
        preempt(self, request, *args, **kwargs)
        request.num_computed_tokens = computed

    monkeypatch.setattr(Scheduler, "_preempt_request", keep)


COMPETING = [("submit", 0), ("submit", 1), ("step", 40)]


def test_a_request_that_is_preempted_gets_what_it_gets_alone(server):
    found = server.check_history(SHARED, [*COMPETING, ("abort", 9)], new_tokens=20)
    assert len(found) == 2  # its blocks were still there: nothing was computed again
    assert all(found), "\n".join(map(str, found))
    requests = server.sessions.requests
    requests.forget()
    for ids in LONG:
        requests.submit(ids, 20)
    while requests.step():
        pass
    assert requests.preempted > 0  # else nothing was shown


UNCACHED = {"engine.enable_prefix_caching": False}


@pytest.mark.parametrize("server", [UNCACHED], indirect=True)
def test_a_request_that_is_computed_again_has_the_bits_of_one_that_begins_there(server):
    *_, resumed = found = server.check_history(SHARED, COMPETING, new_tokens=20)
    assert len(found) == 3
    assert all(found), "\n".join(map(str, found))
    assert "resumed after" in resumed.name
    assert resumed.comparison.worst.verdict.metric == "differing elements"


def test_a_block_that_is_given_away_while_another_request_reads_it_is_found(server, monkeypatch):
    from vllm.v1.core.block_pool import BlockPool

    free = BlockPool.free_blocks

    def uncounted(self, blocks):  # the second reader of a block
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt = 1

    history = [("submit", 0), ("step", 20), ("submit", 2), ("step", 5), ("submit", 1)]
    assert all(server.check_history(SHARED, history, new_tokens=20))
    monkeypatch.setattr(BlockPool, "touch", uncounted)
    monkeypatch.setattr(BlockPool, "free_blocks", lambda self, blocks: free(self, (b for b in blocks if b.ref_cnt > 0)))
    broken = [relation.name for relation in server.check_history(SHARED, history, new_tokens=20) if not relation]
    assert len(broken) == 1
    assert "of prompt 2" in broken[0]


def test_whatever_happens_to_requests_each_gets_what_it_gets_alone(server):
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(histories(len(SHARED)))
    def agrees(events):
        found = server.check_history(SHARED, events, new_tokens=12)
        assert all(found), "\n".join(map(str, found))

    agrees()


def test_a_stale_slot_is_found_and_its_history_shrinks_to_two_requests(server, monkeypatch):
    without_recomputing(monkeypatch)
    shortest = find(
        histories(len(SHARED)),
        lambda events: not all(server.check_history(SHARED, events, new_tokens=12)),
        settings=settings(max_examples=200, deadline=None, derandomize=True),
    )
    assert [kind for kind, _ in shortest] == ["submit", "submit"]
