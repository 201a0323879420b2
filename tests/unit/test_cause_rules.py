"""Causes on tensors made by hand: which candidates explain an error, and from which number on a rule speaks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ditto_core.causes.base import Evidence
from ditto_core.causes.cache import cache, past_stale
from ditto_core.compare.blame import Blame
from ditto_core.compare.metrics import measure
from ditto_core.sites import Tap

KEYS, VALUES, BELOW = "layers.1.attn:k_states", "layers.1.attn:v_states", "layers.0.attn:k_states"
T = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [2.0, 5.0], [7.0, -4.0]], dtype=torch.float64)
"""Keys of four tokens; no two are multiples of each other."""


def evidence(site, actual, expected, *, bound=1e-9, root=None, captured=(), past=(), mask=None, dtype="float32"):
    blame = Blame(site, site.partition(":")[0], "", "", 0, (0,), 1.0, bound / 4, bound)
    tap = Tap(site, f"present.{site}" if site.endswith("states") else site)
    inputs = {} if mask is None else {"attention_mask": mask, "input_ids": mask[:, -1:]}
    root = root or nn.Module()
    numbers = measure(actual, expected)
    return Evidence(blame, tap, actual, expected, None, root, dtype, inputs, dict(captured), dict(past), numbers)


def off_by(tensor, distance):
    """Return a tensor against which the other's rel-L2 is ``distance``."""
    return tensor / (1 + distance)


@pytest.mark.parametrize(
    ("bound", "now", "share", "most"),
    [
        (0.05, 0.4, None, 0.04),  # a tenth of the error
        (0.03, 0.4, None, 0.03),  # the local bound
        (1e-9, 0.4, 0.75, 0.1),  # a quarter of the error, whatever the bound
        (1e-9, 3.0, 0.75, 0.25),  # an error beyond 1 counts as 1
    ],
)
def test_a_candidate_explains_down_to_what_it_may_leave(bound, now, share, most):
    actual = T.clone()
    found = evidence("site", actual, off_by(actual, now), bound=bound)
    assert found.explains(off_by(actual, 0.99 * most), share)
    assert not found.explains(off_by(actual, 1.01 * most), share)


def test_a_candidate_of_another_shape_or_none_explains_nothing():
    found = evidence("site", T, 2 * T, bound=1.0)
    assert not found.explains(None)
    assert not found.explains(T[:, :1])
    assert found.explains(T)


@pytest.mark.parametrize(("distance", "confidence"), [(0.039, 0.99), (0.041, 0.9)])
def test_what_is_left_within_the_local_bound_is_surer(distance, confidence):
    assert evidence("site", T, 2 * T, bound=0.04).confidence(off_by(T, distance)) == confidence


def test_zeros_are_infinitely_far_from_all_but_zeros():
    found = evidence("site", T, 2 * T)
    assert found.distance(0 * T) == math.inf
    assert found.distance_between(0 * T, 0 * T) == 0


def test_the_cache_holds_what_the_mask_counts_and_the_step_does_not_bring():
    assert step([T[:3]], [T[:3]]).past_length == 3
    found = step([T[:3]], [T[:3]])
    assert evidence("site", T, T).past_length == 0
    assert Evidence(**{**vars(found), "inputs": {"attention_mask": torch.ones(1, 4)}}).past_length == 0


def test_padding_is_no_evidence():
    valid = torch.tensor([[True], [True], [True], [False]])
    padded = torch.cat([T[:3], torch.full((1, 2), 99.0, dtype=torch.float64)])
    found = evidence("site", T, 2 * T, bound=0.1)
    assert not found.explains(padded)
    assert Evidence(**{**vars(found), "valid": valid}).explains(padded)


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
    assert kind_of(past_stale(step([T[:3]], [T[seen]]))) == kind


@pytest.mark.parametrize(("error", "kind"), [(0.9e-6, "stale KV cache"), (1.1e-6, None)])
def test_a_copied_token_is_copied_to_the_last_digits(error, kind):
    """The tolerance is 1e-6 of the whole past."""
    seen = T[[0, 1, 1]].clone()
    seen[2, 0] += error * float(T[:3].norm())
    assert kind_of(past_stale(step([T[:3]], [seen]))) == kind


@pytest.mark.parametrize(("error", "kind"), [(0.09, "stale KV cache"), (0.11, None)])
def test_shifted_tokens_may_be_as_far_off_as_the_site(error, kind):
    past = torch.ones(1, 4, 2, dtype=torch.float64).cumsum(1)
    seen = past.roll(1, 1) * (1 + error)
    assert kind_of(past_stale(step(past, seen, bound=0.1))) == kind


def test_a_past_of_one_token_cannot_be_shifted():
    assert past_stale(step([T[:1]], [T[1:2]])) is None


def test_rows_that_read_each_others_caches_are_named():
    found = past_stale(step([T[:2], T[2:]], [T[2:], T[:2]]))
    assert found.kind == "KV cache of another row"
    assert "[1, 0]" in found.evidence[0]
    assert past_stale(step([T[:2], T[2:]], [T[2:], 2 * T[:2]])) is None


@pytest.mark.parametrize(
    ("site", "kind"), [(VALUES, "keys and values exchanged"), (BELOW, "KV cache of another layer")]
)
def test_the_cache_of_another_tensor_is_named(site, kind):
    others = {site: T[2:].reshape(1, 1, 2, 2)}
    assert past_stale(step([T[:2]], [T[2:]], others=others)).kind == kind


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
