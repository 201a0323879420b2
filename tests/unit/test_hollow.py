"""While a model is traced its weights are zeros; what reads them gives the true ones."""

import onnx_ir as ir
import pytest
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from ditto_core.errors import BuildError
from ditto_core.model.hollow import LARGE, give_weights, hollow


class Tied(nn.Module):
    """A weight under two names, a small one, a persistent buffer, and one that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.randn(LARGE))
        self.register_buffer("frequencies", torch.randn(LARGE), persistent=False)


def test_large_weights_are_zeros_of_the_wanted_dtype_and_their_readers_give_the_true_values():
    module = Tied()
    weight = module.first.weight.detach().clone()
    with hollow(module, torch.bfloat16) as readers:
        assert set(readers) == {module.first.weight.data_ptr(), module.mean.data_ptr()}
        assert module.first.weight.dtype == torch.bfloat16
        assert module.second.weight is module.first.weight
        assert not module.first.weight.any()
        assert module.first.weight.is_contiguous()
        assert module.first.bias.dtype == torch.bfloat16
        assert module.first.bias.any()
        assert module.frequencies.dtype == torch.float32
        assert torch.equal(readers[module.second.weight.data_ptr()](), weight.bfloat16())


def test_the_module_has_its_weights_back_whatever_happened():
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="broke off"), hollow(module, torch.float16):
        raise RuntimeError("broke off")
    after = module.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )


def graph_with(name, tensor):
    """A model whose only initializer is a tensor."""
    value = ir.Value(name=name, const_value=TorchTensor(tensor))
    graph = ir.Graph([], [], nodes=[], initializers=[value], opset_imports={"": 20})
    return ir.Model(graph, ir_version=10)


def test_zeros_that_were_copied_on_the_way_are_an_error_and_no_engine():
    """A copy has another address; two engines of it would agree with each other."""
    module = Tied()
    with hollow(module, torch.float32) as readers:
        given = graph_with("weight", module.first.weight.detach())
        give_weights(given, readers)
        assert given.graph.initializers["weight"].const_value.numpy().any()
        with pytest.raises(BuildError, match="'lost'"):
            give_weights(graph_with("lost", module.first.weight.detach().clone()), readers)
