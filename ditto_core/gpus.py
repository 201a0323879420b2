"""One GPU a process, where several processes of this machine run engines at once."""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any

from ditto_core.errors import UsageError, nearest

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them: those of that variable where
    it is set, else all that NVML counts. CUDA is not initialized: it would not look at the variable again.
    """
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(i) for i in range(installed_gpus())]


def installed_gpus() -> int:
    """Return the number of GPUs as NVML counts them, 0 without NVIDIA's driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0:
        return 0
    found = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    nvml.nvmlShutdown()
    return count.value if found else 0


def pin_gpu(number: int) -> None:
    """Leave this process one of several GPUs: the ``number``-th, counted around. To be called before CUDA is used."""
    gpus = visible_gpus()
    if len(gpus) > 1:
        os.environ[VISIBLE] = gpus[number % len(gpus)]


def pin_next_gpu(started: Any) -> None:
    """Pin a process of a pool; ``started`` is a number that its processes share."""
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    pin_gpu(number)


def check_device(name: str) -> None:
    """Raise :class:`UsageError` for what is neither ``cpu`` nor a GPU, and for a GPU that is not there."""
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise UsageError(f"device is {name!r}, expected cpu, cuda or cuda:1{nearest(str(name), ('cpu', 'cuda'))}")
    if name == "cpu":
        return
    if not torch.cuda.is_available():
        reason = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise UsageError(f"device {name!r} needs a GPU, but torch {torch.__version__} {reason}; expected cpu")
    if (torch.device(name).index or 0) >= torch.cuda.device_count():
        seen = os.environ.get(VISIBLE)
        why = "" if seen is None else f"; {VISIBLE} is {seen!r} (each of several processes gets one GPU: say cuda)"
        count = torch.cuda.device_count()
        raise UsageError(f"device {name!r} is not there: torch finds {count} GPUs, from cuda:0 on{why}")
