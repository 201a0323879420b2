"""What a message says where no site has diverged, or where the first bad one is special, and what to do next."""

import math
from dataclasses import replace

import pytest
import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.judging import RANDOM
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import SiteResult
from ditto_core.compare.table import table
from ditto_core.compare.text import (
    FIRST_WRONG,
    NOT_SHOWN,
    failure_message,
    final_result,
    headline,
    output_error,
    summary_line,
)
from ditto_core.compare.tokens import measure_logits
from ditto_core.compare.verdict import INCONCLUSIVE, UNJUDGED, Verdict, decide
from tests.unit.hand_made import ENGINE, REFERENCE, TAPS, compared

NOT_JUDGED = Verdict(INCONCLUSIVE, "rel_l2", 0.5, math.inf, "eager in float16 overflows, first at lm_head")


def result(site="lm_head", *, order=5, verdict=NOT_JUDGED, pair=([1.5], [1.0]), **fields):
    metrics = measure(*map(torch.tensor, pair))
    return SiteResult(0, site, order, metrics, verdict, **fields)


def run(*results, **fields):
    return Comparison(ENGINE, REFERENCE, results, taps=TAPS, **fields)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (
            NOT_JUDGED.rule,
            "next: run this model in a dtype that holds its numbers, or give a tolerance for this output",
        ),
        (f"{RANDOM}, first at lm_head", "next: let forward repeat itself: eval(), no dropout"),
    ],
)
def test_an_output_that_could_not_be_judged_is_the_headline(reason, advice):
    found = run(result(final=True, verdict=replace(NOT_JUDGED, rule=reason)))
    lines = failure_message(found).splitlines()
    assert lines[0] == f"the output lm_head, step 0, could not be judged: rel_l2 5.0e-01 not judged ({reason})"
    assert lines[-1].strip().startswith(advice)
    assert summary_line(found).count("not judged") == 1


def test_inner_sites_that_could_not_be_judged_are_counted_beside_the_headline():
    fine = result(verdict=decide("rel_l2", 0.0, 1.0, "rule"), final=True)
    found = run(result("a"), fine)
    assert found
    assert summary_line(found).endswith(f"; not judged: 1 of 2 sites, {NOT_JUDGED.rule}")


def test_tensors_without_elements_are_no_agreement():
    empty = result(verdict=decide("rel_l2", 0.0, 1.0, "rule"), pair=([], []))
    assert headline(run(empty)) == "nothing was compared: the tensors of all 1 sites are empty"
    assert failure_message(run(empty)).endswith("next: give inputs of at least one row")


def test_what_an_engine_file_is_known_to_lack_and_where_it_goes_wrong_is_in_the_message():
    wrong, lacking = f"{FIRST_WRONG}: MatMul 7, a", f"{NOT_SHOWN}1 sites that this engine does not show: a"
    bad = result(verdict=decide("rel_l2", 1.0, 0.5, "rule"))
    lines = [line.strip() for line in failure_message(run(bad, notes=(wrong, "other", lacking))).splitlines()]
    assert (lines[2], lacking in lines, "other" in lines) == (wrong, True, False)


def test_where_nothing_could_be_judged_nothing_holds():
    found = run(result("a", order=0), result("lm_head", verdict=decide("rel_l2", 0.0, 1.0, "rule"))).filter("a")
    assert not found
    assert headline(found) == f"nothing was judged: {NOT_JUDGED.rule}"


def test_a_final_output_without_a_tap_says_that_every_tap_is_within():
    bad = result("logits", verdict=decide("rel_l2", 0.5, 0.1, "rule"), final=True)
    assert failure_message(run(bad)).splitlines()[1].startswith("  first bad site: a final output; every tap before it")


def test_a_tap_without_class_and_line_has_no_line_of_its_own():
    bad = result("lm_head", verdict=decide("rel_l2", 0.5, 0.1, "rule"))
    bare = replace(run(bad), taps=tuple(replace(tap, module_class="", source="") for tap in TAPS))
    assert "  first bad site:" not in failure_message(bare)


def test_zeros_in_the_place_of_numbers_are_called_zeros():
    bad = result(verdict=decide("rel_l2", 1.0, 0.1, "rule"), pair=([0.0, 0.0], [2.0, 3.0]))
    assert "  there: the engine's tensor is all zeros, the reference's reaches 3: overflow?" in failure_message(
        run(bad)
    )


def test_a_tensor_that_fails_without_any_difference_has_no_place():
    """A rule may ask for more than equality: the scale of tensors that are equal is 1."""
    bad = result(verdict=decide("scale", 1.0, 0.5, "rule"), pair=([1.0], [1.0]))
    assert "there:" not in failure_message(run(bad))


def test_the_output_of_a_step_is_the_worst_of_those_that_are_final():
    bad, good = (decide("rel_l2", value, 0.1, "rule") for value in (0.5, 0.01))
    first = result("first", order=1, verdict=good, final=True)
    second = result("second", order=0, verdict=bad, final=True)
    inner = result("inner", order=9, verdict=bad)
    assert final_result(run(first, second, inner), 0).site == "second"
    assert final_result(run(first, inner), 0).site == "first"
    assert final_result(run(inner), 0).site == "inner"
    assert final_result(run(), 0) is None
    assert output_error(run()) == ""


def test_the_perplexity_of_the_prompt_is_said_where_it_was_measured():
    logits = measure_logits(torch.ones(1, 4), torch.ones(1, 4), dtype="float32", step=0)
    known = replace(logits, perplexity_actual=12.34567, perplexity_expected=12.0)
    bad = {(0, "lm_head"): 0.1}
    assert "; perplexity of the prompt 12.35, the reference's 12" in output_error(compared(bad, logits=(known,)))
    assert "perplexity" not in output_error(compared(bad, logits=(logits,)))


def test_quantized_logits_beyond_their_bound_advise_a_wider_dtype():
    ours, theirs = torch.tensor([[0.0, 9.0]]), torch.tensor([[9.0, 0.0]])
    logits = measure_logits(ours, theirs, dtype="float32", step=0)
    found = replace(compared({}, logits=(logits,)), engine=replace(ENGINE, dtype="int8"))
    assert headline(found).startswith("engine diverges at the logits, step 0: kl_mean")
    assert failure_message(found).splitlines()[-1].strip().startswith("next: this quantization loses more")


def test_what_only_one_of_two_dumps_has_advises_a_name_map():
    sides = {"engine": replace(ENGINE, recorded=True), "reference": replace(REFERENCE, recorded=True)}
    found = replace(compared({}, missing={"a": "in one dump only"}), **sides)
    lines = failure_message(found).splitlines()
    assert lines[-1].strip().startswith("next: a name map aligns names and layouts")
    assert not [line for line in lines if "observer" in line or "dump:" in line]


def test_a_comparison_of_nothing_is_a_table_without_rows():
    assert (
        table(run())
        .splitlines()[0]
        .endswith("nothing was compared: the engine has no outputs in common with its reference")
    )
    unjudged = run(replace(result(), verdict=UNJUDGED))
    assert "false-alarm" not in table(unjudged)


def test_a_notebook_shows_the_verdict_a_mark_for_each_site_and_a_cross_where_one_fails():
    bad, good = compared({(0, "lm_head"): 0.1})._repr_html_(), compared({})._repr_html_()
    assert ("✗" in bad, "✓" in good) == (True, True)
    assert (bad.count("m0 -6l-6 6"), good.count("m0 -6l-6 6")) == (1, 0)
    assert bad.count("<title>") == good.count("<title>") == 6
    assert "<svg" not in run()._repr_html_()
