"""Gates judged by the reference's own error: which engines pass, which fail, and which are left undecided."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ditto_core.errors import UsageError
from ditto_core.gates import GateResult, Policy
from ditto_core.gates.limits import Limits, rule_of_three
from ditto_core.gates.record import Record, Side
from ditto_core.gates.result import Identity
from ditto_core.gates.verdict import accuracy_detail, positive, safe_exp, sample_kl
from ditto_core.system.fingerprint import fingerprint
from ditto_core.system.receipt import Receipt

RECEIPT = Receipt(1000.0, "abc", "e" * 64, "r" * 64, "model", {}, {}, {}, {})
TOKENS = 60


def records(count, kl, floor, *, flips=0.01, seed=0, spread=0.3, clusters=0):
    """Texts on which an engine and the floor have these mean KL, both log-normal over positions."""
    rng = np.random.default_rng(seed)

    def values(mean):
        return tuple((mean * np.exp(rng.normal(-(spread**2) / 2, spread, TOKENS))).tolist())

    def top():
        return tuple((rng.random(TOKENS) < flips).astype(int).tolist())

    def side(mean):
        return Side(100.0 + float(rng.normal(0, math.sqrt(2 * mean * TOKENS))), top())

    return [
        Record(
            f"t{i}",
            side(kl),
            Side(100.0, (0,) * TOKENS),
            TOKENS,
            values(kl),
            side(floor),
            values(floor),
            f"c{i % clusters}" if clusters else "",
        )
        for i in range(count)
    ]


def result(found, dtype="bfloat16", **policy):
    identity = Identity("s", "d", "m", "e" * 64, f"engine {dtype}", "r" * 64, "eager float32", dtype, 4, dtype)
    return GateResult(identity, Policy(resamples=500, **policy), tuple(r.id for r in found), tuple(found), (RECEIPT,))


def verdict(found, metric):
    (one,) = [v for v in found.verdicts if v.metric == metric]
    return one


def broken(record):
    """A text on which the engine writes nonsense: 8 nats off at every position, and no token right."""
    return replace(record, engine=Side(100.0 + 8 * TOKENS, (9,) * TOKENS), kl=(8.0,) * TOKENS)


def test_a_healthy_bfloat16_engine_beyond_the_int8_budget_passes_by_the_references_own_error():
    found = result(records(57, 0.0024, 0.00246))
    found.assert_passed()
    one = verdict(found, "kl_mean")
    assert one.estimate > 0.0014
    assert one.limit == pytest.approx(1.5 * 0.00246, rel=0.05)


@pytest.mark.parametrize(("ratio", "passes"), [(1.0, True), (1.12, True), (1.25, False), (1.4, False)])
def test_the_usual_sample_is_held_closer_than_the_sum(ratio, passes):
    """Texts differ by a factor of 100 in KL; engine and floor are paired."""
    sizes = np.geomspace(0.0003, 0.03, 57)
    found = [records(1, ratio * kl, kl, seed=i)[0] for i, kl in enumerate(sizes)]
    found = result([replace(r, id=f"t{i}") for i, r in enumerate(found)])
    one = verdict(found, "kl_by_sample")
    assert one.estimate == pytest.approx(ratio, rel=0.02)
    assert (one.ok, one.limit) == (passes, 1.15)
    assert verdict(found, "kl_mean").ok
    assert one.high / one.low < verdict(found, "kl_mean").high / verdict(found, "kl_mean").low


def test_short_samples_do_not_bias_the_usual_one():
    """Of samples of two tokens the ratio of KL is wild, and its mean far above 1; as often below as above."""
    rng = np.random.default_rng(0)
    found = [
        replace(r, kl=(a, b), floor_kl=(c, d))
        for r, a, b, c, d in zip(
            [replace(r, id=f"t{i}", tokens=2) for i, r in enumerate(records(400, 1, 1))],
            *np.exp(rng.normal(-6, 2, (4, 400))).tolist(),
            strict=True,
        )
    ]
    found = [
        replace(r, **{side: replace(getattr(r, side), top=(0, 0)) for side in ("engine", "reference", "floor")})
        for r in found
    ]
    one = verdict(result(found), "kl_by_sample")
    assert one.ok
    assert one.low < 1 < one.high
    assert np.mean([sum(r.kl) / sum(r.floor_kl) for r in found]) > 2


def test_a_sample_of_nan_fails_by_sample_too():
    found = records(57, 0.0017, 0.0017)
    found[3] = replace(found[3], kl=(math.nan,) * TOKENS)
    assert not verdict(result(found), "kl_by_sample").ok


def test_a_float16_engine_with_eight_times_the_references_own_kl_fails():
    found = result(records(57, 2.4e-4, 3.0e-5), "float16")
    assert not found
    assert verdict(found, "kl_mean").low > 1.5 * 3.0e-5


@pytest.mark.parametrize(("kl", "passes"), [(0.0030, True), (0.0060, False)])
def test_a_reference_in_the_engines_own_dtype_has_an_error_of_its_own_beside_the_engines(kl, passes):
    found = result(records(57, kl, 0.0015))
    assert bool(replace(found, identity=replace(found.identity, floor="float32"))) is passes
    assert not found


def test_a_limit_that_is_named_goes_over_the_floor():
    assert result(records(57, 2.4e-4, 3.0e-5), "float16", limits={"kl_mean": 0.001})
    assert not result(records(57, 0.0024, 0.0017), limits={"kl_mean": 0.0014})


def test_quantized_engines_are_judged_by_budgets_whatever_was_measured():
    assert verdict(result(records(57, 0.001, 0.0017), "int8"), "kl_mean").limit == 0.0014


@pytest.mark.parametrize("count", [1, 2])
def test_wholly_broken_texts_of_171_fail_by_themselves(count):
    healthy = records(171, 0.0017, 0.0017)
    assert result(healthy)
    found = result([*map(broken, healthy[:count]), *healthy[count:]])
    assert [v.metric for v in found.failures] == ["worst_sample"]
    assert "sample 't0'" in found.failures[0].detail


def test_a_broken_text_is_found_without_the_references_logits():
    healthy = [replace(r, kl=()) for r in records(171, 0.0017, 0.0017)]
    assert result(healthy)
    lost = replace(healthy[0], engine=replace(healthy[0].engine, nll=100.0 + 8 * TOKENS))
    assert [v.metric for v in result([lost, *healthy[1:]]).failures] == ["worst_sample"]


@pytest.mark.parametrize("count", [1, 4])
def test_a_suite_too_small_to_fail_says_undecided_and_does_not_pass(count):
    found = result(records(count, 0.0017, 0.0017))
    assert not found
    assert "UNDECIDED" in found.summary
    with pytest.raises(AssertionError, match="UNDECIDED"):
        found.assert_passed()


def test_samples_of_few_clusters_are_few_samples():
    assert result(records(60, 0.0017, 0.0017))
    assert "UNDECIDED" in result(records(60, 0.0017, 0.0017, clusters=4)).summary


def test_four_answers_are_undecided_and_five_are_not():
    answers = [Record(f"q{i}", Side(correct=True), Side(correct=True)) for i in range(5)]
    assert result(answers)
    assert "UNDECIDED, accuracy_drop" in result(answers[:4]).summary


def test_an_interval_that_reaches_beyond_twice_the_limit_is_undecided():
    healthy = records(6, 0.0017, 0.0017)
    wild = [
        replace(r, kl=tuple(x * scale for x in r.kl)) for r, scale in zip(healthy, (1, 1, 1, 1, 1, 40), strict=True)
    ]
    one = verdict(result(wild), "kl_mean")
    assert one.low <= one.limit
    assert one.high > 2 * one.limit
    assert (one.ok, one.decided) == (True, False)


def test_a_limit_of_no_loss_at_all_can_be_passed():
    found = [Record(f"t{i}", Side(100 + 0.1 * (-1) ** i), Side(100.0), TOKENS) for i in range(40)]
    one = verdict(result(found, limits={"perplexity_ratio": 1.0}), "perplexity_ratio")
    assert one.high > 1
    assert (one.ok, one.decided) == (True, True)


def test_no_interval_of_a_quantity_that_cannot_be_negative_is():
    found = records(20, 0.0017, 0.0017, flips=0.002)
    found[0] = replace(found[0], kl=(0.5,) * TOKENS)
    lows = {v.metric: v.low for v in result(found, limits={"kl_mean": 1.0, "top1_disagreement": 0.2}).verdicts}
    assert lows["kl_mean"] >= 0
    assert lows["top1_disagreement"] >= 0


def test_an_accuracy_limit_is_held_by_the_lower_end_not_by_the_estimate():
    pairs = [(False, True)] * 6 + [(True, True)] * 194
    answers = [Record(f"q{i}", Side(correct=a), Side(correct=b)) for i, (a, b) in enumerate(pairs)]
    one = verdict(result(answers, limits={"accuracy_drop": 0.025}), "accuracy_drop")
    assert one.low < 0.025 < one.estimate
    assert one.ok


def test_a_sample_whose_results_were_dropped_is_missing():
    whole = records(20, 0.0017, 0.0017)
    for part in ({"kl": ()}, {"floor": None}, {"kl": whole[3].kl[:-1]}):
        found = result([*whole[:3], replace(whole[3], **part), *whole[4:]])
        assert not found
        assert found.missing == ("t3",)


@pytest.mark.parametrize("id", ["t0", "other"])
def test_a_record_of_no_sample_or_a_second_one_is_refused(id):
    whole = result(records(6, 0.0017, 0.0017))
    data = whole.to_json()
    data["records"].append({**data["records"][0], "id": id})
    data["digest"] = fingerprint({name: value for name, value in data.items() if name != "digest"})
    with pytest.raises(UsageError, match=f"has a record of '{id}'"):
        GateResult.from_json(data)


def test_a_key_signs_results_and_refuses_those_it_did_not_sign(tmp_path, monkeypatch):
    path, found = tmp_path / "gate.json", result(records(6, 0.0017, 0.0017))
    found.save(path)
    monkeypatch.setenv("DITTO_GATE_KEY", "secret")
    with pytest.raises(UsageError, match="is not signed"):
        GateResult.load(path)
    found.save(path)
    assert GateResult.load(path) == found
    data = json.loads(path.read_text())
    monkeypatch.setenv("DITTO_GATE_KEY", "other")
    with pytest.raises(UsageError, match="another key"):
        GateResult.from_json(data)
    monkeypatch.delenv("DITTO_GATE_KEY")
    assert GateResult.from_json(data) == found


def test_a_result_of_an_older_schema_is_refused():
    with pytest.raises(UsageError, match="schema 1, expected 2"):
        GateResult.from_json({**result(records(6, 0.0017, 0.0017)).to_json(), "schema": 1})


def measured(kl, own, *, engine=100.0, floor=100.0, tokens=10, id="t"):
    """A text of so many tokens whose positions have these KL and these of the floor; the reference has 100 nats."""
    top = (0,) * len(own)
    return Record(id, Side(engine, top), Side(100.0, top), tokens, kl, Side(floor, top), own)


def test_every_position_is_allowed_1e_8_nats_beside_the_floor():
    found = Limits([measured((0.0,) * 4, (1e-6,) * 4), measured((2e-6,) * 2, (0.0,) * 2)], Policy(), "float32")
    assert found.own_kl == pytest.approx([4.04e-6, 2e-8])
    assert found.kl_ratios() == pytest.approx([0.01 / 1.01, 201])


def test_a_sample_is_allowed_its_own_floor_at_least_that_of_all():
    """1.5 times the floor: 0.03 at two positions, 0.01 at six, so 0.015 over all eight."""
    found = Limits([measured((0.0,) * 2, (0.03,) * 2), measured((0.0,) * 6, (0.01,) * 6)], Policy(), "bfloat16")
    assert found.sample_kl() == pytest.approx([0.045, 0.0225], rel=1e-4)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.2), ("float16", 0.2 * math.sqrt(2)), ("int4", 0.043)])
def test_log_perplexity_may_move_by_twice_what_the_references_own_does(dtype, limit):
    """The floor is off by 0.1 nats a token on each text; of another dtype it is one error of two; int4 has a budget."""
    texts = [measured((0.0,) * 2, (0.01,) * 2, floor=101.0, id=f"t{i}") for i in range(8)]
    assert Limits(texts, Policy(), dtype, "bfloat16").log_perplexity() == pytest.approx(limit)


@pytest.mark.parametrize(
    ("engine", "tokens", "kl", "expected"),
    [(120.0, 10, 0.5, 2.0), (120.0, 10, 3.0, 3.0), (80.0, 10, 0.5, 2.0), (130.0, 10, 0.5, 4.5), (120.0, 0, 0.5, 0.5)],
)
def test_a_shift_of_log_likelihood_implies_half_its_square_of_kl(engine, tokens, kl, expected):
    record = measured((kl,) * 4, (0.01,) * 4, engine=engine, tokens=tokens)
    assert sample_kl(record) == pytest.approx(expected)


def test_the_line_of_an_accuracy_counts_both_sides_answers():
    pairs = [(True, True)] * 7 + [(True, False)] * 2 + [(False, True)]
    detail = accuracy_detail(pairs, 2, 1, 0.05)
    assert detail.startswith("80.00 against 90.00 %; 2 worse, 1 better")


@pytest.mark.parametrize(("low", "expected"), [(-0.1, 0.0), (0.0, 0.0), (0.1, 0.1)])
def test_a_lower_end_below_zero_is_zero(low, expected):
    assert positive(low) == expected
    assert math.isnan(positive(math.nan))


def test_nothing_in_three_trials_leaves_a_rate_of_two_thirds():
    """0.05 = (1 - 0.6316) ** 3."""
    assert rule_of_three(3, 0.05) == pytest.approx(0.6316, abs=1e-4)
    assert rule_of_three(0, 0.05) == 1


def test_an_exponential_that_overflows_is_infinite():
    assert safe_exp(701) == safe_exp(1000) == math.inf
    assert safe_exp(1) == pytest.approx(math.e)
