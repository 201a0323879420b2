"""Caches on tensors made by hand: from which number on a rule speaks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ditto_core.causes import FIRST
from ditto_core.causes.cache import read_back
from ditto_core.causes.evidence import Evidence, first_cause

KEYS, VALUES, BELOW = "layers.1.attn:k_states", "layers.1.attn:v_states", "layers.0.attn:k_states"
T = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [2.0, 5.0], [7.0, -4.0]], dtype=torch.float64)
"""Keys of four tokens; no two are multiples of each other."""


def evidence(site, actual, expected, *, bound=1e-9, root=None, captured=(), past=(), mask=None, dtype="float32"):
    inputs = {} if mask is None else {"attention_mask": mask, "input_ids": mask[:, -1:]}
    return Evidence(
        site,
        0,
        actual,
        None,
        inputs,
        dict(captured),
        bound,
        bound / 4,
        expected,
        root or nn.Module(),
        site.partition(":")[0],
        dtype,
        site.endswith("states"),
        dict(past),
    )


def cache(found):
    """What the rules of caches name, in their order."""
    return first_cause(found, FIRST)


def test_the_cache_holds_what_the_mask_counts_and_the_step_does_not_bring():
    assert step([T[:3]], [T[:3]]).past_length == 3
    found = step([T[:3]], [T[:3]])
    assert evidence("site", T, T).past_length == 0
    assert Evidence(**{**vars(found), "inputs": {"attention_mask": torch.ones(1, 4)}}).past_length == 0


def step(past, seen, *, site=KEYS, others=(), new=(9.0, 8.0), expected_new=(9.0, 8.0), **fields):
    """A decoding step after tokens ``past`` [row, token, 2], which come back as ``seen``."""
    past, seen = (torch.stack(list(side)) for side in (past, seen))

    def with_new(cached, entry):
        last = torch.tensor(entry, dtype=torch.float64).expand(len(cached), 1, 1, 2)
        return torch.cat([cached.unsqueeze(1), last], 2)

    mask = torch.ones(len(past), past.shape[1] + 1, dtype=torch.int64)
    caches = {site: past.unsqueeze(1), **dict(others)}
    return evidence(site, with_new(seen, new), with_new(past, expected_new), mask=mask, past=caches, **fields)


def kind_of(found):
    return None if found is None else found.kind


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ([3, 0, 1], "stale KV cache"),  # each place holds the token before
        ([1, 2, 2], None),  # each place holds the token after
        ([0, 1, 1], "stale KV cache"),  # the last is a copy of the one before it
        ([0, 0, 2], None),  # another one is
        ([0, 1, 0], None),
        ([0, 1, 2], None),
    ],
)
def test_a_stale_cache_lags_behind_and_does_not_run_ahead(seen, kind):
    assert kind_of(read_back(step([T[:3]], [T[seen]]))) == kind


@pytest.mark.parametrize(("error", "kind"), [(0.7e-6, "stale KV cache"), (1.1e-6, None)])
def test_a_copied_token_is_copied_to_the_last_digits(error, kind):
    """The tolerance is 1e-6 of the whole past."""
    seen = T[[0, 1, 1]].clone()
    seen[2, 0] += error * float(T[:3].norm())
    assert kind_of(read_back(step([T[:3]], [seen]))) == kind


@pytest.mark.parametrize(("error", "kind"), [(0.09, "stale KV cache"), (0.11, None)])
def test_shifted_tokens_may_be_as_far_off_as_the_site(error, kind):
    past = torch.ones(1, 4, 2, dtype=torch.float64).cumsum(1)
    seen = past.roll(1, 1) * (1 + error)
    assert kind_of(read_back(step(past, seen, bound=0.1))) == kind


def test_a_past_of_one_token_cannot_be_shifted():
    assert read_back(step([T[:1]], [T[1:2]])) is None


def test_rows_that_read_each_others_caches_are_named():
    found = read_back(step([T[:2], T[2:]], [T[2:], T[:2]]))
    assert found.kind == "KV cache of another row"
    assert "[1, 0]" in found.evidence[0]
    assert read_back(step([T[:2], T[2:]], [T[2:], 2 * T[:2]])) is None


@pytest.mark.parametrize(
    ("site", "kind"), [(VALUES, "keys and values exchanged"), (BELOW, "KV cache of another layer")]
)
def test_the_cache_of_another_tensor_is_named(site, kind):
    others = {site: T[2:].reshape(1, 1, 2, 2)}
    assert read_back(step([T[:2]], [T[2:]], others=others)).kind == kind


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda past: 1.5 * past, "KV cache scale"),
        (lambda past: -past, "KV cache scale"),
        (lambda past: 0 * past, "KV cache lost"),
        (lambda past: (past * 1.001).half().double(), None),
        (lambda past: past.bfloat16().double(), "narrow cast"),
        (lambda past: past, None),
    ],
)
def test_a_past_that_comes_back_changed_is_named(change, kind):
    past = torch.linspace(0.11, 3.7, 8, dtype=torch.float64).reshape(1, 4, 2).square()
    assert kind_of(cache(step(past, change(past)))) == kind


def test_a_new_entry_that_repeats_the_last_is_stale():
    assert cache(step([T[:2]], [T[:2]], new=tuple(T[1].tolist()))).kind == "stale KV cache"
    assert cache(step([T[:2]], [T[:2]], new=tuple(T[0].tolist()))) is None


def test_other_sites_are_no_cache():
    assert cache(evidence("layers.0", T, 2 * T)) is None
