"""Dumps of several ranks: shares are joined, copies must agree, a rank that disagrees is named."""

import numpy as np
import pytest
import torch

from ditto_core.backends.trtllm.ranks import Layout, merge, open_merged, renumbered
from ditto_core.errors import TraceError, UsageError

LAYOUT = Layout(heads=4, kv_heads=2)


def ranks(**tensors):
    """Make ``PP_0/TP_i -> name -> tensor`` from lists of one tensor a rank; __ stands for a dot."""
    count = len(next(iter(tensors.values())))
    values = {name.replace("__", "."): [torch.tensor(t) for t in each] for name, each in tensors.items()}
    return {f"PP_0/TP_{i}": {name: each[i] for name, each in values.items()} for i in range(count)}


def test_column_parallel_shares_are_joined_along_the_features():
    merged = merge(ranks(layers__0__mlp__fc=[[[1.0, 2.0]], [[3.0, 4.0]]], lm_head=[[[1.0]], [[2.0]]]), LAYOUT)
    assert merged.tensors["layers.0.mlp.fc"].tolist() == [[1, 2, 3, 4]]
    assert merged.tensors["lm_head"].tolist() == [[1, 2]]
    assert merged.disagreements == []


def test_the_joint_projection_is_joined_part_by_part():
    # 4 heads of queries and 2 of keys, one feature each: a rank holds 2 + 1 + 1
    merged = merge(ranks(a__attention__qkv=[[[1.0, 2.0, 11.0, 21.0]], [[3.0, 4.0, 12.0, 22.0]]]), LAYOUT)
    assert merged.tensors["a.attention.qkv"].tolist() == [[1, 2, 3, 4, 11, 12, 21, 22]]


def test_repeated_heads_of_keys_are_kept_once():
    # 4 ranks share 2 heads of keys: ranks 0 and 1 hold the first, 2 and 3 the second
    parts = [[[float(i), 10.0 + i // 2, 20.0 + i // 2]] for i in range(4)]
    assert merge(ranks(a__attention__qkv=parts), LAYOUT).tensors["a.attention.qkv"].tolist() == [
        [0, 1, 2, 3, 10, 11, 20, 21]
    ]


def test_joint_gate_and_up_are_joined_half_by_half():
    merged = merge(ranks(m__gate_up_proj=[[[1.0, 11.0]], [[2.0, 12.0]]]), LAYOUT)
    assert merged.tensors["m.gate_up_proj"].tolist() == [[1, 2, 11, 12]]


def test_a_gathered_output_head_is_not_joined_again():
    layout = Layout(4, 2, gathered=("logits",))
    assert merge(ranks(logits=[[[1.0, 2.0]], [[1.0, 2.0]]]), layout).tensors["logits"].tolist() == [[1, 2]]


def test_the_rank_that_disagrees_is_named():
    parts = [[[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.5]], [[1.0, 2.0]]]
    merged = merge(ranks(layers__0__mlp__proj=parts), LAYOUT)
    assert merged.tensors["layers.0.mlp.proj"].tolist() == [[1, 2]]
    (found,) = merged.disagreements
    assert str(found) == (
        "PP_0/TP_2 disagrees at layers.0.mlp.proj: max abs difference 5.0e-01 to PP_0/TP_0, PP_0/TP_1, PP_0/TP_3"
    )


def test_ranks_that_hold_the_same_nan_agree_and_a_lone_nan_does_not():
    nan = float("nan")
    assert merge(ranks(x=[[nan, 1.0], [nan, 1.0]]), LAYOUT).disagreements == []
    (found,) = merge(ranks(x=[[1.0], [1.0], [nan]]), LAYOUT).disagreements
    assert (found.rank, found.largest) == ("PP_0/TP_2", float("inf"))


def test_inputs_of_column_parallel_modules_are_copies():
    merged = merge({"PP_0/TP_0": {"mlp.fc:in": torch.ones(2)}, "PP_0/TP_1": {"mlp.fc:in": torch.ones(2)}}, LAYOUT)
    assert merged.tensors["mlp.fc:in"].shape == (2,)


@pytest.mark.parametrize(
    ("stage", "local", "whole"),
    [(0, 2, 2), (1, 0, 3), (1, 1, 4), (2, 1, 6)],  # 7 layers over 3 ranks: 3, 2, 2
)
def test_layers_of_a_pipeline_rank_are_numbered_over_the_whole_model(stage, local, whole):
    assert renumbered(f"transformer.layers.{local}.mlp", stage, 3, 7) == f"transformer.layers.{whole}.mlp"
    assert renumbered(f"transformer.layers.{local}.mlp", stage, 3, 0) == f"transformer.layers.{local}.mlp"


def test_pipeline_ranks_contribute_their_own_layers():
    step = {"PP_0/TP_0": {"layers.0.mlp": torch.zeros(1)}, "PP_1/TP_0": {"layers.0.mlp": torch.ones(1)}}
    merged = merge(step, Layout(4, 2, layers=2))
    assert {name: t.item() for name, t in merged.tensors.items()} == {"layers.0.mlp": 0, "layers.1.mlp": 1}


def test_ranks_with_different_names_or_shapes_are_an_error():
    with pytest.raises(TraceError, match=r"PP_0/TP_0 and PP_0/TP_1 do not hold the same tensors: .*'b'"):
        merge({"PP_0/TP_0": {"a": torch.zeros(1)}, "PP_0/TP_1": {"a": torch.zeros(1), "b": torch.zeros(1)}}, LAYOUT)
    with pytest.raises(TraceError, match=r"'a' has not one shape on all ranks: PP_0/TP_0 \[1\], PP_0/TP_1 \[2\]"):
        merge({"PP_0/TP_0": {"a": torch.zeros(1)}, "PP_0/TP_1": {"a": torch.zeros(2)}}, LAYOUT)


def test_heads_that_do_not_fit_are_an_error():
    with pytest.raises(UsageError, match="5 features on each of 2 ranks do not fit 4 query and 2 key heads"):
        merge(ranks(a__attention__qkv=[[[0.0] * 5], [[0.0] * 5]]), LAYOUT)


def test_a_tllm_debug_folder_opens_as_one_dump(tmp_path):
    for rank, proj in ((0, [1.0, 2.0]), (1, [1.0, 2.25])):
        folder = tmp_path / "tllm_debug" / "PP_0" / f"TP_{rank}"
        folder.mkdir(parents=True)
        for step in range(2):
            np.save(folder / f"transformer.layers.0.mlp.fc-step{step}.npy", np.float32([[10 * rank + step]]))
            np.save(
                folder / f"transformer.layers.0.mlp.proj-step{step}.npy", np.float32([proj if step else [1.0, 2.0]])
            )
    dump, found = open_merged(tmp_path, LAYOUT)
    assert (dump.steps, dump.load(1, "transformer.layers.0.mlp.fc").tolist()) == (2, [[1, 11]])
    assert [(f.rank, f.largest) for f in found] == [("PP_0/TP_1", 0.25)]
    assert dump.notes == tuple(map(str, found))
