import os

import pytest
import torch

from ditto_core.errors import UsageError
from ditto_core.gpus import check_device, installed_gpus, pin_gpu, visible_gpus
from ditto_core.options import PairOptions
from ditto_core.pair import Pair


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


@pytest.mark.parametrize("name", ["tpu", "", "gpu 0", "mps", "cpu:3", None])
def test_a_name_that_is_no_device_is_one_line(name):
    with pytest.raises(UsageError, match=r"device is .*, expected cpu, cuda or cuda:1") as caught:
        check_device(name)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_before_anything_is_built():
    with pytest.raises(UsageError, match=r"device 'cuda' needs a GPU, but torch .* expected cpu"):
        Pair(None, None, PairOptions(device="cuda"))
    check_device("cpu")
