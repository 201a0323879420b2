import numpy
import pytest
import torch

from ditto_core.errors import UsageError
from ditto_core.stepping.prompts import Sequencer, encode, greedy, valid_elements


def test_unequal_prompts_are_padded_on_the_left():
    batch = encode([[5, 6, 7], [8]], pad=0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.padded


def test_positions_count_real_tokens_only():
    sequencer = Sequencer(encode([[5, 6, 7], [8]]))
    assert sequencer.inputs()["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
    sequencer.advance(torch.tensor([1, 2]))
    inputs = sequencer.inputs()
    assert inputs["input_ids"].tolist() == [[1], [2]]
    assert inputs["position_ids"].tolist() == [[3], [1]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt given"),
        ("", "the prompt is empty"),
        ([[1], []], "prompt 1 is empty"),
        ("hello", "is text but the model has no tokenizer"),
        ([1, 99], "token id 99 is outside the vocabulary of 50"),
        ([1, -1], "token id -1 is outside the vocabulary"),
    ],
)
def test_bad_prompts_are_one_line(prompts, message):
    with pytest.raises(UsageError, match=message):
        encode(prompts, vocab_size=50)


def test_greedy_reads_the_last_position():
    logits = torch.zeros(2, 3, 4)
    logits[0, 2, 1] = logits[1, 2, 3] = 1
    logits[0, 0, 2] = 9
    assert greedy(logits).tolist() == [1, 3]


def test_padding_is_left_out_and_a_real_query_counts_with_all_its_keys():
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    valid = valid_elements(("batch", "head", "length", "total"), mask, 2)
    assert valid is not None
    assert valid[..., 0].squeeze(1).tolist() == [[True, True], [False, True]]
    keys = valid_elements(("batch", "head", "total", ""), mask, 2)
    assert keys[..., 0].squeeze(1).tolist() == [[True, True, True], [False, False, True]]
    assert valid_elements(("batch", "length", ""), torch.ones(2, 3), 3) is None
    flat = valid_elements(("tokens", ""), mask, 2)
    assert flat.tolist() == [[shown] for shown in mask[:, -2:].bool().flatten().tolist()]
    twice = valid_elements(("", "2*tokens"), mask, 2)
    assert twice.shape == (1, 2 * flat.numel())
    assert torch.equal(twice[0, ::2], flat[:, 0]) and torch.equal(twice[0, 1::2], flat[:, 0])
    assert valid_elements(("", "length", ""), mask, 3) is None


@pytest.mark.parametrize("ids", [torch.tensor([5, 6]), numpy.array([5, 6]), [numpy.int64(5), numpy.int64(6)]])
def test_one_prompt_may_be_a_tensor_an_array_or_numbers_of_numpy(ids):
    assert encode(ids).input_ids.tolist() == [[5, 6]]


@pytest.mark.parametrize("rows", [torch.tensor([[5, 6], [7, 8]]), [torch.tensor([5, 6]), numpy.array([7, 8])]])
def test_several_prompts_may_be_tensors_or_arrays(rows):
    assert encode(rows).input_ids.tolist() == [[5, 6], [7, 8]]
