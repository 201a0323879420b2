"""Strategies draw what they promise and shrink to the smallest of it."""

import math

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from ditto_core.errors import UsageError
from ditto_core.profile import Range, ShapeProfile
from pytest_ditto.strategies import activations, lengths, prompts, shapes, specials, token_batches, token_ids

QUIET = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
PROFILE = ShapeProfile.parse({"batch": (1, 2, 4), "length": (2, 8, 31), "past": (0, 5, 16)})


class WordTokenizer:
    """A stand-in for a tokenizer: token i is the word ``wi``; token 0 is special."""

    all_special_ids = (0,)

    def __len__(self):
        return 50

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)

    def __call__(self, text):
        return {"input_ids": [int(word[1:]) for word in text.split()]}


@QUIET
@given(token_ids(10, min_length=2, max_length=5, exclude=[0, 3]), token_batches(7, max_rows=3, max_length=4))
def test_token_ids_stay_inside_the_vocabulary_and_the_lengths(ids, batch):
    assert 2 <= len(ids) <= 5
    assert set(ids) <= {1, 2, 4, 5, 6, 7, 8, 9}
    assert 1 <= len(batch) <= 3
    assert all(1 <= len(row) <= 4 and max(row) < 7 for row in batch)


@QUIET
@given(prompts(WordTokenizer(), min_tokens=2, max_tokens=4))
def test_prompts_are_text_of_the_tokenizers_words(text):
    words = text.split()
    assert 2 <= len(words) <= 4
    assert "w0" not in words


@QUIET
@given(shapes(PROFILE), lengths(Range(3, 3, 3)))
def test_sizes_are_inside_the_profile(shape, only):
    PROFILE.check(*shape)
    assert only == 3


@pytest.mark.parametrize("size", [2, 8, 31])
def test_the_edges_of_a_range_come_up(size):
    assert find(lengths(PROFILE.length), lambda n: n == size, settings=QUIET) == size


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_every_kind_of_special_value_survives_its_dtype(dtype):
    kind = getattr(torch, dtype)
    values = torch.tensor(specials(kind, nan=True, infinity=True), dtype=torch.float64).to(kind)
    tiny = torch.finfo(kind).tiny
    assert int(values.isnan().sum()) == 1
    assert sorted(values[values.isinf()].tolist()) == [-math.inf, math.inf]
    assert int(((values != 0) & (values.abs() < tiny)).sum()) == 3
    assert int(((values == 0) & values.signbit()).sum()) == 1
    assert values.abs().nan_to_num(0, 0, 0).max() == torch.finfo(kind).max


@QUIET
@given(activations((2, 3), "float16"))
def test_nan_and_infinity_are_drawn_on_request_only(tensor):
    assert tensor.shape == (2, 3)
    assert tensor.dtype == torch.float16
    assert tensor.isfinite().all()


def test_an_activation_shrinks_to_zeros_with_the_one_value_that_matters():
    found = find(activations((4,), nan=True), lambda t: bool(t.isnan().any()), settings=QUIET)
    assert int(found.isnan().sum()) == 1
    assert found[~found.isnan()].tolist() == [0.0] * 3


def test_a_prompt_shrinks_to_the_shortest_one():
    assert find(token_ids(100), lambda ids: len(ids) >= 7, settings=QUIET) == [0] * 7
    assert find(token_batches(100), lambda rows: any(9 in row for row in rows), settings=QUIET) == [[9]]


def test_what_cannot_be_drawn_is_refused():
    for wrong in (lambda: token_ids(2, exclude=[0, 1]), lambda: token_ids(5, min_length=3, max_length=2)):
        with pytest.raises(UsageError):
            wrong()
    with pytest.raises(UsageError, match="no element"):
        activations((0, 3))
    assert isinstance(activations((1,)), st.SearchStrategy)
