"""transformers clamps what overflows in float16: a graph has the clamp, and other code's questions stay its own."""

import pytest
import torch

from ditto_core.model.traced import Clamped

CODE = """
import torch

class Layer(torch.nn.Module):
    def forward(self, x):
        if x.dtype == torch.float16 and ASKED:
            x = torch.clamp(x, min=-64504, max=64504)
        return x * 1
"""
ASKED = ("not torch.isfinite(x).all()", "torch.isinf(x).any()")


class Under(torch.nn.Module):
    """Runs a layer as a wrapper does while it is traced."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with Clamped():
            return self.layer(x)


def layer(asked, name):
    made = {"__name__": name}
    exec(CODE.replace("ASKED", asked), made)
    return made["Layer"]()


@pytest.mark.parametrize("asked", ASKED)
def test_the_graph_of_a_layer_that_clamps_what_overflows_gives_what_the_layer_gives(asked):
    module = layer(asked, "transformers.models.its_own")
    program = torch.export.export(Under(module), (torch.ones(2, 3).half(),)).module()
    for x in (torch.ones(2, 3), torch.tensor([[torch.inf, 1e3, -2.5], [-torch.inf, 0.0, 6e4]])):
        assert torch.equal(program(x.half()), module(x.half()))


@pytest.mark.parametrize("name", ["own", "transformers_modules.of_a_checkpoint"])
def test_what_other_code_asks_of_its_values_is_not_answered(name):
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Under(layer(ASKED[0], name)), (torch.ones(2, 3).half(),))
