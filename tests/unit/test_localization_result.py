"""What a localization found, as data: what is flagged, whom to blame, how it reads, and its JSON form."""

import json
import math
from dataclasses import replace

import pytest

from ditto_core.compare.blame import Blame, Cause, Localization, LocalResult
from tests.unit.hand_made import compared, measured

CAUSE = Cause("bias", "a.q", 0.9, ("bias is missing", "rel_l2 is gone with it"), "look at q's bias", rule="linear.bias")
BLAME = Blame(
    site="a.q",
    module="a.q",
    module_class="torch.nn.Linear",
    source="model.py:7 forward: q(x)",
    step=1,
    steps=(1, 2),
    local=0.2,
    floor=1e-3,
    bound=4e-3,
    inputs=("a",),
    operators=("Mul (model.py:5 forward: x * 2)", "MatMul (model.py:7 forward: q(x))", "Cast", "Add ()"),
)


def local(site="a.q", step=0, order=0, error=0.2, bound=4e-3, explained=""):
    return LocalResult(step, site, order, measured(error), 1e-3, bound, explained)


def localization(*results, **fields):
    return Localization("float16", 4.0, results, **fields)


@pytest.mark.parametrize(
    ("error", "explained", "flagged"),
    [(0.2, "", True), (3e-3, "", False), (0.2, "TF32: probe 5 x", False), (math.nan, "", True)],
)
def test_a_site_is_flagged_beyond_its_bound_unless_the_kernels_explain_it(error, explained, flagged):
    assert local(error=error, explained=explained).flagged is flagged


def test_the_ratio_is_error_over_bound():
    assert local(error=0.2, bound=4e-3).ratio == pytest.approx(50)


def test_flagged_sites_come_by_step_then_by_place_in_the_model():
    found = localization(local("late", 1, 0), local("second", 0, 2), local("first", 0, 1), local("fine", 0, 0, 1e-4))
    assert [r.site for r in found.flagged] == ["first", "second", "late"]
    assert {site: [r.step for r in results] for site, results in found.by_site.items()} == {
        "fine": [0],
        "late": [1],
        "first": [0],
        "second": [0],
    }


def test_it_is_true_and_has_a_first_where_a_site_is_to_blame():
    nobody, someone = localization(), localization(blamed=(BLAME,), causes=(CAUSE,))
    assert (bool(nobody), nobody.first, nobody.cause) == (False, None, None)
    assert (bool(someone), someone.first, someone.cause) == (True, BLAME, CAUSE)


def test_it_reads_in_one_line():
    assert str(BLAME) == "a.q: local error 2.0e-01 > 4.0e-03 at step 1"
    assert str(Blame(**{**vars(BLAME), "operator": "MatMul_3"})).startswith("a.q in MatMul_3: local error")
    assert str(CAUSE) == "bias at a.q: bias is missing"
    assert str(Cause("bias", "a.q", 0.9, (), "")) == "bias at a.q"


def test_lines_between_are_those_of_other_code_the_last_first():
    """The site's own line, an operator without a line and one with an empty one tell nothing new."""
    assert BLAME.between == ("model.py:5 forward: x * 2",)


def test_json_goes_both_ways_with_infinities():
    found = localization(local(error=math.nan, bound=math.inf), blamed=(BLAME,), causes=(CAUSE,), notes=("a note",))
    again = Localization.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False)))
    assert again.to_json() == found.to_json()
    assert (again.blamed, again.causes, again.notes) == (found.blamed, found.causes, found.notes)
    assert again.results[0].bound == math.inf


@pytest.mark.parametrize(
    ("blamed", "said"),
    [
        (Blame(**{**vars(BLAME), "site": "b"}), "the error is added at b, model.py:7 forward: q(x)"),
        (Blame(**{**vars(BLAME), "site": "lm_head"}), "or before it: model.py:5 forward: x * 2"),
        (Blame(**{**vars(BLAME), "site": "lm_head", "operators": ()}), None),
    ],
)
def test_a_failure_says_where_the_error_is_added_if_it_is_elsewhere(blamed, said):
    run = compared({(0, "lm_head"): 0.1}, localization=localization(blamed=(blamed,)))
    with pytest.raises(AssertionError) as caught:
        run.assert_close()
    assert run.first_bad.site == "lm_head"
    found = [line.strip() for line in str(caught.value).splitlines() if "added at" in line or "before it: m" in line]
    assert found == ([said] if said else [])


def test_a_failure_names_its_likeliest_cause_and_what_next():
    run = compared({(0, "lm_head"): 0.1}, localization=localization(blamed=(BLAME,), causes=(CAUSE,)))
    with pytest.raises(AssertionError, match=r"cause \(90%\): bias at a.q: bias is missing; look at q's bias"):
        run.assert_close()


def test_a_site_counts_as_measured_where_some_element_was():
    """What the replay itself makes not finite is left out; of the second site nothing is left."""
    empty = replace(local("b", order=1), metrics=replace(measured(0.0), count=0))
    assert localization(local(step=0), local(step=1), empty).measured == ("a.q",)
