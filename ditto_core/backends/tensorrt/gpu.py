"""What the driver says of the GPU, without loading torch."""

from __future__ import annotations

import ctypes
from typing import Any


def driver_library() -> Any:
    """Return ``libcuda`` after ``cuInit``, or None where there is no usable driver."""
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
