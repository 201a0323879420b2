"""Small things that a new user meets: names near a path, the list of fixtures, reruns, what localize takes."""

from __future__ import annotations

import pytest

from ditto_core.cache import Cache
from ditto_core.cli.localize import command as localize
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import ModelError, UsageError
from ditto_core.model.checkpoint import locate, near_path
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec, ModelSource
from pytest_ditto.reporting import ATTRIBUTE
from pytest_ditto.tally import Tally, line_of

RUN = {
    "ok": False,
    "worst_margin": 2.0,
    "worst_recovered": False,
    "worst_site": "a",
    "worst_step": 0,
    "sites": 3,
    "engine": "e",
    "first_bad": "a",
    "unjudged_sites": 0,
    "unjudged_output": "",
    "bad_logits": "",
}


def report(outcome):
    made = pytest.TestReport("t.py::test_x", ("t.py", 0, "test_x"), {}, outcome, None, "call")
    setattr(made, ATTRIBUTE, {"runs": [RUN], "bad_input": True, "notes": ["n"]})
    return made


def test_a_test_that_is_run_again_counts_once():
    tally = Tally()
    for outcome in ("rerun", "rerun", "failed"):
        tally.pytest_runtest_logreport(report(outcome))
    assert (len(tally.runs), len(tally.bad_inputs), len(tally.failed)) == (1, 1, 1)
    assert tally.total()[0].startswith("ditto-engine: 1 comparison, 3 sites")


def test_a_margin_above_1_of_a_run_that_passes_is_explained():
    tally = Tally()
    made = report("passed")
    getattr(made, ATTRIBUTE)["runs"] = [{**RUN, "ok": True, "worst_recovered": True}]
    tally.pytest_runtest_logreport(made)
    assert tally.total()[0].endswith("worst margin 2 at a, step 0, recovered downstream (t.py::test_x)")


def test_a_quantized_engine_whose_logits_are_off_is_listed_with_the_number():
    logits = "kl_mean 1.8e-03 > 1.4e-03 (table for int8), step 1"
    line = line_of({**RUN, "first_bad": "", "bad_logits": logits}, "t.py::test_x", "failed")
    assert line.endswith(f"e: the logits are off: {logits}")


def test_the_first_missing_part_of_a_path_has_its_neighbour_named(tmp_path):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    assert near_path(tmp_path / "modles" / "llama") == "; did you mean 'models'?"
    assert near_path(tmp_path / "models" / "lama") == "; did you mean 'llama'?"
    assert near_path(tmp_path / "models" / "zzz") == ""


def test_a_test_that_names_a_function_as_commands_do_is_told_how():
    with pytest.raises(ModelError, match=r"neither a local directory.*; a test takes the function itself: model=net$"):
        locate(ModelSource.of("nets.py:net"))


def test_fixtures_are_listed_with_what_to_call(pytester, isolated_environment):
    lines = pytester.runpytest_inprocess("--fixtures").outlines
    at = next(i for i, line in enumerate(lines) if line.startswith("ditto -- "))
    assert "ditto.generate(" in lines[at + 1]
    assert "ditto.run(" in lines[at + 1]


def test_localize_takes_the_options_of_build():
    with pytest.raises(UsageError, match="unknown profile dimension 'lenght'"):
        localize("nowhere", profile=["lenght=1,2,3"])
    with pytest.raises(UsageError, match="--option got 'level', expected KEY=VALUE"):
        localize("nowhere", option=["level"])
    with pytest.raises(UsageError, match="unknown attention 'flash'"):
        localize("nowhere", attention="flash")


def test_text_without_a_tokenizer_is_refused_before_anything_is_built(tmp_path):
    pair = Pair(Workspace(Cache(tmp_path)), EngineSpec.of(lambda: tiny_decoder("llama")))
    with pytest.raises(UsageError, match=r"the prompt is text but .* no tokenizer .*: give token ids"):
        pair.generate("Hey")
    with pytest.raises(UsageError, match="give token ids"):
        pair.localize("Hey")
    assert not [*tmp_path.rglob("*.onnx")]
