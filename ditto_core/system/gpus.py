"""The GPUs of this machine: what the driver says of them without loading torch, and one for each process."""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
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
        raise UsageError(f"device {name!r} does not exist: torch finds {count} GPUs, from cuda:0 on{why}")


def driver_library() -> Any:
    """Return ``libcuda`` after ``cuInit``, or None without a usable driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def describe_gpu() -> dict[str, str]:
    """Return ``gpu`` (name and compute capability) and ``driver`` of the first GPU; both ``none`` without one."""
    library, device = driver_library(), ctypes.c_int()
    if library is None or library.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return {"gpu": "none", "driver": "none"}
    name = ctypes.create_string_buffer(128)
    library.cuDeviceGetName(name, 128, device)
    major, minor = (_attribute(library, device, code) for code in (75, 76))
    return {"gpu": f"{name.value.decode()} ({major}.{minor})", "driver": driver_version()}


@cache
def driver_version() -> str:
    """Return the driver's version as NVML tells it, or an empty string."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() != 0:
        return ""
    found = nvml.nvmlSystemGetDriverVersion(text, 80) == 0
    nvml.nvmlShutdown()
    return text.value.decode() if found else ""


def _attribute(library: Any, device: ctypes.c_int, code: int) -> int:
    """Read a device attribute: 75 and 76 are the compute capability's major and minor number."""
    value = ctypes.c_int()
    library.cuDeviceGetAttribute(ctypes.byref(value), code, device)
    return value.value
