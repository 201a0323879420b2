"""A step's taps measured together, one by one, and by torch.testing.assert_close, in the same process.

Run ``python benchmarks/packed.py [OUT.json]``. With CUDA: the 162 taps of a decoding step of an 8 B decoder (32 blocks
of five taps of width 4096, the last norm, the logits), bfloat16 against float32, one row and 64; and a large pair. On
the CPU: small pairs. *Together*: each pair's rel_l2 and the errors of its rows are read, as a step does; *every field*:
all metrics, as *one by one*. assert_close gets tolerances at which it passes, its cheapest path. Medians of 20, in
milliseconds a step; on the CPU of the thread's processor time.
"""

from __future__ import annotations

import cProfile
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from ditto_core.compare.metrics import Metrics, measure
from ditto_core.compare.packed import Found, TensorPair, measure_all
from ditto_core.compare.rows import row_errors

REPEATS = 20
AXES = ("batch", "length", "")
BLOCKS, WIDTH, VOCABULARY = 32, 4096, 128256
NAMES = tuple(item.name for item in fields(Metrics))


def milliseconds(call: Callable[[], object], on_device: bool) -> float:
    """Return the median milliseconds of a call: until the device is done, or of the thread's processor time."""
    clock = time.perf_counter if on_device else time.thread_time
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        wait()
        begin = clock()
        call()
        wait()
        times.append(clock() - begin)
    return 1e3 * statistics.median(times)


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def pair_of(shape: Sequence[int], dtype: torch.dtype, device: str) -> TensorPair:
    """Return normal numbers in float32 and the same with an error of 1e-2 in ``dtype``."""
    expected = torch.randn(tuple(shape), device=device)
    return TensorPair((expected + 1e-2 * torch.randn(tuple(shape), device=device)).to(dtype), expected, AXES)


def together(pairs: Sequence[TensorPair]) -> None:
    """Measure pairs in one go, and read what every step reads: the error of each pair and of its rows."""
    for found in measure_all(pairs):
        assert isinstance(found, Found) and found.metrics.rel_l2 >= 0
        found.row_errors()


def every_field(pairs: Sequence[TensorPair]) -> None:
    """Measure pairs in one go, and read every metric of each, as a report with all sites does."""
    for found in measure_all(pairs):
        assert isinstance(found, Found)
        found.row_errors()
        for name in NAMES:
            getattr(found.metrics, name)


def one_by_one(pairs: Sequence[TensorPair]) -> None:
    """Measure each pair and its rows by itself."""
    for actual, expected, axes, valid, *_ in pairs:
        measure(actual, expected, axes=axes, valid=valid)
        row_errors(actual, expected, axes, valid)


def close(pairs: Sequence[TensorPair]) -> None:
    """Compare each pair with torch.testing."""
    for pair in pairs:
        torch.testing.assert_close(pair.actual, pair.expected, rtol=1.0, atol=1.0, check_dtype=False)


def case(name: str, pairs: Sequence[TensorPair]) -> dict[str, Any]:
    """Time one set of pairs."""
    on_device = pairs[0].actual.is_cuda
    found = {
        "case": name,
        "pairs": len(pairs),
        "elements": sum(pair.actual.numel() for pair in pairs),
        "together_ms": milliseconds(lambda: together(pairs), on_device),
        "every_field_ms": milliseconds(lambda: every_field(pairs), on_device),
        "one_by_one_ms": milliseconds(lambda: one_by_one(pairs), on_device),
        "assert_close_ms": milliseconds(lambda: close(pairs), on_device),
        "copy_of_the_reference_ms": milliseconds(lambda: [pair.expected.clone() for pair in pairs], on_device),
    }
    print(json.dumps(found), flush=True)
    return found


def decoding_step(rows: int, device: str) -> list[TensorPair]:
    """Return the taps of a decoding step of ``rows`` sequences of an 8 B decoder."""
    taps = [pair_of((rows, 1, WIDTH), torch.bfloat16, device) for _ in range(5 * BLOCKS + 1)]
    return [*taps, pair_of((rows, 1, VOCABULARY), torch.bfloat16, device)]


def profile(pairs: Sequence[TensorPair]) -> str:
    """Return where the host's time goes."""
    together(pairs)
    with cProfile.Profile() as seen:
        for _ in range(5):
            together(pairs)
    text = StringIO()
    pstats.Stats(seen, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()


def on_cuda() -> list[dict[str, Any]]:
    """Time the steps of an 8 B decoder, and a large pair, on the first GPU."""
    cases = []
    for rows in (1, 64):
        pairs = decoding_step(rows, "cuda")
        cases.append(case(f"162 taps, {rows} rows, without the logits", pairs[:-1]))
        cases.append(case(f"162 taps, {rows} rows", pairs))
        cases[-1]["profile"] = profile(pairs)
        print(cases[-1]["profile"], flush=True)
    for megabytes in (1, 64, 1024):
        cases.append(
            case(
                f"one pair, {megabytes} MB float16",
                [pair_of((megabytes * 2**19,), torch.float16, "cuda")._replace(axes=())],
            )
        )
    return cases


def on_cpu() -> list[dict[str, Any]]:
    """Time small pairs on one thread of the CPU."""
    torch.set_num_threads(1)
    kinds = [("64 pairs of 4 KB float32", 64, (1, 1, 1024), torch.float32)]
    kinds += [("64 pairs of 1,024 bfloat16", 64, (1, 1, 1024), torch.bfloat16)]
    kinds += [(f"64 pairs of {n} float32", 64, (1, 1, n), torch.float32) for n in (64, 576, 2048)]
    kinds += [
        ("64 pairs of [1, 8, 64] float32", 64, (1, 8, 64), torch.float32),
        ("3 pairs of 4 KB", 3, (1, 1, 1024), torch.float32),
    ]
    return [case(name, [pair_of(shape, dtype, "cpu") for _ in range(count)]) for name, count, shape, dtype in kinds]


def main(out: Path | None) -> None:
    """Print the figures and write them."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else platform.processor()}
    cases = [*(on_cuda() if cuda else ()), *on_cpu()]
    if out is not None:
        out.write_text(json.dumps({**about, "cases": cases}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
