"""``torch.cond`` in a model: an engine has both branches, and shows of them what they return."""

import pytest
import torch

from ditto_core.errors import SelectorError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec
from tests.module_models import either


@pytest.fixture
def pair_of(workspace):
    pairs = []

    def make(source, **fields):
        pairs.append(Pair(workspace, EngineSpec.of(source, **{"outputs": ("**", "**:**"), **fields})))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def seen(session, x, site):
    taps = {}
    session.start(len(x))
    session.step({"x": x}, lambda name, tensor: taps.update({name: tensor.clone()}))
    return taps[site]


@pytest.mark.parametrize("fields", [{}, {"dtype": "float16"}, {"backend": "openvino"}, {"backend": "inductor"}])
def test_of_two_branches_that_depend_on_values_the_engine_takes_that_of_the_model(pair_of, workspace, fields):
    pair = pair_of(either, **fields)
    net = workspace.model(pair.spec.model).module
    for x, branch in ((torch.rand(5, 32), net.deep), (-torch.rand(5, 32), lambda hidden: net.shared(hidden / 2))):
        run = pair.run({"x": x})
        run.assert_close()
        assert {"enter", "shared:in", "shared", "leave"} <= set(run.sites)
        assert run.notes == (
            "not compared: deep (inside a branch of torch.cond, which shows only what it returns, or not called)",
        )
        with torch.no_grad():
            expected = net.shared(branch(net.enter(x)))
        for session in (pair.sessions.engine, pair.sessions.reference):
            torch.testing.assert_close(seen(session, x, "shared").float(), expected, rtol=1e-2, atol=1e-2)


def test_nothing_is_blamed_on_a_healthy_branch_and_what_it_returns_is_shown_at_its_line(pair_of):
    run = pair_of(either).run(localize=True)
    assert not run.localization.blamed
    assert "forward: taken" in next(tap.source for tap in run.taps if tap.site == "shared:in")


def test_what_is_inside_a_branch_cannot_be_asked_for(pair_of):
    with pytest.raises(SelectorError, match=r"matches deep\.0, deep\.1, deep\.2 \(inside a branch of torch\.cond"):
        pair_of(either, outputs="deep.*").run()
