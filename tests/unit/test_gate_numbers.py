"""The numbers that a gate rests on, each worked out by hand from a few records."""

import math

import numpy as np
import pytest

from ditto_core.gates.bootstrap import Interval, ratio_interval
from ditto_core.gates.limits import KL_LEAST, Limits, flips
from ditto_core.gates.policy import Policy
from ditto_core.gates.record import Record, Side
from ditto_core.gates.statistics import critical, mcnemar_power, smallest
from ditto_core.gates.verdict import accuracy, judge, pooled, positive, safe_exp, sample_kl, verdict_of, worst_sample

POLICY = Policy(resamples=200)
GROUPS = [f"g{i}" for i in range(8)]


def text(kl, floor_kl, *, nll=(100.0, 100.0, 100.0), top=((0, 0), (0, 0), (0, 0)), id="t"):
    """A text of two positions: nll and likeliest tokens of engine, reference and floor."""
    engine, reference, floor = (Side(*side) for side in zip(nll, top, strict=True))
    return Record(id, engine, reference, 2, kl, floor, floor_kl)


def limits(*records, dtype="float16", **settings):
    return Limits(records, Policy(resamples=200, **settings), dtype)


def test_a_samples_kl_is_its_mean_or_what_its_likelihood_implies():
    """A shift of 3 nats over two tokens is 1.5 a token, and 1.5^2 / 2 more than the mean of 0.2."""
    assert sample_kl(text((0.1, 0.3), ())) == pytest.approx(0.2)
    assert sample_kl(text((0.1, 0.3), (), nll=(103.0, 100.0, 100.0))) == pytest.approx(1.125)
    assert sample_kl(text((0.1, 0.3), (), nll=(101.0, 100.0, 100.0))) == pytest.approx(0.2)
    assert sample_kl(Record("q", Side(), Side(), 0, (0.4,))) == 0.4
    assert math.isnan(sample_kl(text((0.1, 0.3), (), nll=(math.nan, 100.0, 100.0))))


def test_the_worst_sample_is_measured_by_its_own_floor_or_that_of_all():
    """Allowed are 1.5 times 0.01 on average; the second's own floor is twice that."""
    records = [text((0.03, 0.03), (0.005, 0.005), id="a"), text((0.03, 0.03), (0.015, 0.015), id="b")]
    allowed = Limits(records, POLICY, "float16").sample_kl()
    assert allowed == pytest.approx([1.5 * (0.01 + KL_LEAST), 1.5 * (0.015 + KL_LEAST)])
    worst = worst_sample(records, POLICY, Limits(records, POLICY, "float16"))
    assert worst is not None
    assert (worst.estimate, worst.detail, worst.n) == (pytest.approx(0.03 / allowed[0]), "sample 'a'", 2)


def test_what_is_allowed_beside_the_floor_is_added_at_each_position():
    found = limits(text((0.1, 0.3), (0.1, 0.1)), text((), ()))
    assert found.own_kl == pytest.approx([0.2 + 2 * KL_LEAST, 0.0], rel=1e-12)
    assert found.own_kl[0] > 0.2
    assert found.kl_ratios()[0] == pytest.approx((0.4 + 2 * KL_LEAST) / (0.2 + 2 * KL_LEAST), rel=1e-12)
    assert math.isnan(found.kl_ratios()[1])


def test_a_floor_without_kl_is_enough_for_tokens_and_not_for_kl():
    found = limits(text((0.1, 0.3), (), top=((0, 0), (0, 0), (0, 1))))
    assert found.kl() is None
    assert found.kl_ratios() == []
    assert found.flips() is not None


def test_other_tokens_of_the_floor_are_counted_and_what_is_unseen_is_added():
    """One of two differs; with none in two trials a rate of 1 - sqrt(0.05) would not be surprising."""
    record = text((0.1, 0.3), (0.1, 0.1), top=((0, 0), (0, 0), (0, 1)))
    assert flips(record) == 1
    assert flips(text((), (), top=((0, 0, 0), (0, 0, 0), (0, 0, 1)))) == 1
    assert limits(record).flips() == [pytest.approx(math.sqrt(1.5) * (1 + (1 - math.sqrt(0.05)) * 2))]


def test_perplexity_may_move_by_twice_what_the_floor_moved():
    """Every floor is 1 nat over 2 tokens better: the interval of its shift has no width."""
    records = [text((), (), nll=(100.0, 100.0, 99.0), id=str(i)) for i in range(6)]
    assert limits(*records).log_perplexity() == pytest.approx(2 * 0.5)


def test_the_further_end_of_the_floors_shift_counts():
    shifts = [0.0, 0.0, 0.1, 0.1, 0.2, 0.8]
    records = [text((), (), nll=(100.0, 100.0, 100.0 + s), id=str(i)) for i, s in enumerate(shifts)]
    found = ratio_interval(shifts, [2.0] * 6, **POLICY.draws, clusters=[r.group for r in records])
    assert 0 < found.low < found.high
    assert limits(*records).log_perplexity() == pytest.approx(2 * found.high)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_perplexity_of_a_quantized_engine_may_lose_its_budget_of_kl(dtype):
    budget = {"int8": 0.0014, "int4": 0.043}[dtype]
    assert limits(text((), ()), dtype=dtype).log_perplexity() == pytest.approx(max(budget, math.log(1.001)))


def answers(pairs):
    """Right or wrong by (reference, engine)."""
    return [Record(f"q{i}", Side(correct=b), Side(correct=a)) for i, (a, b) in enumerate(pairs)]


def test_answers_are_counted_by_side():
    pairs = [(True, False)] * 3 + [(False, True)] + [(True, True)] * 5 + [(False, False)]
    found = accuracy(answers(pairs), POLICY, "float16")
    assert found is not None
    assert found.detail.startswith("60.00 against 80.00 %; 3 worse, 1 better; ")
    assert (found.test, found.n, found.p) == ("exact McNemar", 10, 5 / 16)


def test_the_test_of_a_drop_that_is_allowed_is_the_bootstrap():
    pairs = [(True, False)] * 3 + [(True, True)] * 27
    allowed = accuracy(answers(pairs), Policy(resamples=200, limits={"accuracy_drop": 0.5}), "float16")
    assert allowed is not None
    assert (allowed.test, allowed.decided, allowed.ok) == ("paired bootstrap", True, True)


def test_a_drop_is_undecided_whose_interval_reaches_beyond_twice_what_is_allowed():
    """Three of thirty lost: up to about 0.2."""
    pairs = [(True, False)] * 3 + [(True, True)] * 27
    found = accuracy(answers(pairs), Policy(resamples=200, limits={"accuracy_drop": 0.08}), "float16")
    assert found is not None
    assert found.high > 0.16
    assert (found.ok, found.decided) == (True, False)


def test_a_p_value_of_just_alpha_passes():
    """One of 32 and alpha 1/32."""
    found = accuracy(answers([(True, False)] * 5), Policy(resamples=200, alpha=1 / 32), "float16")
    assert found is not None
    assert (found.p, found.ok) == (1 / 32, True)


@pytest.mark.parametrize(
    ("interval", "limit", "ok", "decided"),
    [
        ((1.0, 1.0, 2.0), 1.0, True, True),
        ((1.0, 1.001, 2.0), 1.0, False, True),
        ((1.0, 0.5, 2.001), 1.0, True, False),
        ((0.1, 0.1, 0.4), 0.3, True, True),
        ((1.0, 0.0, 9.0), 0.0, True, True),
        ((1.0, 0.5, 9.0), math.inf, True, True),
        ((1.0, math.nan, 1.0), 1.0, False, True),
    ],
)
def test_an_interval_is_judged_by_its_lower_end_and_decides_up_to_twice_the_limit(interval, limit, ok, decided):
    found = verdict_of("kl_mean", Interval(*interval), limit, GROUPS, POLICY, "")
    assert (found.ok, found.decided) == (ok, decided)


def test_the_fewest_samples_decide():
    """All of five being worse has a chance of 1/32."""
    assert POLICY.least_clusters == 5
    for count, decided in ((4, False), (5, True)):
        assert verdict_of("kl_mean", Interval(0, 0, 0), 1.0, GROUPS[:count], POLICY, "").decided is decided


@pytest.mark.parametrize(("metric", "high"), [("top1_disagreement", 1 - 0.05 ** (1 / 16)), ("kl_mean", 0.0)])
def test_nothing_seen_is_no_proof_of_nothing(metric, high):
    """None of 16 positions differs."""
    records = [text((0.0, 0.0), (), id=str(i)) for i in range(8)]
    found = pooled(metric, [(0.0, 2)] * 8, records, Limits(records, POLICY, "float16"), None)
    assert found is not None
    assert (found.estimate, found.high) == (0.0, pytest.approx(high))


def test_what_is_pooled_has_the_scale_of_its_metric():
    """Each sample has a sum of 4 over two positions and is allowed 8: 2 a position of 4 that may be."""
    records = [text((2.0, 2.0), (), id=str(i)) for i in range(8)]
    found = pooled("kl_mean", [(4.0, 2)] * 8, records, Limits(records, POLICY, "float16"), [8.0] * 8)
    assert found is not None
    assert (found.estimate, found.limit, found.low, found.high) == (2.0, 4.0, 2.0, 2.0)
    assert "reference's own float16" in found.detail
    by_number = pooled("kl_mean", [(4.0, 2)] * 8, records, Limits(records, POLICY, "float16"), None)
    assert by_number is not None
    assert (by_number.estimate, by_number.limit) == (2.0, 0.0014)
    assert "reference's own" not in by_number.detail


def test_without_results_there_is_no_verdict_but_with_prompts_alone_greedy_tokens_have_one():
    record = Record("p", Side(generated=(1, 2, 9)), Side(generated=(1, 2, 3)))
    found = {verdict.metric: verdict for verdict in judge([record], POLICY, "float16")}
    assert [*found] == ["greedy_disagreement"]
    assert found["greedy_disagreement"].estimate == pytest.approx(1 / 3)
    assert judge([Record("p", Side(), Side())], POLICY, "float16") == ()


@pytest.mark.parametrize(("low", "kept"), [(-0.1, 0.0), (0.1, 0.1)])
def test_what_cannot_be_negative_is_not(low, kept):
    assert positive(low) == kept
    assert math.isnan(positive(math.nan))


@pytest.mark.parametrize(("value", "finite"), [(700.0, True), (700.1, False)])
def test_an_exponential_that_no_float_can_hold_is_infinite(value, finite):
    assert math.isfinite(safe_exp(value)) is finite


def test_the_width_of_a_ratios_interval_is_that_of_its_samples():
    """Sums 1 to 40 over lengths 2 and 4: studentized by hand from the same draws."""
    x, w = np.arange(1.0, 41), np.tile([2.0, 4.0], 20)
    found = ratio_interval(x.tolist(), w.tolist(), alpha=0.05, seed=0, resamples=500)
    rows = np.random.default_rng(0).integers(0, 40, (500, 40))

    def error(x, w):
        ratio = x.sum(-1) / w.sum(-1)
        return ratio, np.sqrt(((x - ratio[..., None] * w) ** 2).sum(-1)) / w.sum(-1)

    ratio, own = error(x, w)
    ratios, errors = error(x[rows], w[rows])
    t = np.quantile((ratios - ratio) / errors, [0.95, 0.05])
    hull = np.array([ratio - t * own, np.quantile(ratios, [0.05, 0.95])])
    assert (found.low, found.high) == (pytest.approx(hull[:, 0].min()), pytest.approx(hull[:, 1].max()))


@pytest.mark.parametrize(("discordant", "power"), [(0.0, 0.0), (1.0, 1.0)])
def test_the_power_where_no_pair_differs_or_every_one_is_lost(discordant, power):
    assert mcnemar_power(20, discordant, discordant, 0.05) == pytest.approx(power)


def test_the_power_of_few_pairs_is_the_whole_sum():
    """Five pairs that all differ, each worse with 3/4: significant is five of five, (3/4)^5."""
    assert mcnemar_power(5, 0.5, 1.0, 0.05) == pytest.approx(0.75**5)
    assert mcnemar_power(4, 0.5, 1.0, 0.05) == 0


@pytest.mark.parametrize(("alpha", "least"), [(1 / 32, 6), (1 / 31, 5), (1.0, 1)])
def test_a_chance_of_exactly_alpha_is_not_significant(alpha, least):
    """Five of five have a chance of 1/32."""
    assert critical(5, alpha) == least


@pytest.mark.parametrize(("from_", "found"), [(0.0001, 0.0001), (0.5, 0.5), (0.7321, 0.7321), (1.0, 1.0), (1.1, None)])
def test_the_smallest_step_that_holds(from_, found):
    got = smallest(lambda drop: drop >= from_ - 1e-9)
    assert got == (None if found is None else pytest.approx(found))
    assert got is None or got <= 1
