"""torch.compile as an engine: a decoder and a CNN pass, a wrong weight is found where it is, a graph break is named."""

import pytest
import torch
from models import conv_net, many_ids

from ditto_core.backends.inductor import InductorBackend
from ditto_core.backends.program_session import Signature
from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import BackendError, BuildError, SelectorError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults.programs import scaled_in_program
from tests.module_models import residual_net

PROFILE = {"batch": (1, 2, 4), "length": (1, 5, 16), "past": (0, 8, 32)}


def spec(model, **fields):
    return EngineSpec.of(
        model, **{"backend": "inductor", "profile": PROFILE, "options": {"compiler": "aot_eager"}, **fields}
    )


def test_a_padded_batch_agrees_at_every_site_and_step(workspace):
    pair = Pair(workspace, spec(many_ids), PairOptions(observer=False))
    found = pair.generate([[3, 1, 4, 1, 5], [2, 7]], max_new_tokens=3)
    assert found, found
    assert (len(found.sites), found.missing) == (15, {})
    assert found.engine.facts["compiler"] == "aot_eager"
    pair.close()


def test_a_wrong_weight_is_found_at_its_site(tmp_path, monkeypatch):
    scaled_in_program(monkeypatch, "0", 1.01)
    pair = Pair(Workspace(Cache(tmp_path)), spec(conv_net))
    found = pair.run()
    assert not found
    assert found.first_bad.site == "0"
    assert found.observer is not None
    pair.close()


def test_the_models_tensor_in_the_program_heals_a_fault_at_its_site_and_not_upstream(tmp_path, monkeypatch):
    scaled_in_program(monkeypatch, "model.layers.0.mlp.down_proj", 1.05)
    pair = Pair(Workspace(Cache(tmp_path)), spec(many_ids, outputs="model.layers.*.**"), PairOptions(observer=False))
    assert pair.generate([3, 1, 4, 1, 5], max_new_tokens=2).first_bad.site == "model.layers.0.mlp.down_proj"
    here = pair.replace("model.layers.0.mlp.down_proj")
    assert here.healed >= 0.99
    assert here.remaining == ()
    assert here
    there = pair.replace("model.layers.0.self_attn.o_proj")
    assert abs(there.healed) < 0.01
    assert there.remaining[0] == "model.layers.0.mlp.down_proj"
    pair.close()


def test_every_site_of_a_program_is_compared_also_where_the_models_own_code_makes_it(workspace):
    """The sum behind a residual block is what the next module is given, and an operator's site."""
    pair = Pair(workspace, spec(residual_net, options={"compiler": "aot_eager"}))
    found = pair.localize()
    found.assert_close()
    assert "layer1.0.relu@1:in" in found.sites
    assert not found.localization.blamed
    pair.close()


def test_a_value_that_the_program_does_not_show_and_a_compiled_package_are_not_cut(tmp_path):
    Signature(["x"], [[None, 4]], ["float32"], ["output", "0"], ["output"], {}).save(tmp_path)
    with pytest.raises(SelectorError, match="does not show '1'"):
        InductorBackend().cut(spec(conv_net), tmp_path, ["1"])
    with pytest.raises(UsageError, match="compiled package"):
        InductorBackend().cut(spec(conv_net, options={"compiler": "aot_inductor"}), tmp_path, ["0"])


class Printing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        print("in the middle")
        return y * 2


def printing():
    torch.manual_seed(0)
    return Printing(), {"x": torch.randn(2, 4)}


def test_a_graph_break_is_named_with_its_line_and_can_be_allowed(tmp_path):
    workspace = Workspace(Cache(tmp_path))
    with pytest.raises(BuildError, match=r"test_inductor.py:\d+.*print") as caught:
        workspace.build(spec(printing))
    assert len(str(caught.value).splitlines()) == 1
    built = workspace.build(spec(printing, options={"compiler": "aot_eager", "fullgraph": False}))
    (found,) = built.facts["graph breaks"]
    assert "test_inductor.py" in found


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"dtype": "float64"}, BackendError, "float64"),
        ({"options": {"compile": "inductor"}}, UsageError, "'compiler'"),
        ({"options": {"compiler": "aot-eager"}}, UsageError, "'aot_eager'"),
        ({"options": {"compiler": "aot_eager", "mode": "max-autotune"}}, UsageError, "mode"),
        ({"options": {"compiler": "aot_eager", "fullgraph": "maybe"}}, UsageError, "fullgraph"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(fields, error, text):
    with pytest.raises(error, match=text) as caught:
        InductorBackend().check(spec(conv_net, **fields))
    assert len(str(caught.value).splitlines()) == 1


def test_a_machine_without_a_compiler_is_told_what_works_without_one(monkeypatch):
    monkeypatch.setattr("ditto_core.backends.inductor.cxx", lambda: None)
    with pytest.raises(BackendError, match="aot_eager"):
        InductorBackend().check(spec(conv_net, options={}))
    InductorBackend().check(spec(conv_net))
