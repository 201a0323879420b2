"""Gates judged by the reference's own error: which engines pass, which fail, and which are left undecided."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ditto_core.errors import UsageError
from ditto_core.gates import GateResult, Policy
from ditto_core.gates.record import Record, Side
from ditto_core.gates.result import Identity
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


@pytest.mark.parametrize("own", [math.nan, math.inf])
def test_no_engine_passes_by_a_reference_that_overflows_in_its_dtype(own):
    """A limit of infinity would be none."""
    found = records(57, 5.0, 0.0017)
    found[3] = replace(found[3], floor_kl=(own,) * TOKENS)
    verdicts = {v.metric: v for v in result(found, "float16", limits={"kl_by_sample": math.inf}).verdicts}
    assert (verdicts["kl_mean"].ok, verdicts["kl_mean"].judged) == (False, True)
    assert verdicts["kl_mean"].detail.endswith("from the reference's own float16, which is not finite")
    assert not result(found, "float16")


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


@pytest.mark.parametrize("limit", [0, 0.05])
def test_answers_of_which_the_reference_has_too_few_right_are_undecided(limit):
    """Nothing can be lost where the reference is wrong, whatever the engine is there."""
    pairs = [(True, True)] * 4 + [(False, False), (True, False)] * 8
    answers = [Record(f"q{i}", Side(correct=a), Side(correct=b)) for i, (a, b) in enumerate(pairs)]
    found = result(answers, limits={"accuracy_drop": limit})
    assert not found
    assert found.summary.endswith("too few answers that the reference gets right to exclude twice the limit")
    assert result([*answers, Record("q", Side(correct=True), Side(correct=True))], limits={"accuracy_drop": limit})


def test_right_answers_of_few_clusters_are_few_right_answers():
    def answers(clusters):
        sides = [(Side(correct=True), Side(correct=i % 6 < clusters)) for i in range(24)]
        return [Record(f"q{i}", *pair, cluster=str(i % 6)) for i, pair in enumerate(sides)]

    assert result(answers(5))
    assert "UNDECIDED, accuracy_drop" in result(answers(4)).summary


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
