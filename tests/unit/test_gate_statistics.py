import math

import numpy as np
import pytest

from ditto_core.gates.bootstrap import quantile_interval, ratio_interval
from ditto_core.gates.limits import rule_of_three
from ditto_core.gates.policy import Policy
from ditto_core.gates.statistics import (
    critical,
    detectable_drop,
    detectable_mean,
    mcnemar,
    mcnemar_power,
    miettinen_pairs,
    sign_flip,
    unpaired_detectable,
    unpaired_threshold,
)
from ditto_core.gates.suite import Sample, Suite
from ditto_core.gates.text import plan
from tests.gate_suites import tiny_suite

DRAWS = {"alpha": 0.05, "seed": 0, "resamples": 2000}


@pytest.mark.parametrize(
    ("worse", "better", "p"),
    [(0, 0, 1.0), (5, 0, 1 / 32), (8, 2, 56 / 1024), (2, 8, 1 - 11 / 1024), (1, 1, 3 / 4), (0, 4, 1.0)],
)
def test_mcnemar_is_the_binomial_tail_counted_by_hand(worse, better, p):
    assert mcnemar(worse, better) == pytest.approx(p, rel=1e-12)


def test_mcnemar_does_not_overflow_on_thousands_of_pairs():
    assert 0 < mcnemar(2100, 1900) < 0.001


@pytest.mark.parametrize(("pairs", "least"), [(4, 5), (5, 5), (7, 7), (8, 7), (20, 15)])
def test_fewest_worse_pairs_that_are_significant_at_five_percent(pairs, least):
    assert critical(pairs, 0.05) == least  # of a table of the sign test


def test_exact_power_is_that_of_simulated_gates():
    n, drop, discordant = 120, 0.08, 0.15
    generator = np.random.default_rng(3)
    worse, better = (discordant + drop) / 2, (discordant - drop) / 2
    draws = generator.multinomial(n, [worse, better, 1 - discordant], 4000)
    found = np.mean([mcnemar(int(w), int(b)) < 0.05 for w, b, _ in draws])
    assert mcnemar_power(n, drop, discordant, 0.05) == pytest.approx(found, abs=0.025)  # 3 standard errors


def test_the_smallest_detectable_drop_has_the_power_that_was_asked_for_and_one_step_less_has_not():
    drop = detectable_drop(171, alpha=0.05, beta=0.2, discordant=0.05)
    assert drop is not None
    assert mcnemar_power(171, drop, 0.05, 0.05) >= 0.8 > mcnemar_power(171, drop - 1e-4, 0.05, 0.05)


def test_four_samples_can_detect_nothing():
    assert detectable_drop(4, alpha=0.05, beta=0.2, discordant=0.05) is None


def test_miettinens_formula_by_hand():
    root = 1.6448536 * math.sqrt(0.05) + 0.8416212 * math.sqrt(0.05 - 0.0153**2)
    assert miettinen_pairs(0.0153, 0.05, 0.05, 0.2) == pytest.approx((root / 0.0153) ** 2, rel=1e-6)
    assert detectable_drop(5000, alpha=0.05, beta=0.2, discordant=0.05) == pytest.approx(0.0079, abs=1e-4)


@pytest.mark.parametrize(
    ("n", "theta", "below"), [(4096, 2.747, 1.817), (1319, 4.841, 3.203), (198, 12.495, 8.266), (100, 17.582, 11.631)]
)
def test_the_unpaired_test_gives_the_numbers_that_tensorrt_llm_prints(n, theta, below):
    assert unpaired_detectable(n, alpha=0.05, beta=0.2) == pytest.approx(theta, abs=1e-3)
    assert unpaired_threshold(60.0, n, alpha=0.05) == pytest.approx(60.0 - below, abs=1e-3)


def test_the_interval_of_a_mean_of_many_samples_is_the_normal_one():
    x = np.random.default_rng(0).normal(3, 2, 2000)
    found = ratio_interval(x.tolist(), [1.0] * 2000, **DRAWS)
    half = 1.6449 * x.std(ddof=1) / math.sqrt(2000)
    assert found.estimate == pytest.approx(x.mean())
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.06)


def test_a_ratio_weighs_samples_by_their_length():
    assert ratio_interval([1.0, 9.0], [1.0, 3.0], **DRAWS).estimate == 2.5


def test_the_same_seed_gives_the_same_interval_and_another_a_different_one():
    x, w = np.random.default_rng(1).normal(0, 1, 40).tolist(), [1.0] * 40
    assert ratio_interval(x, w, **DRAWS) == ratio_interval(x, w, **DRAWS)
    assert ratio_interval(x, w, **DRAWS) != ratio_interval(x, w, **{**DRAWS, "seed": 1})


def test_samples_that_agree_exactly_have_an_interval_without_width():
    found = ratio_interval([0.5, 1.0], [1.0, 2.0], **DRAWS)
    assert (found.low, found.high) == (0.5, 0.5)


def test_a_nan_makes_the_interval_nan():
    assert math.isnan(ratio_interval([math.nan, 1.0], [1.0, 1.0], **DRAWS).low)
    assert math.isnan(quantile_interval([[math.nan], [1.0]], 0.99, **DRAWS).low)


def test_a_quantile_is_taken_over_all_positions_and_its_interval_over_samples():
    found = quantile_interval([[float(i)] * 10 for i in range(100)], 0.99, **DRAWS)
    assert found.estimate == 98.0
    assert 90 < found.low <= 98 <= found.high == 99.0


@pytest.mark.parametrize("distribution", ["normal", "exponential"])
def test_healthy_runs_raise_no_more_false_alarms_than_alpha(distribution):
    generator, alarms, runs = np.random.default_rng(5), 0, 300
    for run in range(runs):
        x = generator.normal(0, 1, 57) if distribution == "normal" else generator.exponential(1, 57) - 1
        w = generator.integers(30, 90, 57).astype(float)
        alarms += ratio_interval((x * w).tolist(), w.tolist(), alpha=0.05, seed=run, resamples=400).low > 0
    assert alarms <= 29  # 99.9 % quantile of Binomial(300, 0.05) is 28


def test_the_plan_says_what_each_metric_can_detect():
    first, accuracy, perplexity = plan(tiny_suite(100, 171, 0), Policy(), "float32")
    assert first == "suite tiny: 271 samples, alpha 0.05, power 80%, seed 0"
    assert "on 171 samples: 4.43 points, if 5% of the pairs differ (13.45 points by the unpaired test)" in accuracy
    ratio = 1.001 * math.exp((1.6448536 + 0.8416212) * 0.01 / 10)
    assert f"on 100 texts: {ratio:.4f} (limit 1.001), if their differences spread by 0.01 nats a token" in perplexity


def test_a_limit_moves_what_the_plan_can_detect():
    limits = {"accuracy_drop": 0.01, "perplexity_ratio": math.inf}
    _, accuracy, perplexity = plan(tiny_suite(4, 400, 0), Policy(limits=limits), "float32")
    points = 1 + 100 * (1.6448536 + 0.8416212) * math.sqrt(0.05 / 400)
    assert f"on 400 samples: {points:.2f} points (limit 1)" in accuracy
    assert perplexity == "perplexity of 4 texts is reported, not judged"
    _, accuracy, _ = plan(tiny_suite(4, 400, 0), Policy(limits={"accuracy_drop": math.inf}), "float32")
    assert accuracy == "accuracy of 400 samples is reported, not judged"


def test_the_plan_of_prompts_alone_says_that_there_is_nothing_to_detect():
    prompts = Suite("p", (Sample("a", prompt=(1, 2)),))
    _, few, effect = plan(prompts, Policy(), "float32")
    assert few.startswith("too few samples: 1 independent, expected at least 5")
    assert effect.startswith("smallest detectable effect: none")


def test_a_mean_of_exactly_the_detectable_size_is_found_as_often_as_was_asked_for():
    n, sigma = 64, 2.0
    shift = detectable_mean(n, sigma=sigma, alpha=0.05, beta=0.2)
    means = np.random.default_rng(2).normal(shift, sigma / math.sqrt(n), 20_000)
    assert np.mean(means > 1.6448536 * sigma / math.sqrt(n)) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (5, 0), (8, 2), (2, 8), (1, 1), (0, 4)])
def test_the_sign_flip_of_single_samples_is_mcnemars_test(worse, better):
    assert sign_flip([1] * worse + [-1] * better + [0] * 7) == pytest.approx(mcnemar(worse, better), rel=1e-12)


def test_the_sign_flip_of_clusters_counted_by_hand():
    # Of the eight signs of 3, 2, 1 only +3+2+1 and +3+2-1 reach a sum of 4.
    assert sign_flip([3, 2, -1]) == 2 / 8
    assert sign_flip([3]) == 1 / 2


def test_samples_of_one_cluster_are_one_value_of_the_bootstrap():
    x, w = [1.0, 5.0, 2.0, 0.0, 7.0, 3.0], [1.0, 2.0, 1.0, 1.0, 3.0, 2.0]
    clustered = ratio_interval(x, w, **DRAWS, clusters=["a", "a", "b", "b", "c", "d"])
    assert clustered == ratio_interval([6.0, 2.0, 7.0, 3.0], [3.0, 2.0, 3.0, 2.0], **DRAWS)


@pytest.mark.parametrize("sign", [1, -1])
def test_each_end_is_the_wider_of_studentized_and_percentile(sign):
    x = sign * (np.random.default_rng(1).exponential(1, 20) ** 2)
    found = ratio_interval(x.tolist(), [1.0] * 20, **DRAWS)
    rows = np.random.default_rng(0).integers(0, 20, (2000, 20))
    means, errors = x[rows].mean(1), x[rows].std(1, ddof=1)
    t = np.quantile((means - x.mean()) / errors, [0.95, 0.05])
    student = x.mean() - t * x.std(ddof=1)
    percentile = np.quantile(means, [0.05, 0.95])
    # The skew makes one method the wider below and the other above, or one of them both: the hull is asked for.
    assert found.low == pytest.approx(min(student[0], percentile[0]))
    assert found.high == pytest.approx(max(student[1], percentile[1]))
    assert student[0] != pytest.approx(percentile[0])
    assert student[1] != pytest.approx(percentile[1])


def test_the_rule_of_three_is_the_rate_at_which_nothing_is_seen_one_time_in_twenty():
    assert (1 - rule_of_three(100, 0.05)) ** 100 == pytest.approx(0.05)
    assert rule_of_three(0, 0.05) == 1.0
