"""Comparing two large tensors on a GPU: bytes read a second beside a device copy in the same run.

Run ``python benchmarks/metrics_cuda.py [MB]`` (default 1024). A copy of n bytes reads and writes, so it moves 2 n; a
comparison reads both sides, 2 n too. Prints markdown rows.
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


def row(megabytes: int, dtype: torch.dtype) -> str:
    """Measure one dtype and return its markdown row."""
    count = megabytes * 2**20 // dtype.itemsize
    expected = torch.randn(count, device="cuda", dtype=torch.float32).to(dtype)
    actual = (expected.float() + 1e-3 * torch.randn(count, device="cuda")).to(dtype)
    target = torch.empty_like(expected)
    copy, compare = milliseconds(lambda: target.copy_(expected)), milliseconds(lambda: measure(actual, expected))
    moved = 2 * expected.nbytes / 1e6
    card, name = torch.cuda.get_device_name(), str(dtype).removeprefix("torch.")
    speeds = f"{moved / copy:.0f} | {moved / compare:.0f} | {copy / compare:.2f}"
    return f"| {card} | {megabytes} MB | {name} | {copy:.2f} | {compare:.2f} | {speeds} |"


def main(megabytes: int) -> None:
    """Print the table."""
    print(
        "| card | size | dtype | copy ms | all metrics ms | copy GB/s | metrics GB/s | share of the copy's bandwidth |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for dtype in DTYPES:
        print(row(megabytes, dtype), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
