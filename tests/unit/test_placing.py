"""A model in another dtype: as `Module.to` has it, whether its blocks keep their weights or get them while they run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ditto_core.model.loading import tiny_decoder
from ditto_core.model.placing import blocks, only_in_blocks, placed

IDS = torch.tensor([[3, 9, 27, 81, 4]])


def logits(module: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return module(input_ids=IDS).logits  # type: ignore[no-any-return]


def rounded(module: nn.Module, *dtypes: torch.dtype) -> nn.Module:
    """The parameters of a copy, cast by hand."""
    module = copy.deepcopy(module)
    for dtype in dtypes:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    return module


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_placed_model_computes_what_a_cast_copy_computes(family: str, streams: bool) -> None:
    model = tiny_decoder(family)
    expected = rounded(model, torch.bfloat16, torch.float32)
    made = placed(model, torch.float32, via=torch.bfloat16, streams=streams)
    assert torch.equal(logits(made), logits(expected))
    assert torch.equal(logits(made), logits(expected)), "a second call gets its weights too"
    assert not torch.equal(logits(model), logits(expected)), "the model itself keeps its weights"


def test_blocks_hold_no_weights_unless_they_run() -> None:
    model = placed(tiny_decoder("llama"), torch.bfloat16)
    made = placed(model, torch.float32, streams=True)
    assert sum(p.numel() for block in blocks(made) for p in block.parameters()) == 0
    assert (made.dtype, made.device) == (torch.float32, torch.device("cpu"))
    seen: list[int] = []
    made.model.layers[1].register_forward_hook(
        lambda block, *_: seen.append(sum(p.numel() for b in blocks(made) for p in b.parameters()))
    )
    logits(made)
    one = sum(p.numel() for p in model.model.layers[1].parameters())
    assert seen == [0] or seen == [one], "at most the block that runs has weights"
    assert sum(p.numel() for block in blocks(made) for p in block.parameters()) == 0


def test_a_block_that_fails_gives_its_weights_back() -> None:
    made = placed(tiny_decoder("llama"), torch.bfloat16, streams=True)

    def fails(*_: Any) -> None:
        raise RuntimeError("in the block")

    made.model.layers[0].mlp.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="in the block"):
        logits(made)
    assert sum(p.numel() for p in made.model.layers[0].parameters()) == 0


class Shared(nn.Module):
    """A weight of a block that the head reads too, a list in a list, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4, bias=False)]), nn.Linear(4, 4, bias=False)])
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.layers[1].weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in (self.layers[0][0], self.layers[1], self.head):
            x = layer(x)
        return x


def test_weights_that_others_share_stay_and_buffers_are_the_copys_own() -> None:
    model = Shared().eval()
    assert only_in_blocks(model) == {id(model.layers[0][0].weight)}
    made = placed(model, torch.float64, streams=True)
    assert made.head.weight is made.layers[1].weight and made.head.weight.numel() == 16
    x = torch.randn(2, 4)
    expected = copy.deepcopy(model).double()(x.double())
    assert torch.equal(made(x.double()), expected)
    assert model.calls == 0 and made.calls == 1


def test_a_model_that_is_so_already_is_itself() -> None:
    model = tiny_decoder("llama")
    assert placed(model, torch.float32) is model
    assert placed(model, torch.float32, via=torch.float16) is not model


def test_a_copy_beyond_the_memory_that_is_available_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder("llama")
    size = sum(p.numel() for p in model.parameters()) * 8
    for free, streams in ((size, True), (2 * size, False), (None, False)):
        monkeypatch.setattr("ditto_core.model.placing.available", lambda device, free=free: free)
        made = placed(model, torch.float64)
        assert (sum(p.numel() for p in blocks(made)[0].parameters()) == 0) is streams
