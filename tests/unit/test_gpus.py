import os

import pytest

from ditto_core.gpus import installed_gpus, pin_gpu, visible_gpus


@pytest.mark.parametrize(("number", "left"), [(0, "2"), (1, "GPU-5f"), (2, "2")])
def test_a_process_keeps_one_gpu_of_those_it_may_use(monkeypatch, number, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-5f")
    pin_gpu(number)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


@pytest.mark.parametrize("given", ["", "3", "GPU-5f"])
def test_one_gpu_or_none_is_left_as_it_is(monkeypatch, given):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    pin_gpu(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == given


def test_without_the_variable_all_that_the_driver_counts_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == [str(i) for i in range(installed_gpus())]
