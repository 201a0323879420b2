"""Extra memory of a comparison, as the peak of a process of its own: torch's memory is invisible to tracemalloc."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from ditto_core.compare.metrics import measure

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024) / 1024

def pair(rows):
    expected = torch.ones(rows, 1 << 20, dtype=getattr(torch, sys.argv[1]))
    actual = expected.clone()
    actual[:, ::7] += 1
    return (actual.t(), expected.t()) if sys.argv[2] == "transposed" else (actual, expected)

measure(*pair(2), threads=3)
sides = pair(32)
before = peak()
metrics = measure(*sides, threads=3)
assert metrics.mismatched == 32 * (((1 << 20) + 6) // 7), metrics
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the resource module is missing there")
@pytest.mark.parametrize(("dtype", "form"), [("float32", "plain"), ("float16", "plain"), ("float16", "transposed")])
def test_a_comparison_needs_less_than_16_mb(dtype, form):
    done = subprocess.run([sys.executable, "-c", PROGRAM, dtype, form], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16
