"""``ditto_core.compare_engine``: one call for a script or a notebook."""

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import ditto_core
from ditto_core.errors import RunError, UsageError

EXAMPLES = {"x": torch.linspace(-1, 1, 24).reshape(4, 6)}


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).eval()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, x):
        return self.body(x)


@pytest.fixture(scope="module")
def named():
    return Named().eval()


def of_function(model, function, workspace, **settings):
    return ditto_core.compare_engine((model, EXAMPLES), function, workspace=workspace, **settings)


def test_an_engine_is_built_compared_and_shown_in_a_notebook(named, workspace, tmp_path):
    found = ditto_core.compare_engine((named, EXAMPLES), "ort", workspace=workspace)
    assert found
    assert "body.1" in found.sites
    assert "<table>" in found._repr_html_()
    engine = workspace.build(ditto_core.EngineSpec.of((named, EXAMPLES))).copy_to(tmp_path / "engine")
    assert ditto_core.compare_engine((named, EXAMPLES), engine.directory, workspace=workspace).sites == found.sites
    with pytest.raises(UsageError, match="dtype"):
        ditto_core.compare_engine((named, EXAMPLES), engine, dtype="float16", workspace=workspace)
    assert not [note for note in found.notes if "another model" in note]
    replace(engine, built_of="module " + "0" * 64).save_manifest()
    (engine.directory / "digests.json").unlink()
    noted = ditto_core.compare_engine((named, EXAMPLES), engine.directory, workspace=workspace)
    assert noted
    assert noted.notes[-1].count("was built of another model than Named is now")


@pytest.mark.parametrize("selector", ["output", "body.2", "body"])
def test_what_a_rule_asks_for_is_measured_under_any_name_of_an_output(named, workspace, selector):
    rules = {selector: [{"metric": "abs_p100", "bound": 1.0}, {"metric": "cosine", "at_least": 0.9}]}
    found = ditto_core.compare_engine((named, EXAMPLES), "ort", workspace=workspace, tolerance=rules)
    judged = [r for r in found.results if r.metrics.requested]
    assert {name for r in judged for name, _ in r.metrics.requested} == {"abs_p100"}
    assert {r.verdict.metric for r in judged if r.final} <= {"abs_p100", "cosine"}
    assert all(dict(r.metrics.requested)["abs_p100"] == r.metrics.max_abs for r in judged)
    wrong = ditto_core.compare_engine(
        (named, EXAMPLES), "ort", workspace=workspace, tolerance={selector: {"metric": lambda a, b: 2.0, "bound": 1.0}}
    )
    assert wrong.first_bad.verdict.value == 2.0


def test_another_exporters_file_is_an_engine_by_path_and_its_session_by_a_function(named, workspace, tmp_path):
    path = tmp_path / "own.onnx"
    torch.onnx.export(named, (EXAMPLES["x"],), path, input_names=["x"], dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    found = of_function(named, lambda x: session.run(None, {"x": x.numpy()}), workspace)
    assert found
    assert [(r.site, r.final) for r in found.results] == [("output", True)]
    assert found.results[0].floor is not None
    assert found.notes


@pytest.mark.parametrize(
    "function",
    [
        lambda x: {"output": small()(x)},
        lambda anything: [small()(anything).detach().numpy()],
        Named().eval(),
        torch.jit.trace(Named().eval(), EXAMPLES["x"], check_trace=False),
    ],
    ids=["by-name", "in-order", "module", "script"],
)
def test_what_a_function_takes_and_returns(function, named, workspace):
    assert of_function(named, function, workspace)


def test_a_wrong_function_diverges_by_the_floor_of_its_dtype(named, workspace):
    found = of_function(named, lambda x: small()(x) * 1.01, workspace)
    assert (found.first_bad.site, found.first_bad.metrics.rel_l2) == ("output", pytest.approx(0.01, rel=1e-3))
    assert of_function(named, lambda x: small().bfloat16()(x.bfloat16()), workspace, dtype="bfloat16")
    assert not of_function(named, lambda x: small().bfloat16()(x.bfloat16()), workspace, dtype="float32")


def test_a_rule_and_inputs_of_ones_own(named, workspace):
    found = of_function(
        named, lambda x: small()(x) + 0.1, workspace, tolerance={"output": {"metric": "max_abs", "bound": 0.11}}
    )
    assert found.results[0].verdict.value == pytest.approx(0.1, rel=1e-4)
    seen = []
    ditto_core.compare_engine(
        (named, EXAMPLES),
        lambda x: seen.append(x) or small()(x),
        {"x": np.zeros((2, 6), np.float32)},
        workspace=workspace,
    )
    assert seen[0].shape == (2, 6)


def test_an_output_that_is_not_returned_fails(named, workspace):
    found = of_function(named, lambda x: {"scores": small()(x)}, workspace)
    assert not found
    assert set(found.missing) == {"output", "scores"}


@pytest.mark.parametrize(
    ("function", "settings", "error", "told"),
    [
        (lambda x: None, {}, RunError, "NoneType"),
        (lambda x: x @ torch.ones(5), {}, RunError, "RuntimeError"),
        (small, {"reference": "onnxruntime"}, UsageError, "onnxruntime"),
        (small, {}, RunError, "TypeError"),
        (Named().eval(), {"tolerance": {"outptu": 1.0}}, UsageError, "outptu"),
        (Named().eval(), {"no_such": 1}, UsageError, "no_such"),
        ("no-such-backend", {}, UsageError, "no-such-backend"),
    ],
)
def test_what_cannot_be_is_one_line(function, settings, error, told, named, workspace):
    with pytest.raises(error, match=told) as raised:
        of_function(named, function, workspace, **settings)
    assert "\n" not in str(raised.value)


def test_inputs_of_the_wrong_kind_are_one_line(named, workspace):
    for inputs in ("a prompt", {"y": torch.ones(1)}):
        with pytest.raises(UsageError):
            ditto_core.compare_engine((named, EXAMPLES), lambda x: x, inputs, workspace=workspace)
