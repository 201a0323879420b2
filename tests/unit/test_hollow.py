"""While a model is traced its weights are zeros; what reads them gives the true ones."""

import pytest
import torch
from torch import nn

from ditto_core.model.hollow import LARGE, hollow


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
