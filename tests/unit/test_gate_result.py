import json
import math
from dataclasses import replace

import pytest

from ditto_core.errors import UsageError
from ditto_core.gates import GateResult, Policy, merge
from ditto_core.gates.baseline import Baseline
from ditto_core.gates.record import Record, Side
from ditto_core.gates.result import Identity
from ditto_core.gates.text import table
from ditto_core.system.fingerprint import fingerprint
from ditto_core.system.receipt import Receipt

IDENTITY = Identity("s", "d", "m", "e" * 64, "engine float32", "r" * 64, "eager float32", "float32", 4)
RECEIPT = Receipt(1000.0, "abc", "e" * 64, "r" * 64, "model", {"torch": "2.13"}, {"gpu": "none"}, {}, {"bootstrap": 0})


def answers(worse=0, better=0, both=10):
    pairs = [(False, True)] * worse + [(True, False)] * better + [(True, True)] * both
    return [Record(f"q{i}", Side(correct=a), Side(correct=b)) for i, (a, b) in enumerate(pairs)]


def text(id, ours, theirs, tokens=10, kl=()):
    top = tuple(range(len(kl)))
    return Record(id, Side(ours, top), Side(theirs, top), tokens, kl)


def result(records, **policy):
    ids = tuple(record.id for record in records)
    return GateResult(IDENTITY, Policy(resamples=500, **policy), ids, tuple(records), (RECEIPT,))


def verdict(found, metric):
    (one,) = [v for v in found.verdicts if v.metric == metric]
    return one


@pytest.mark.parametrize(("worse", "better", "passes"), [(0, 0, True), (4, 0, True), (5, 0, False), (8, 2, True)])
def test_accuracy_fails_exactly_where_mcnemar_says_p_below_alpha(worse, better, passes):
    found = result(answers(worse, better))
    assert bool(found) is passes
    one = verdict(found, "accuracy_drop")
    assert one.estimate == pytest.approx((worse - better) / (10 + worse + better))


def test_the_unpaired_test_passes_what_mcnemar_fails():
    found = result(answers(worse=6, both=194))
    assert not found
    assert "unpaired test passes" in verdict(found, "accuracy_drop").detail


def test_a_limit_on_accuracy_allows_a_drop_up_to_it():
    records = answers(worse=6, both=194)  # 3 points
    assert result(records, limits={"accuracy_drop": 0.03})
    assert not result(records, limits={"accuracy_drop": 0.005})


def test_perplexity_ratio_is_the_exponential_of_the_mean_paired_difference():
    found = result([text("a", 21.0, 20.0), text("b", 22.0, 20.0, tokens=20), text("c", 11.5, 11.0)])
    one = verdict(found, "perplexity_ratio")
    assert one.estimate == pytest.approx(math.exp(3.5 / 40))
    assert one.low < one.estimate < one.high


def test_no_interval_of_a_rate_ends_above_1():
    one = Record("flips", Side(1.0, (1, 0, 0)), Side(1.0, (0, 0, 0)), 3, (1e-5,) * 3)
    others = [text(f"t{i}", 1.0, 1.0, kl=(1e-5,) * 3) for i in range(6)]
    assert verdict(result([one, *others]), "top1_disagreement").high == 1  # the studentized end is in the thousands


def test_an_engine_that_is_worse_on_every_text_fails_by_perplexity():
    found = result([text(f"t{i}", 20.2 + 0.01 * i, 20.0) for i in range(20)])
    assert not found
    assert found.summary.startswith("gate s on engine float32 against eager float32: FAILED, perplexity_ratio 1.0")


def test_kl_and_top1_are_pooled_over_positions():
    records = [text("a", 1.0, 1.0, kl=(0.0, 0.002)), text("b", 1.0, 1.0, kl=(0.004,))]
    records[1] = replace(records[1], engine=replace(records[1].engine, top=(7,)))
    found = result(records)
    assert verdict(found, "kl_mean").estimate == pytest.approx(0.002)
    assert verdict(found, "kl_p99").estimate == pytest.approx(0.004)
    assert verdict(found, "top1_disagreement").estimate == pytest.approx(1 / 3)


def test_greedy_disagreement_counts_tokens_after_the_first_difference():
    sides = Side(generated=(1, 2, 9, 4)), Side(generated=(1, 2, 3, 4))
    found = result([*answers(), Record("p", *sides)])
    assert verdict(found, "greedy_disagreement").estimate == 0.5


@pytest.mark.parametrize("ours", [math.nan, math.inf])
def test_nan_and_inf_never_pass(ours):
    assert not result([text(f"t{i}", ours if i == 3 else 20.0, 20.0) for i in range(20)])
    kl = [text(f"t{i}", 20.0, 20.0, kl=(ours if i == 3 else 0.0,)) for i in range(20)]
    assert not result(kl)


def test_a_missing_sample_fails_and_is_named():
    whole = result(answers())
    broken = replace(whole, records=whole.records[:4] + whole.records[5:])
    assert whole
    assert not broken
    assert broken.summary.endswith("INCOMPLETE, sample 'q4' missing of 10")
    with pytest.raises(AssertionError, match="sample 'q4' missing"):
        broken.assert_passed()


def test_a_gate_whose_metrics_have_no_limit_does_not_pass():
    unlimited = result(answers(), limits={"accuracy_drop": math.inf})
    assert not unlimited
    assert unlimited.summary.endswith("FAILED, none of its metrics has a limit")


def test_a_limit_on_what_no_sample_yields_leaves_the_gate_undecided():
    """Texts have no answers: the limit held for any engine."""
    texts = [text(f"t{i}", 10.0, 10.0, kl=(1e-5,) * 3) for i in range(10)]
    assert result(texts)
    found = result(texts, limits={"accuracy_drop": 0.01, "kl_p99": math.inf})
    assert (bool(found), found.undecided) == (False, True)
    assert found.summary.endswith("UNDECIDED, accuracy_drop has a limit and no sample yields it")


def test_a_baseline_says_which_limits_decide_nothing():
    without = result([text(f"t{i}", 10.0, 10.0) for i in range(10)], limits={"kl_mean": 0.01})
    assert without
    notes = Baseline.of(without).warnings(RECEIPT, without.policy)
    assert notes == ["baseline: no KL without the reference's logits: the limit of kl_mean decides nothing"]


def test_a_reference_that_is_hardly_ever_right_leaves_nothing_to_lose():
    """Four right answers that are all lost have p = 1/16: nothing that the engine answers could fail."""
    wrong = [Record(f"q{i}", Side(correct=False), Side(correct=i < 4)) for i in range(10)]
    found = result([*wrong, *(text(f"t{i}", 10.0, 10.0, kl=(1e-5,) * 3) for i in range(10))])
    assert not found
    assert "too few answers that the reference gets right" in found.summary


def test_a_result_survives_json_and_is_judged_anew(tmp_path):
    found = result([*answers(worse=5), text("t", math.inf, 1.0, kl=(0.5, 1e-9))], limits={"kl_p99": math.inf})
    found.save(tmp_path / "gate.json")
    read = GateResult.load(tmp_path / "gate.json")
    assert read == found
    assert read.to_json() == found.to_json()
    assert "NaN" not in (tmp_path / "gate.json").read_text()


@pytest.mark.parametrize("field", ["ok", "ids", "records", "policy"])
def test_a_result_that_was_changed_by_hand_is_refused(tmp_path, field):
    path = tmp_path / "gate.json"
    data = result(answers(worse=5)).to_json()
    path.write_text(
        json.dumps({**data, field: True if field == "ok" else data[field][:3] if field != "policy" else {}})
    )
    with pytest.raises(UsageError, match=r"gate\.json: the gate result was changed"):
        GateResult.load(path)


def test_merged_shards_are_the_whole(tmp_path):
    whole = result(answers(worse=3))
    shards = [replace(whole, records=whole.records[i::2], shard=f"{i + 1}/2") for i in (0, 1)]
    merged = merge(shards)
    assert (merged.records, merged.verdicts, merged.shard) == (whole.records, whole.verdicts, "")
    assert len(merged.receipts) == 2
    assert not merge(shards[:1])


def test_shards_that_overlap_or_are_of_another_gate_are_refused():
    whole = result(answers())
    with pytest.raises(UsageError, match="sample 'q0' is in two shards"):
        merge([whole, whole])
    other = replace(whole, identity=replace(IDENTITY, engine="f" * 64))
    with pytest.raises(UsageError, match="different gates: engine is"):
        merge([whole, other])
    with pytest.raises(UsageError, match="samples or policy"):
        merge([whole, replace(whole, policy=Policy(alpha=0.01))])


def test_a_baseline_survives_its_file_and_an_edit_is_noticed(tmp_path):
    baseline = Baseline.of(result([text("a", 1.0, 2.0, kl=(0.1,)), *answers()]))
    path = tmp_path / "baseline.json"
    baseline.save(path)
    assert Baseline.load(path) == baseline
    assert len(path.read_text().splitlines()) > len(baseline.samples)
    path.write_text(path.read_text().replace('"nll": 2.0', '"nll": 3.0'))
    with pytest.raises(UsageError, match="changed after it was written"):
        Baseline.load(path)
    with pytest.raises(UsageError, match=r"nowhere\.json is not there"):
        Baseline.load(tmp_path / "nowhere.json")


def test_a_baseline_names_what_differs_on_another_machine():
    baseline = Baseline.of(result(answers()))
    here = replace(RECEIPT, versions={"torch": "2.14"}, machine={"gpu": "H100", "driver": "580"})
    assert baseline.warnings(RECEIPT, Policy()) == []
    assert baseline.warnings(here, Policy()) == [
        "baseline: torch was 2.13, is 2.14",
        "baseline: driver was absent, is 580",
        "baseline: gpu was none, is H100",
    ]


def test_no_baseline_is_taken_from_an_incomplete_run():
    whole = result(answers())
    with pytest.raises(UsageError, match=r"no baseline: .*INCOMPLETE"):
        Baseline.of(replace(whole, records=whole.records[1:]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.7}, "alpha is 0.7"),
        ({"limits": {"kl": 1}}, "no metric 'kl'; did you mean 'kl_"),
        ({"limits": {"perplexity_ratio": 0.9}}, "at least 1"),
        ({"limits": {"kl_mean": math.nan}}, "at least 0"),
        ({"resamples": 3}, "at least 100"),
        ({"spread": 0.0}, "spread is 0.0"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(settings, message):
    with pytest.raises(UsageError) as error:
        Policy(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize("data", [{}, {"schema": 2}, [], "text", None])
def test_what_is_no_gate_result_is_one_clear_line(tmp_path, data):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(data))
    with pytest.raises(
        UsageError,
        match=r"^\S+result.json: no gate result: .*expected what `ditto gate run` and",
    ):
        GateResult.load(path)


def test_a_result_that_is_not_there_or_of_no_shard_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match=r"none.json is no gate result \(No such file or directory\), expected what"):
        GateResult.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="no shard to merge"):
        merge([])


def test_a_result_shows_its_summary_and_its_verdicts_as_a_table():
    whole = result([*answers(worse=12, both=8), text("t", 10.0, 10.0, kl=(0.1, 0.2))], limits={"kl_mean": math.inf})
    assert repr(whole) == f"<GateResult: {whole.summary}>"
    rows = {line.split()[0]: line for line in table(whole).splitlines()}
    assert "failed" in rows["accuracy_drop"]
    assert "p 0.00024" in rows["accuracy_drop"]  # 2^-12: twelve worse, none better
    assert " - " in rows["kl_mean"]
    assert table(replace(whole, records=whole.records[1:])) == ""


def test_a_baseline_of_an_older_schema_lacking_a_sample_or_of_others_is_refused(tmp_path):
    baseline = Baseline.of(result(answers(both=2)))
    with pytest.raises(UsageError, match="the baseline lacks sample 'q9'"):
        baseline.known("q9")
    path = tmp_path / "baseline.json"
    baseline.save(path)
    data = json.loads(path.read_text())
    data["schema"] = 1
    del data["digest"]
    path.write_text(json.dumps({**data, "digest": fingerprint(data)}))
    with pytest.raises(UsageError, match="has schema 1, expected 2: write it anew"):
        Baseline.load(path)
