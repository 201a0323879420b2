"""Extra memory of a comparison, as the peak of a process of its own: torch's memory is invisible to tracemalloc."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
import torch
from ditto_core.compare.metrics import measure

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))

def pair(rows):
    expected = torch.ones(rows, 1 << 20, dtype=getattr(torch, sys.argv[1]))
    actual = expected.clone()
    actual[:, ::7] += 1
    return (actual.t(), expected.t()) if sys.argv[2] == "transposed" else (actual, expected)

measure(torch.ones(99), torch.ones(99))  # what is loaded on first use is not the comparison's
sides = pair(32)
Path("/proc/self/clear_refs").write_text("5")  # the peak that a child starts with is its parent's
before = status("VmRSS")
metrics = measure(*sides, threads=4)
assert metrics.mismatched == 32 * (((1 << 20) + 6) // 7), metrics
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory of a process")
@pytest.mark.parametrize(("dtype", "form"), [("float32", "plain"), ("float16", "plain"), ("float16", "transposed")])
def test_a_comparison_needs_less_than_16_mb(dtype, form):
    done = subprocess.run([sys.executable, "-c", PROGRAM, dtype, form], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 < float(done.stdout) < 16
