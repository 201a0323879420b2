"""Logits of a model that is no decoder: [batch, classes], every class counts."""

import pytest
import torch

from ditto_core import EngineSpec, Pair
from ditto_core.compare.tolerance import Tolerance
from ditto_core.pair.pair_options import PairOptions

CLASSES = 5


class Classifier(torch.nn.Module):
    """``logits`` are what ``take`` makes of the scores [batch, length, classes], or [batch, classes]."""

    def __init__(self, take):
        super().__init__()
        self.score = torch.nn.Linear(8, CLASSES)
        self.take = take

    def forward(self, x):
        return {"logits": self.take(self.score(x))}


def made(take, *shape):
    torch.manual_seed(0)
    return Classifier(take), {"x": 4 * torch.randn(*shape, 8)}


def direct():
    return made(lambda scores: scores, 2)


def pooled():
    return made(lambda scores: scores[:, -1], 2, 3)


class Regressor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(8, CLASSES)

    def forward(self, x):
        return {"logits": self.score(x).mean(-1)}


def scalar():
    torch.manual_seed(0)
    return Regressor(), {"x": torch.randn(2, 8)}


def unnamed():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, CLASSES))
    return layers, {"input": torch.randn(2, 8)}


@pytest.mark.parametrize("factory", [direct, pooled])
def test_the_divergence_of_a_quantized_classifier_is_over_its_classes(workspace, factory):
    pair = Pair(workspace, EngineSpec.of(factory, options={"quantize": "int8"}))
    run = pair.run()
    pair.sessions.engine.start(2)
    ours = pair.sessions.engine.step(dict(factory()[1]), lambda site, tensor: None)["logits"].double().log_softmax(-1)
    module, inputs = factory()
    with torch.no_grad():
        theirs = module.double()(inputs["x"].double())["logits"].log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    assert kl.min() > 1e-7
    (found,) = run.logits
    assert found.positions == 2
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-2)


def test_an_output_called_logits_without_classes_is_compared_as_any_other(workspace):
    run = Pair(workspace, EngineSpec.of(scalar)).run()
    assert run
    assert run.logits == ()
    assert "logits" in {result.site for result in run}


def test_a_quantized_engine_that_nothing_judges_does_not_pass(workspace):
    spec = EngineSpec.of(unnamed, options={"quantize": "int8"})
    run = Pair(workspace, spec).run()
    assert not run
    assert run.missing == {
        "logits": "an int8 engine is judged by its logits, which there are none of: give a tolerance by site"
    }
    assert Pair(workspace, spec, PairOptions(tolerance=Tolerance.of({"**": 0.1}))).run()


class Embedder(torch.nn.Module):
    """``logits`` of what a mask leaves of token ids, each of any shape."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(16, 8)
        self.score = torch.nn.Linear(8, CLASSES)

    def forward(self, input_ids, attention_mask):
        return {"logits": self.score(self.table(input_ids) * attention_mask)}


def embedder(ids, mask):
    torch.manual_seed(0)
    return Embedder(), {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def flat():
    return embedder([3, 4, 5], 1.0)


def packed():
    return embedder([3, 4, 5], [[1.0], [0.0], [1.0]])


def deep_mask():
    return embedder([[3, 4], [5, 6]], [[[[1.0], [0.0]]]])


@pytest.mark.parametrize("factory", [flat, packed, deep_mask])
def test_ids_and_masks_of_any_shape_are_inputs_like_others(workspace, factory):
    run = Pair(workspace, EngineSpec.of(factory)).run()
    assert run
    assert {result.site for result in run} >= {"table", "score"}


def bert_classifier():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=4, **sizes))
    return model, {"input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.tensor([[1, 1, 1, 1]])}


def test_a_classifier_of_as_many_classes_as_tokens_has_no_perplexity(workspace):
    run = Pair(workspace, EngineSpec.of(bert_classifier)).run()
    assert run
    (found,) = run.logits
    assert (found.positions, found.perplexity_actual) == (1, None)
