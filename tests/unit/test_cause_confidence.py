"""The confidence that is printed is what was measured: the tables of benchmarks/localize.md and the cases of faults."""

import re
from collections import Counter
from pathlib import Path

import pytest

from ditto_core.causes import RULES, confidence
from ditto_core.causes.confidence import MEASURED, SEVERAL
from tests.faults.cases import CASES
from tests.faults.runs import CAUSES as RUN_CAUSES

TEXT = (Path(__file__).parents[2] / "benchmarks/localize.md").read_text()
PRINTED = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+)% \|$", TEXT, re.MULTILINE)
DRAWN = re.findall(r"^\| (\w+\.\w+)( \(or …\))? \| (\d+) \| (\d+) \| \d+ \| \d+ \|$", TEXT, re.MULTILINE)


def family(rule, several=""):
    return SEVERAL if several else rule if rule.startswith("mutants.") else rule.partition(".")[0]


def test_the_figures_are_those_of_the_drawn_faults_and_of_the_cases():
    cases = Counter(family(rule) for rule in (*(case.rule for case in CASES), *RUN_CAUSES))
    named, right = Counter(cases), Counter(cases)
    for rule, several, count, correct in DRAWN:
        named[family(rule, several)] += int(count)
        right[family(rule, several)] += int(correct)
    assert sum(int(count) for _, _, count, _ in DRAWN) == 240
    assert {*named} <= {*MEASURED}
    assert {name: (named[name], right[name]) for name in MEASURED} == MEASURED


def test_the_table_says_what_is_printed():
    assert [row[0] for row in PRINTED] == list(MEASURED)
    for name, drawn, cases, named, right, percent in PRINTED:
        assert (int(named), int(right)) == MEASURED[name]
        assert int(drawn) + int(cases) == int(named)
        assert f"{confidence.confidence(name):.0%}" == f"{percent}%"


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_has_a_figure_and_none_is_certain(rule):
    assert family(rule) in MEASURED
    assert 0.5 <= confidence.confidence(family(rule)) < 1


def test_what_nobody_measured_is_as_likely_wrong_as_right():
    assert confidence.confidence("mutants.of_others") == 0.5
    assert confidence.confidence("mutants.fits") == pytest.approx(56 / 61)
