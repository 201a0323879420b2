import os
from contextlib import contextmanager

import pytest
import torch

from ditto_core.backends.tensorrt.session import CudaStreams
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import UsageError
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from ditto_core.system.gpus import check_device, installed_gpus, pin_gpu, visible_gpus


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
        Pair(Workspace(), EngineSpec.of("nowhere"), PairOptions(device="cuda"))
    check_device("cpu")


def test_a_gpu_that_another_process_has_is_said_to_be_out_of_sight(monkeypatch):
    """Two workers, two GPUs, and ``cuda:1`` in the options: each worker sees one, as ``cuda:0``."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    pin_gpu(1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_device("cuda")
    with pytest.raises(UsageError, match=r"finds 1 GPUs, .*CUDA_VISIBLE_DEVICES is '5' .*: say cuda\)$"):
        check_device("cuda:1")


def test_an_engine_runs_on_its_own_gpu_whichever_is_the_callers(monkeypatch):
    """A stand-in for torch's streams: which device is current while the engine runs, and who waits for whom."""
    current, waits = [0], []

    class StreamStandIn:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            waits.append((self, other))

    @contextmanager
    def entered(what):
        before, current[0] = current[0], getattr(what, "device", what).index
        yield
        current[0] = before

    device = torch.device("cuda", 1)
    default, side = StreamStandIn(device), StreamStandIn(device)
    fakes = {"Stream": StreamStandIn, "stream": entered, "device": entered, "default_stream": lambda device: default}
    for name, fake in fakes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    for callers in (default, side):
        monkeypatch.setattr("torch.cuda.current_stream", lambda device, found=callers: found)
        streams = CudaStreams(device)
        waits.clear()
        with streams.use() as stream:
            assert current == [1]
            assert (stream is side) == (callers is side)
        assert current == [0]
        assert waits == ([(stream, default), (default, stream)] if callers is default else [])
