"""Relations of real ONNX Runtime engines: they hold, and each breaks for the fault that it is meant to catch."""

import json

import pytest
import torch

from ditto_core.compare.tolerance import TABLE, Tolerance
from ditto_core.errors import UsageError
from ditto_core.pair.pair import Pair
from ditto_core.profile import ShapeProfile
from ditto_core.relations import (
    BROKEN,
    ROUNDING,
    SAME_BITS,
    Relations,
    Terms,
    chunked_prefill,
    left_padding,
    prefill_equals_steps,
    right_padding,
    row_in_batch,
    same_bits,
    shapes,
    warm_cache,
)
from ditto_core.relations.checks import sizes
from ditto_core.relations.suite import noise_floor
from ditto_core.spec import EngineSpec
from tests import graph_faults
from tests.models import DECODERS

IDS = [3, 40, 5, 61, 7, 82, 9, 110, 11, 132, 13, 154]
EVERYTHING = ("**", "**:**")
SMALL = ShapeProfile.parse({"batch": (1, 2, 3), "length": (1, 6, 14), "past": (0, 5, 16)})
WINDOWED = ("gemma3", "mistral")


@pytest.fixture(params=DECODERS, scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def pair(family, workspace):
    pair = Pair(workspace, EngineSpec.of(DECODERS[family], outputs=EVERYTHING))
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def llama(workspace):
    pair = Pair(workspace, EngineSpec.of(DECODERS["llama"], outputs=EVERYTHING))
    yield pair
    pair.close()


@pytest.fixture
def broken_llama(llama, tmp_path):
    opened = []

    def make(edit):
        opened.append(graph_faults.faulty_engine(llama.engine, tmp_path / "engine", edit).open())
        return opened[0]

    yield make
    for session in opened:
        session.close()


def test_a_rule_that_asks_for_its_own_metric_judges_a_relation(llama):
    for value, holds in ((0.5, True), (2.0, False)):
        rules = Tolerance.of({"model.layers.1": {"metric": lambda a, b, value=value: value, "bound": 1.0}})
        found = row_in_batch(llama.sessions.engine, IDS[:6], terms=Terms(rules))
        judged = [r.verdict for r in found.comparison.results if r.site == "model.layers.1"]
        assert [(verdict.value, verdict.ok) for verdict in judged] == [(value, holds)]


def test_every_relation_holds_within_four_times_the_noise_floor(pair, family):
    relations = Relations(
        pair.sessions.engine, noise=(pair.sessions.reference, pair.sessions.low_precision), window=family in WINDOWED
    )
    found = {relation.name: relation for relation in relations.assert_hold(IDS)}
    assert len(found) == 7
    assert all(len(relation.comparison) >= 40 for relation in found.values())
    assert not any(relation.comparison.missing or relation.comparison.notes for relation in found.values())
    assert found["same run twice = same bits"].status == SAME_BITS
    assert found["cold = warm cache"].status == SAME_BITS
    judged = found["prefill = single steps"].comparison
    assert all("noise floor" in result.verdict.rule for result in judged)


def test_another_kernel_for_single_tokens_is_rounding_and_no_fault(pair):
    relation = prefill_equals_steps(pair.sessions.engine, IDS)
    assert relation.status == ROUNDING
    assert sum(relation.bits.values()) > 0
    assert 0 < relation.comparison.worst.metrics.rel_l2 < 2e-6
    assert not relation.comparison.logits[0].flips


def test_shapes_of_a_profile_agree_with_each_other_and_with_eager(llama):
    alone = Relations(llama.sessions.engine, Terms(profile=SMALL)).assert_shapes(IDS)
    beside = Relations(llama.sessions.engine, Terms(profile=SMALL), reference=llama.sessions.reference).assert_shapes(
        IDS
    )
    assert len(alone) == len(beside) == len(sizes(SMALL))
    assert {relation.comparison.reference.dtype for relation in beside} == {"float64"}
    assert any("3 x 14 after 16" in relation.name for relation in alone)


def test_shapes_are_each_corner_and_one_odd_size_and_end_at_the_largest_position():
    assert sizes(SMALL) == [
        (1, 1, 0),
        (2, 6, 5),
        (3, 14, 16),
        (1, 6, 5),
        (3, 6, 5),
        (2, 1, 5),
        (2, 14, 5),
        (2, 11, 5),
        (2, 6, 0),
        (2, 6, 16),
        (2, 6, 11),
    ]
    assert all(length + past <= 12 for _, length, past in sizes(SMALL, longest=12))


def test_relations_hold_for_eager_and_for_half_precision(llama, workspace):
    Relations(llama.sessions.reference).assert_hold(IDS)
    half = Pair(workspace, EngineSpec.of(DECODERS["llama"], dtype="float16", outputs=EVERYTHING))
    relations = Relations(
        half.sessions.engine, noise=(half.sessions.reference, half.sessions.low_precision)
    ).assert_hold(IDS)
    assert relations[0].status == ROUNDING
    half.close()


def test_the_noise_floor_is_the_error_of_eager_in_the_engines_dtype(llama):
    floor = noise_floor(llama.sessions.reference, llama.sessions.low_precision, [IDS])
    sink = {}
    inputs = {"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 12, dtype=torch.int64)}
    inputs["position_ids"] = torch.arange(12)[None]
    for name, session in (("truth", llama.sessions.reference), ("noisy", llama.sessions.low_precision)):
        session.start(1)
        session.step(inputs, lambda site, t, name=name: sink.__setitem__((name, site), t.double().clone()))
    site = "model.layers.1.mlp.down_proj"
    truth, noisy = sink["truth", site], sink["noisy", site]
    assert floor[site] == pytest.approx(float((noisy - truth).norm() / truth.norm()), rel=1e-9)


def test_a_stale_row_of_the_cache_breaks_single_steps_where_the_cache_is_read(broken_llama):
    session = broken_llama(graph_faults.stale_kv_row)
    relation = prefill_equals_steps(session, IDS)
    assert relation.status == BROKEN
    assert relation.first.site == "model.layers.0.self_attn:k_rope"
    assert relation.first.step == relation.first.position
    with pytest.raises(AssertionError, match=r"broken at model\.layers\.0\.self_attn:k_rope, row 0, position \d+"):
        relation.assert_holds()
    assert same_bits(session, IDS).status == SAME_BITS


def test_a_mask_anchored_at_the_first_key_breaks_chunks_and_steps_but_no_prefill(broken_llama):
    session = broken_llama(graph_faults.mask_anchored_top_left)
    steps, chunks = prefill_equals_steps(session, IDS), chunked_prefill(session, IDS)
    assert (steps.first.site, steps.first.position) == ("model.layers.0.self_attn:probs", 1)
    assert (chunks.first.site, chunks.first.position, chunks.first.step) == ("model.layers.0.self_attn:probs", 4, 1)
    assert row_in_batch(session, IDS[:1]) and left_padding(session, IDS[:1])


def test_an_ignored_mask_breaks_padding_on_either_side(broken_llama):
    session = broken_llama(graph_faults.mask_ignored)
    assert prefill_equals_steps(session, IDS)
    left, right = left_padding(session, IDS), right_padding(session, IDS)
    assert left.status == right.status == BROKEN
    assert left.first.position == 0
    assert (right.first.position, right.first.step) == (10, 1)
    assert right_padding(session, IDS, decode=False)


def test_positions_that_count_padding_break_learned_positions(workspace, tmp_path):
    pair = Pair(workspace, EngineSpec.of(DECODERS["gpt2"], outputs=EVERYTHING))
    session = graph_faults.faulty_engine(pair.engine, tmp_path / "engine", graph_faults.positions_from_arange).open()
    assert prefill_equals_steps(session, IDS)
    relation = left_padding(session, IDS)
    assert (relation.first.site, relation.first.position) == ("transformer.wpe", 0)
    session.close()
    pair.close()


def test_positions_that_count_padding_heal_under_rotary_embedding(broken_llama):
    relation = left_padding(broken_llama(graph_faults.positions_from_arange), IDS)
    healed = {result.site for result in relation.comparison.healed}
    assert "model.layers.0.self_attn:q_rope" in healed
    assert relation.comparison.filter("model.layers.*")


def test_a_row_that_sees_its_neighbours_breaks_the_batch_relation_only(broken_llama):
    session = broken_llama(graph_faults.rows_mixed("model.layers.0.mlp.down_proj"))
    assert prefill_equals_steps(session, IDS)
    relation = row_in_batch(session, [IDS, IDS[::-1], IDS[:7]])
    assert relation.status == BROKEN
    assert relation.first.site == "model.layers.0"
    assert len(relation.steps) == 3
    assert len(relation.steps[0]) == 7


def test_noise_from_run_to_run_breaks_the_same_bits(broken_llama):
    relation = same_bits(broken_llama(graph_faults.noise("model.layers.1.input_layernorm")), IDS)
    assert relation.status == BROKEN
    assert relation.first.site == "model.layers.1.self_attn.q_proj"
    assert relation.bits["model.layers.0"] == 0
    assert "so the same bits" in str(relation)


def test_state_that_outlives_start_breaks_the_warm_run(llama):
    session = graph_faults.LeakySession(llama.spec, llama.engine.directory, llama.sessions.engine.taps)
    session.start(1)
    relation = warm_cache(session, IDS, other=IDS[::-1])
    assert relation.status == BROKEN
    assert relation.first.site == "model.layers.0.self_attn:k_rope"
    assert warm_cache(llama.sessions.engine, IDS, other=IDS[::-1]).status == SAME_BITS
    session.close()


def test_a_kernel_that_is_wrong_from_a_length_on_breaks_the_shapes_of_that_length_only(broken_llama, llama):
    session = broken_llama(graph_faults.wrong_from_length("model.layers.0.mlp.act_fn", 11))
    broken = [r.name for r in shapes(session, IDS, SMALL, reference=llama.sessions.reference) if not r]
    assert broken == ["shape 3 x 14 after 16", "shape 2 x 14 after 5", "shape 2 x 11 after 5"]
    assert "shape 2 x 11 after 5" in [r.name for r in shapes(session, IDS, SMALL) if not r]


def test_without_a_floor_the_table_bounds_and_says_so(llama):
    relation = prefill_equals_steps(llama.sessions.engine, IDS)
    assert {result.verdict.bound for result in relation.comparison} == {TABLE["float32"]}
    assert "no floor measured" in str(relation)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[5, 6], [7]], r"relations got \[\[5, 6\], \[7\]\], expected the token ids of one prompt"),
        ("hello", "relations got 'hello', expected"),
        ([], r"relations got \[\], expected"),
        (7, "relations got 7, expected"),
        ([5, 999], "token id 999 is outside the vocabulary of 256"),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(llama, ids, message):
    relations = llama.relations()
    with pytest.raises(UsageError, match=message):
        relations.check(ids, "same_bits")
    with pytest.raises(UsageError, match=message):
        relations.check_shapes(ids)


def test_a_run_outside_the_profile_is_refused(llama):
    with pytest.raises(UsageError, match=r"length 12, outside the engine's profile 1\.\.8"):
        prefill_equals_steps(llama.sessions.engine, IDS, terms=Terms(profile=ShapeProfile.parse({"length": (1, 4, 8)})))
    with pytest.raises(UsageError, match="did you mean 'left_padding'"):
        Relations(llama.sessions.engine).check(IDS, "left_paddin")


def test_a_relation_has_a_json_form(llama):
    data = json.loads(json.dumps(prefill_equals_steps(llama.sessions.engine, IDS).to_json(), allow_nan=False))
    assert (data["name"], data["status"], data["first"]) == ("prefill = single steps", ROUNDING, None)
    assert data["steps"] == [list(range(12))]
