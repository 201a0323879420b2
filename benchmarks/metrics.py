"""Comparing two large tensors: ours with all metrics beside its peers, as a multiple of one memcpy of the same bytes.

Run ``python benchmarks/metrics.py [MB ...]``. Every cell runs in a process of its own, so that its peak memory is its
own; the memcpy it is divided by is timed in the same process, before and after. Prints a markdown table.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ditto_core.compare.metrics import measure

DTYPES = ("float32", "float16")
BUDGET = 12.0
"""Seconds that the timed calls of one cell may take; a slow peer is timed once."""

TILE = 1 << 22


def ours(actual: torch.Tensor, expected: torch.Tensor) -> None:
    measure(actual, expected)


def ours_one_thread(actual: torch.Tensor, expected: torch.Tensor) -> None:
    measure(actual, expected, threads=1)


def numpy_assert(actual: torch.Tensor, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1, atol=1)


def torch_assert(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1, atol=1)


def polygraphy(*names: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a comparison by Polygraphy's functors; ``Simple`` with its quantile, so with all that it has."""

    def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
        from polygraphy import comparator
        from polygraphy.logger import G_LOGGER

        G_LOGGER.module_severity = G_LOGGER.CRITICAL
        sides = [
            comparator.IterationResult({"out": side.numpy()}, runner_name=name)
            for side, name in ((actual, "a"), (expected, "b"))
        ]
        for name in names:
            options = {"rtol": 1, "atol": 1, "check_error_stat": "quantile"} if name == "Simple" else {}
            getattr(comparator, f"{name}CompareFunc")(**options)(*sides)

    return compare


METHODS = {
    "ours, all metrics": ours,
    "ours, one thread": ours_one_thread,
    "numpy.testing.assert_allclose": numpy_assert,
    "torch.testing.assert_close": torch_assert,
    "Polygraphy simple": polygraphy("Simple"),
    "Polygraphy simple, l2, cosine, psnr, snr": polygraphy("Simple", "L2", "CosineSimilarity", "Psnr", "Snr"),
}


def pair(megabytes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an expected tensor of normal numbers and an actual one with an error of 1e-3, tiled from 4 M elements."""
    count = megabytes * 2**20 // dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(TILE, generator=generator)
    noise = 1e-3 * torch.randn(TILE, generator=generator)
    expected, actual = (torch.empty(count, dtype=dtype) for _ in range(2))
    for start in range(0, count, TILE):
        expected[start : start + TILE] = base[: count - start]
        actual[start : start + TILE] = (base + noise)[: count - start]
    return actual, expected


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return wall and processor seconds of one call."""
    wall, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - busy


def memcpy(source: torch.Tensor) -> tuple[float, float]:
    """Return the median wall and processor seconds of one copy of a tensor into memory that is already mapped."""
    target = torch.zeros_like(source)
    return medians([seconds(lambda: target.copy_(source)) for _ in range(7)])


def medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of each column."""
    wall, busy = (statistics.median(column) for column in zip(*times, strict=True))
    return wall, busy


def extra_memory(call: Callable[[], object]) -> float:
    """Return by how many MB a call raises this process's resident memory at its peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def status(name: str) -> float:
    """Return one of the memory figures of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


def cell(method: str, megabytes: int, dtype: str) -> dict[str, float]:
    """Measure one method on one size: the first call for memory, then the median of the calls that fit the budget."""
    sides = pair(megabytes, getattr(torch, dtype))
    METHODS[method](*(side[:4096] for side in sides))
    times: list[tuple[float, float]] = []
    extra = extra_memory(lambda: times.append(seconds(lambda: METHODS[method](*sides))))
    copies = [memcpy(sides[1])]
    while times[0][0] < BUDGET / 3 and len(times) < 8 and sum(wall for wall, _ in times) < BUDGET:
        times.append(seconds(lambda: METHODS[method](*sides)))
    copies.append(memcpy(sides[1]))
    wall, busy = medians(times[1:] or times)
    copy_wall, copy_busy = (statistics.mean(column) for column in zip(*copies, strict=True))
    ratios = {"wall ratio": wall / copy_wall, "busy ratio": busy / copy_busy}
    return {**ratios, "wall": wall, "extra": extra, "calls": len(times[1:] or times)}


def small() -> float:
    """Return the median microseconds of a comparison of [1, 576] float32 with all metrics and the split by row."""
    expected = torch.randn(1, 576)
    actual = expected + 1e-3 * torch.randn(1, 576)
    rounds = [seconds(lambda: [measure(actual, expected, axes=("batch", "")) for _ in range(500)])[0] for _ in range(9)]
    return statistics.median(rounds) / 500 * 1e6


def child(method: str, megabytes: int, dtype: str) -> dict[str, float]:
    """Run one cell in a process of its own."""
    command = [sys.executable, __file__, "--cell", method, str(megabytes), dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(sizes: list[int]) -> None:
    """Print the table."""
    print(f"small tensors: {small():.0f} us for [1, 576] float32, all metrics")
    print("| size | dtype | method | memcpys (wall) | memcpys (processor) | ms | extra MB | calls |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for megabytes in sizes:
        for dtype in DTYPES:
            for method in METHODS:
                r = child(method, megabytes, dtype)
                ratios = f"{r['wall ratio']:.1f} | {r['busy ratio']:.1f}"
                tail = f"{r['wall'] * 1e3:.0f} | {max(0.0, r['extra']):.0f} | {r['calls']}"
                print(f"| {megabytes} MB | {dtype} | {method} | {ratios} | {tail} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--cell"]:
        print(json.dumps(cell(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
    else:
        main([int(size) for size in sys.argv[1:]] or [64, 512])
