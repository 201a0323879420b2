"""One GPU a process, where several processes of this machine run engines at once."""

from __future__ import annotations

import ctypes
import os
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
    """Raise :class:`UsageError` for a name that is no device of torch's, and for a GPU that is not there."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        known = ("cpu", "cuda", "cuda:0", "mps", "xpu")
        raise UsageError(f"{name!r} is no torch device, expected cpu, cuda or cuda:1{nearest(name, known)}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise UsageError(f"device {name!r} needs a GPU, but torch {torch.__version__} {reason}; expected cpu")
