"""A large checkpoint is exported from its own half precision, and the graph is that of the float32 model."""

from contextlib import closing

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from ditto_core.cache import Cache, content_digest
from ditto_core.engines.workspace import Workspace
from ditto_core.graphs.files import read_graph, read_initializer
from ditto_core.model import loading, placing
from ditto_core.model.loading import load_as_stored, tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec, ModelSource


@pytest.fixture
def checkpoint(tmp_path):
    tiny_decoder("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "model")  # its embeddings are tied
    return tmp_path / "model"


def test_the_stored_dtype_and_float32_give_the_same_export(checkpoint, tmp_path, monkeypatch):
    spec = EngineSpec.of(str(checkpoint), dtype="float16")
    whole = Workspace(Cache(tmp_path / "whole")).export(spec)
    monkeypatch.setattr(loading, "LARGE", 0)
    assert load_as_stored(spec.model, "eager").module.dtype == torch.bfloat16
    stored = Workspace(Cache(tmp_path / "stored")).export(spec)
    assert content_digest(stored.directory) == content_digest(whole.directory)
    true = tiny_decoder("qwen3").to(torch.bfloat16).to(torch.float16).model.embed_tokens.weight.numpy()
    weights = [read_initializer(t, stored.directory) for t in read_graph(stored.onnx_path).graph.initializer]
    (once,) = [weight for weight in weights if weight.size == true.size]
    assert (once == true).all()


def test_a_model_that_does_not_fit_is_judged_and_localized_block_by_block(checkpoint, tmp_path, monkeypatch):
    """Neither side has a copy of the blocks' weights, and every largest error is what it is with one."""
    spec = EngineSpec.of(str(checkpoint), dtype="float16", outputs=("**",))
    found = []
    for share in (placing.SHARE, 0.0):
        monkeypatch.setattr(placing, "SHARE", share)
        with closing(Pair(Workspace(Cache(tmp_path / "cache")), spec)) as pair:
            run = pair.generate([[3, 5, 7, 9, 11]], max_new_tokens=3, localize=True)
            streamed = [p.numel() == 0 for p in pair.sessions.reference.module.model.layers.parameters()]
        assert all(streamed) if share == 0 else not any(streamed)
        assert not run.failures and run.localization.results
        found.append(([(r.step, r.site, r.metrics.max_abs) for r in run.results], run.localization.results, run.tokens))
        monkeypatch.setattr(loading, "LARGE", 0)
    assert found[0] == found[1]


def test_a_checkpoint_of_several_dtypes_is_loaded_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LARGE", 0)
    model = tiny_decoder("llama").to(torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    assert load_as_stored(ModelSource(str(tmp_path)), "eager") is None


def test_a_model_that_rounds_its_own_numbers_is_loaded_in_float32(tmp_path, monkeypatch):
    """The square root of 96 is 9.798, in bfloat16 9.8125."""
    monkeypatch.setattr(loading, "LARGE", 0)
    tiny_decoder("gemma3", hidden_size=96).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_as_stored(ModelSource(str(tmp_path)), "eager") is None


def normed_convolution():
    """Its weight passes a module of its own, so that in the graph it has the name of a site."""
    torch.manual_seed(0)
    return nn.Sequential(weight_norm(nn.Conv1d(32, 32, 4)), nn.ReLU()), {"input": torch.randn(2, 32, 9)}


def test_a_weight_that_is_a_site_keeps_its_numbers(tmp_path):
    with closing(Pair(Workspace(Cache(tmp_path)), EngineSpec.of(normed_convolution))) as pair:
        pair.run().assert_close()
