"""What a pair feeds to both sides."""

from types import SimpleNamespace

import pytest
import torch

from ditto_core.errors import UsageError
from ditto_core.model.forward import DECODED
from ditto_core.pair.inputs import by_name, parts_not_run, rounded


def test_inputs_are_rounded_to_the_engines_dtype_and_integers_kept():
    found = rounded({"x": torch.tensor([1.0001, -torch.inf]), "ids": torch.tensor([7])}, "bfloat16")
    assert found["x"].dtype == torch.bfloat16
    assert found["x"].tolist() == [1.0, -torch.inf]
    assert found["ids"].dtype == torch.int64


def test_parts_that_tokens_do_not_reach_are_noted_unless_they_get_something():
    config, ids = SimpleNamespace(vision_config={}, audio_config=None), torch.tensor([[1]])
    (note,) = parts_not_run(config, {"input_ids": ids, "attention_mask": ids, DECODED: ids})
    assert note.startswith("text tokens do not reach the vision part of this model: it was not run")
    assert parts_not_run(config, {"input_ids": ids, "pixel_values": torch.zeros(1, 3, 2, 2)}) == []
    assert parts_not_run(SimpleNamespace(), {"input_ids": ids}) == []


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (torch.ones(2), r"the inputs of net are a Tensor, expected them by name: \{'x': tensor, 'y': tensor\}"),
        ([torch.ones(2)], "are a list, expected them by name"),
        ({"z": 1}, "net has no input 'z', expected x, y"),
    ],
)
def test_inputs_come_by_name(inputs, told):
    with pytest.raises(UsageError, match=told):
        by_name(inputs, ("x", "y"), "net")


def test_an_additive_mask_stays_a_mask():
    mask = torch.tensor([0.0, torch.finfo(torch.float32).min])
    assert rounded({"mask": mask}, "float16")["mask"].tolist() == [0.0, torch.finfo(torch.float16).min]


def test_a_number_that_the_engine_cannot_hold_is_named():
    with pytest.raises(UsageError, match=r"input 'x' holds -1e\+05, beyond the 6\.55e\+04 of the engine's float16"):
        rounded({"x": torch.tensor([1.0, -1e5])}, "float16")


def test_a_quantized_engine_takes_what_it_is_given():
    x = torch.tensor([1.0001])
    assert rounded({"x": x}, "int8")["x"] is x
