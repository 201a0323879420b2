"""A dump of another tool in the reference's place: each of its tensors is one tap, under one name map."""

from __future__ import annotations

import numpy as np
import pytest

from ditto_core.backends.dumped import open_dumped
from ditto_core.errors import TraceError, UsageError
from ditto_core.sites import Tap

TAPS = (Tap("lm_head", "logits", axes=("batch", "length", "")), Tap("model.norm", "norm"))


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "lm_head.npy", np.zeros((1, 3, 4), np.float32))
    return tmp_path


def test_two_different_tensors_of_one_tap_are_refused_since_either_may_be_meant(folder):
    np.save(folder / "logits.npy", np.ones((1, 3, 4), np.float32))
    with pytest.raises(TraceError, match="'lm_head' and 'logits' are both lm_head: ignore one in a name map"):
        open_dumped(folder, TAPS)
    (folder / "names.toml").write_text('ignore = ["logits"]')
    given = []
    open_dumped(folder, TAPS).step({}, lambda site, tensor: given.append((site, tensor.mean().item())))
    assert given == [("lm_head", 0.0)]


def test_a_tensor_that_is_there_under_both_names_is_one(folder):
    np.save(folder / "logits.npy", np.zeros((1, 3, 4), np.float32))
    given = []
    open_dumped(folder, TAPS).step({}, lambda site, tensor: given.append(site))
    assert given == ["lm_head"]


def test_two_name_maps_in_a_dumps_folder_are_refused(folder):
    for name in ("names.json", "names.toml"):
        (folder / name).write_text("{}" if name.endswith("json") else "")
    with pytest.raises(UsageError, match=r"names\.json and names\.toml, expected one: remove one"):
        open_dumped(folder, TAPS)
    assert open_dumped(folder, TAPS, {"lm_head": "logits"}).taps == TAPS[:1]
