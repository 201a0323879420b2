"""Faults in real ONNX Runtime engines: the blamed site is right, and the cause is named by its rule."""

import re
from pathlib import Path

import numpy as np
import pytest

from ditto_core.causes import KINDS, RULES
from ditto_core.causes.naming import SPECIFIC
from ditto_core.localize import EVERYTHING
from ditto_core.localize.settings import FIELDS
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace
from tests.faults.case import ALONE, NORM, TABLE, Case
from tests.faults.cases import CASES, NAMELESS
from tests.faults.runs import CAUSES as RUN_CAUSES
from tests.faults.runs import DOWN
from tests.models import DECODERS, MORE


def run(workspace, directory, case):
    faulty = FaultyWorkspace(workspace.cache, case.fault, directory)
    spec = EngineSpec.of({**DECODERS, **MORE}[case.model], dtype=case.dtype, outputs=EVERYTHING)
    pair = Pair(faulty, spec, PairOptions(observer=False))
    found = pair.generate(case.prompts or ALONE, max_new_tokens=3, localize=True).localization
    pair.close()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blamed_site_is_right_and_cause_is_named(workspace, tmp_path, case):
    found = run(workspace, tmp_path, case)
    assert found.first is not None
    assert (found.first.site, found.first.step) == (case.site, case.step)
    assert {item.site for item in found.blamed} == {case.site, *case.also}
    assert found.cause is not None
    named = (found.cause.kind, found.cause.site, found.cause.rule)
    assert named == (case.kind, case.site, case.rule), found.causes


def noise(size):
    def change(w):
        return w * (1 + size * np.random.default_rng(0).standard_normal(w.shape))

    return change


@pytest.mark.parametrize(
    ("site", "fault"),
    [
        (DOWN, lambda edit: edit.change_weight(DOWN, noise(1e-5))),
        (DOWN, lambda edit: edit.change_weight(DOWN, noise(1e-2))),
        (NORM, lambda edit: edit.change_weight(NORM, noise(1e-2))),
        (
            TABLE,
            lambda edit: edit.change_value(
                TABLE, ("Add", [edit.constant(noise(1)(np.full(16, 1e-3)).astype("f4"))], {})
            ),
        ),
    ],
    ids=[
        "faint noise on a weight",
        "noise on a weight",
        "noise on a norm",
        "noise on cosines",
    ],
)
def test_a_fault_of_no_known_kind_is_blamed_and_no_rule_names_it(workspace, tmp_path, site, fault):
    found = run(workspace, tmp_path, Case("noise", fault, site, "", ""))
    assert [item.site for item in found.blamed] == [site]
    assert found.causes == ()


@pytest.mark.parametrize("case", NAMELESS, ids=lambda case: case.name)
def test_a_fault_that_looks_like_a_known_kind_and_is_another_is_blamed_and_not_named(workspace, tmp_path, case):
    found = run(workspace, tmp_path, case)
    assert (found.first.site, found.first.step) == (case.site, case.step)
    assert {item.site for item in found.blamed} == {case.site, *case.also}
    assert [cause for cause in found.causes if not cause.rule.startswith("runs.")] == []


@pytest.mark.parametrize("rule", RUN_CAUSES)
def test_what_a_whole_run_shows_is_named(workspace, tmp_path, rule):
    kind, provoke = RUN_CAUSES[rule]
    assert [(cause.kind, cause.rule) for cause in provoke(workspace, tmp_path)] == [(kind, rule)]


def test_every_rule_and_every_kind_has_a_fault_that_provokes_it():
    of_ranks = {"all-reduce missing", "ranks exchanged"}  # tests/engines/test_ranks.py
    assert {case.rule for case in CASES} | set(RUN_CAUSES) | {"mutants.ranks"} == RULES
    assert {case.kind for case in CASES} | {kind for kind, _ in RUN_CAUSES.values()} | of_ranks == set(KINDS)
    assert {kind for *_, kind in (*SPECIFIC, *FIELDS)} <= set(KINDS)
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_table_of_reported_faults_says_what_the_cases_say():
    text = (Path(__file__).parents[2] / "benchmarks/localize.md").read_text()
    rows = re.findall(r"^\|.*\| `([^`|]+)` \| ([^|,]+)(?:, step (\d))? \| ([^|]+) \|$", text, re.MULTILINE)
    known = {case.name: (case.site, str(case.step or ""), case.kind) for case in CASES}
    known |= {rule: ("none", "", kind) for rule, (kind, _) in RUN_CAUSES.items()}
    assert len(rows) == 24
    assert {name: tuple(rest) for name, *rest in rows} == {name: known[name] for name, *_ in rows}
    assert f"puts {len(CASES)} faults into tiny engines" in text
    assert f"{len(RULES)} rules and {len(KINDS)} kinds" in text
