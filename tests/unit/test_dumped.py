"""A dump of another tool in the reference's place: each of its tensors is one tap, under one name map."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ditto_core.backends.dumped import open_dumped
from ditto_core.errors import RunError, TraceError, UsageError
from ditto_core.sites import Tap
from tests.unit.saved import safetensors

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


def test_a_step_file_of_a_trace_has_its_outputs_and_inputs(tmp_path):
    tensors = {"output:logits": torch.ones(1, 3, 4), "input:input_ids": torch.tensor([[1, 2, 3]])}
    dump = safetensors(tmp_path / "step0.safetensors", **tensors)
    outputs = open_dumped(dump, TAPS).step({"input_ids": torch.tensor([[1, 2, 3]])}, lambda site, tensor: None)
    assert torch.equal(outputs["logits"], torch.ones(1, 3, 4))
    with pytest.raises(RunError, match=r"other inputs: step 0, input_ids\[0, 1\] is 5, recorded was 2"):
        open_dumped(dump, TAPS).step({"input_ids": torch.tensor([[1, 5, 3]])}, lambda site, tensor: None)


def test_two_name_maps_in_a_dumps_folder_are_refused(folder):
    for name in ("names.json", "names.toml"):
        (folder / name).write_text("{}" if name.endswith("json") else "")
    with pytest.raises(UsageError, match=r"names\.json and names\.toml, expected one: remove one"):
        open_dumped(folder, TAPS)
    assert open_dumped(folder, TAPS, {"lm_head": "logits"}).taps == TAPS[:1]


def test_a_step_that_a_dump_lacks_is_no_step_of_a_reference(tmp_path):
    """What follows it was replayed in its place."""
    for step in (0, 2):
        np.save(tmp_path / f"lm_head-step{step}.npy", np.full((1, 3, 4), step, np.float32))
    session = open_dumped(tmp_path, TAPS)
    session.step({}, lambda site, tensor: None)
    with pytest.raises(TraceError, match="holds nothing of step 1"):
        session.step({}, lambda site, tensor: None)
    (tmp_path / "lm_head-step0.npy").unlink()
    with pytest.raises(TraceError, match="holds nothing of step 0"):
        open_dumped(tmp_path, TAPS)
