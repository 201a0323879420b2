"""``tllm_debug`` folders. TensorRT-LLM cannot be installed here: these are made by its documented layouts."""

import numpy as np
import pytest
import torch

from ditto_core.compare.dumps import compare_dumps
from ditto_core.dumps import open_dump
from ditto_core.errors import TraceError, UsageError
from ditto_core.stepping.dumps import compare_offline


def made_by_hand_python_runtime(root, ranks=("PP_0/TP_0",), steps=(0, 1)):
    """``{name with / as .}-step{n}.npy`` beside a ``.txt``, everything as float32."""
    for r, rank in enumerate(ranks):
        folder = root / "tllm_debug" / rank
        folder.mkdir(parents=True)
        for step in steps:
            for name, value in (("transformer.layers.10.mlp", 10), ("transformer.layers.2.mlp", 2), ("input_ids", 7)):
                array = np.full((4, 3), value + 100 * r + 1000 * step, np.float32)
                np.save(folder / f"{name}-step{step}.npy", array)
                np.savetxt(folder / f"{name}-step{step}.txt", array)
    return root


def made_by_hand_cpp_executor(root, rank="PP_1/TP_1", iterations=(1, 2, 10)):
    """``iteration_{n}/{name}.npy`` with native dtypes; slashes in a name make folders."""
    for n in iterations:
        folder = root / "tllm_debug" / rank / f"iteration_{n}"
        (folder / "transformer/layers").mkdir(parents=True)
        np.save(folder / "transformer/layers/0.npy", np.full((4, 3), n, np.float16))
        np.save(folder / "request_ids.npy", np.array([n], np.int64))
    return root


def test_the_python_runtimes_steps_and_names(tmp_path):
    dump = open_dump(made_by_hand_python_runtime(tmp_path))
    assert (dump.format, dump.steps, dump.notes) == ("trtllm", 2, ())
    assert dump.names(0) == ["input_ids", "transformer.layers.2.mlp", "transformer.layers.10.mlp"]
    assert dump.load(1, "transformer.layers.10.mlp").unique().tolist() == [1010.0]
    assert dump.info["layout"] == "Python runtime"
    assert dump.info["rank"] == "PP_0/TP_0"


def test_steps_come_in_the_order_of_their_numbers(tmp_path):
    steps = (10, 3, 7, 0, 9, 1, 5, 2, 8, 4, 6, 11)
    dump = open_dump(made_by_hand_python_runtime(tmp_path, steps=steps))
    assert [dump.load(i, "input_ids")[0, 0] for i in range(12)] == [7.0 + 1000 * i for i in range(12)]


@pytest.mark.parametrize("below", ["", "tllm_debug", "tllm_debug/PP_0/TP_0"])
def test_the_folder_above_the_folder_and_a_ranks_folder_open(tmp_path, below):
    assert open_dump(made_by_hand_python_runtime(tmp_path) / below).steps == 2


def test_ranks_are_numbered_as_tensorrt_llm_does_and_the_default_is_said(tmp_path):
    ranks = ("PP_0/TP_0", "PP_0/TP_1", "PP_1/TP_0", "PP_1/TP_1")
    root = made_by_hand_python_runtime(tmp_path, ranks)
    dump = open_dump(root)
    assert "holds 4 ranks (PP_0/TP_0, PP_0/TP_1, PP_1/TP_0, PP_1/TP_1); compared is PP_0/TP_0" in dump.notes[0]
    for number, place in enumerate(ranks):
        for rank in (number, place):
            chosen = open_dump(root, rank=rank)
            assert chosen.notes == ()
            assert chosen.load(0, "input_ids").unique().tolist() == [7.0 + 100 * number]
    with pytest.raises(UsageError, match=r"has no rank 4, it holds 4: PP_0/TP_0"):
        open_dump(root, rank=4)


def test_context_parallel_ranks_come_between_pipeline_and_tensor(tmp_path):
    ranks = ("PP_0/TP_0/CP_0", "PP_0/TP_1/CP_0", "PP_0/TP_0/CP_1", "PP_0/TP_1/CP_1")
    root = made_by_hand_python_runtime(tmp_path, ranks)
    assert open_dump(root).info["ranks"] == ", ".join(ranks)
    assert open_dump(root, rank=2).load(0, "input_ids").unique().tolist() == [207.0]


def test_the_cpp_executors_iterations_and_names_with_slashes(tmp_path):
    dump = open_dump(made_by_hand_cpp_executor(tmp_path))
    assert dump.names(0) == ["request_ids", "transformer/layers/0"]
    tensors = {step: dump.load(step, "transformer/layers/0") for step in range(dump.steps) if dump.names(step)}
    assert {step: t.unique().tolist() for step, t in tensors.items()} == {0: [1.0], 1: [2.0], 9: [10.0]}
    assert tensors[0].dtype == torch.float16
    assert (dump.first, dump.steps) == (1, 10)
    assert dump.notes == (f"{tmp_path} lacks steps 3, 4, 5, 6, 7 and 2 more of 1 to 10",)


def test_several_ranks_of_the_cpp_executor_wrote_over_each_other_and_that_is_said(tmp_path):
    dump = open_dump(made_by_hand_cpp_executor(tmp_path, rank="PP_1/TP_2", iterations=(0, 1)))
    (note,) = dump.notes
    assert "names sizes, not ranks (PP_1/TP_2): the ranks of this job wrote over each other" in note


def test_a_tllm_dump_compares_with_a_models_names(tmp_path):
    made_by_hand_python_runtime(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for i in (2, 10):
        np.save(tmp_path / f"b/model.layers.{i}.mlp.npy", np.full((4, 3), i, np.float32))
    pairs = compare_dumps(tmp_path / "a", tmp_path / "b", name_map={"transformer.{rest:**}": "model.{rest}"})
    assert [(p.name, torch.equal(p.actual, p.expected)) for p in pairs.pairs()] == [
        ("model.layers.2.mlp", True),
        ("model.layers.10.mlp", True),
    ]
    assert (pairs.only_actual(), pairs.steps) == ([(0, "input_ids")], (2, 1))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_step_is_said_and_those_after_it_are_compared_with_their_own(tmp_path, lost):
    """By their places, step 2 of the one stood beside step 1 of the other, and was blamed."""
    made_by_hand_python_runtime(tmp_path / "a", steps=[step for step in range(4) if step != lost])
    made_by_hand_python_runtime(tmp_path / "b", steps=range(4))
    for pair in ("ab", "ba"):
        pairs = compare_dumps(*(tmp_path / name for name in pair))
        found = compare_offline(pairs)
        assert not found
        assert found.first_bad is None
        assert {result.step for result in found.results} == {0, 1, 2, 3} - {lost}
        assert dict(found.missing) == {"steps": f"{tmp_path / 'a'} holds nothing of step {lost}"}
        assert compare_offline(pairs, ignore_missing=True)
    with pytest.raises(TraceError, match="holds steps 0 to 99999999, 2 in all: too far apart"):
        open_dump(made_by_hand_python_runtime(tmp_path / "far", steps=(0, 99999999)))


def test_iterations_are_compared_by_their_numbers_as_far_as_both_have_any(tmp_path):
    """The executor keeps the last iterations; a second run of it may number its own from elsewhere."""
    whole = made_by_hand_cpp_executor(tmp_path / "whole", iterations=(1, 2, 3))
    late = made_by_hand_cpp_executor(tmp_path / "late", iterations=(2, 3))
    found = compare_offline(compare_dumps(late, whole))
    assert found.first_bad is None
    assert dict(found.missing) == {"steps": f"{late} holds nothing of step 0"}
    assert f"{late} numbers its steps from 1: here it is 0" in found.notes
    again = compare_dumps(made_by_hand_cpp_executor(tmp_path / "again", iterations=(4, 5, 6)), whole)
    assert (again.steps, again.lost_steps()) == ((3, 3), ([], []))
    assert [dump.first for dump in (again.actual, again.expected)] == [4, 1]


def test_a_tensor_or_an_iteration_that_is_there_twice_is_refused_since_either_may_be_meant(tmp_path):
    rank = made_by_hand_python_runtime(tmp_path / "python") / "tllm_debug/PP_0/TP_0"
    np.save(rank / "input_ids-step01.npy", np.zeros(3, np.float32))
    with pytest.raises(TraceError, match="TP_0 holds two tensors that are named 'input_ids-step1'"):
        open_dump(rank)
    rank = made_by_hand_cpp_executor(tmp_path / "cpp") / "tllm_debug/PP_1/TP_1"
    (rank / "iteration_02").mkdir()
    with pytest.raises(TraceError, match="TP_1 holds two iterations that are named 'iteration_2'"):
        open_dump(rank)


def test_both_layouts_in_one_folder_are_refused_and_files_of_neither_are_said(tmp_path):
    rank = made_by_hand_python_runtime(tmp_path) / "tllm_debug/PP_0/TP_0"
    np.save(rank / "logits.npy", np.zeros(3, np.float32))
    (rank / "iteration_3").write_text("a file, and no iteration")
    assert open_dump(rank).notes == (f"{rank} holds other files, which are not read: logits.npy",)
    (rank / "iteration_4").mkdir()
    with pytest.raises(TraceError, match=r"holds steps of the Python runtime and iterations of the C\+\+ executor"):
        open_dump(rank)
