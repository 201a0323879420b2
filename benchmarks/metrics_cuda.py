"""Comparing two large tensors on a GPU: bytes read a second beside a device copy in the same run.

Run ``python benchmarks/metrics_cuda.py [MB]`` (default 1024). A copy of n bytes reads and writes, so it moves 2 n; a
comparison reads both sides, 2 n too. *Kernels* is what the device works on one comparison, all its kernels together;
*call* is what the caller waits, with launches, the transfer of the numbers and their assembly by the host. Prints
markdown rows.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

from ditto_core.compare.metrics import measure

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REPEATS = 20


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call on the device, its transfer of numbers included."""
    call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def device_milliseconds(call: Callable[[], object]) -> float:
    """Return the mean milliseconds of device time of a call, by the profiler: kernels and transfers."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / REPEATS / 1e3


def small() -> float:
    """Return the median microseconds of a comparison of [1, 576] float16 with all metrics and the split by row."""
    expected = torch.randn(1, 576, device="cuda").half()
    actual = expected + 1e-3
    return 1e3 * milliseconds(lambda: [measure(actual, expected, axes=("batch", "")) for _ in range(50)]) / 50


def row(megabytes: int, dtype: torch.dtype) -> str:
    """Measure one dtype and return its markdown row."""
    count = megabytes * 2**20 // dtype.itemsize
    expected = torch.randn(count, device="cuda", dtype=torch.float32).to(dtype)
    actual = (expected.float() + 1e-3 * torch.randn(count, device="cuda")).to(dtype)
    target = torch.empty_like(expected)
    copy, compare = milliseconds(lambda: target.copy_(expected)), milliseconds(lambda: measure(actual, expected))
    kernels = device_milliseconds(lambda: measure(actual, expected))
    moved = 2 * expected.nbytes / 1e6
    card, name = torch.cuda.get_device_name(), str(dtype).removeprefix("torch.")
    speeds = f"{moved / copy:.0f} | {moved / kernels:.0f} | {copy / kernels:.2f} | {copy / compare:.2f}"
    return f"| {card} | {megabytes} MB | {name} | {copy:.2f} | {kernels:.2f} | {compare:.2f} | {speeds} |"


def main(megabytes: int) -> None:
    """Print the table."""
    print("| card | size | dtype | copy ms | kernels ms | call ms | copy GB/s | kernels GB/s | share | of the call |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for dtype in DTYPES:
        print(row(megabytes, dtype), flush=True)
    print(f"[1, 576] float16, split by row: {small():.0f} us a call")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
