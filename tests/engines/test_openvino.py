"""OpenVINO as an engine: a decoder and a CNN pass, a wrong weight is found where it is."""

import pytest
import torch
from models import conv_net, llama, many_ids

from ditto_core.cache import Cache
from ditto_core.compare.judging import UNTAPPED
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import BackendError, RunError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.session import ShowsCache
from ditto_core.spec import EngineSpec
from tests.faults import scale_weight
from tests.zoo import factory

openvino = pytest.importorskip("openvino")


def spec(model, **fields):
    return EngineSpec.of(model, backend="openvino", outputs="**", **fields)


def test_a_padded_batch_agrees_at_every_site_and_step(workspace):
    pair = Pair(workspace, spec(llama))
    found = pair.generate([[3, 1, 4, 1, 5], [2, 7]], max_new_tokens=4)
    assert found, found
    assert (found.steps, len([site for site in found.sites if not site.endswith(UNTAPPED)])) == (4, 26)
    assert pair.sessions.engine.info.facts["precision"] == "f32"
    assert isinstance(pair.sessions.engine, ShowsCache)
    # 5 tokens of the prompt and the 3 that were fed after it.
    assert pair.sessions.engine.past["past_key_values.0.key"].shape[:1] == (2,)
    assert pair.sessions.engine.past["past_key_values.0.key"].shape[2] == 8
    with pytest.raises(RunError, match="'input_ids' is not given"):
        pair.sessions.engine.step({}, lambda site, tensor: None)  # OpenVINO itself would take the last step's inputs


def test_a_state_of_fixed_size_begins_with_zeros_and_is_carried(workspace):
    pair = Pair(workspace, spec(factory("lfm2")))
    found = pair.generate([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]], max_new_tokens=3)
    assert found, found
    assert pair.sessions.engine.past["past_key_values.0.conv"].shape[0] == 2


def test_a_convolutional_model_agrees(workspace):
    found = Pair(workspace, spec(conv_net)).run()
    assert found, found
    assert len([site for site in found.sites if not site.endswith(UNTAPPED)]) == 6


def test_a_wrong_weight_is_found_at_its_site(tmp_path, workspace, monkeypatch):
    from ditto_core.backends.openvino import ENGINE_FILE, OpenVinoBackend

    build = OpenVinoBackend.build

    def build_faulty(self, request):
        report = build(self, request)
        scale_weight(request.directory / ENGINE_FILE, "model.layers.1.mlp.down_proj", 1.01)
        return report

    monkeypatch.setattr(OpenVinoBackend, "build", build_faulty)
    found = Pair(Workspace(Cache(tmp_path)), spec(llama)).generate([3, 1, 4, 1, 5], max_new_tokens=2)
    assert not found
    assert found.first_bad.site == "model.layers.1.mlp.down_proj"
    assert found.first_bad.metrics.rel_l2 == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_padded_batch_agrees_in_half_precision(workspace, dtype):
    pair = Pair(workspace, spec(many_ids, dtype=dtype))
    found = pair.generate([[3, 1, 4, 1, 5], [2, 7]], max_new_tokens=3)
    assert found, found
    session = pair.sessions.engine
    assert session.past["past_key_values.0.key"].dtype == getattr(torch, dtype)
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    own = {"float16": ("FP16", "f16"), "bfloat16": ("BF16", "bf16")}[dtype]
    assert session.info.facts["precision"] == (own[1] if own[0] in able else "f32")
    assert session.info.kernels == ()
    pair.close()


def test_a_hint_that_makes_products_coarser_is_measured_and_explains_the_error(workspace):
    """OpenVINO's own default on processors that have bfloat16."""
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no bfloat16, so OpenVINO computes in float32 whatever the hint says")
    pair = Pair(workspace, spec(many_ids, options={"config": {"INFERENCE_PRECISION_HINT": "bf16"}}))
    found = pair.generate([3, 1, 4, 1, 5], max_new_tokens=2)
    (kernel,) = found.engine.kernels
    assert kernel.name == "computation in bf16"
    assert kernel.ratio > 1e3
    projection = next(r for r in found.results if r.site == "model.layers.0.self_attn.q_proj")
    assert projection.metrics.rel_l2 > 1e-4
    assert projection.verdict.status == "explained"
    assert "computation in bf16" in projection.verdict.rule
    pair.close()


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"dtype": "float64"}, BackendError, "float64"),
        ({"options": {"config": "INFERENCE_PRECISION_HINT"}}, UsageError, "expected a table"),
        ({"options": {"config": {"INFERENCE_PRECISION": "f32"}}}, UsageError, "'INFERENCE_PRECISION_HINT'"),
        ({"options": {"thread": 2}}, UsageError, "thread"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(workspace, fields, error, text):
    with pytest.raises(error, match=text) as caught:
        workspace.build(spec(llama, **fields))
    assert len(str(caught.value).splitlines()) == 1
