"""What the plugin costs a pytest run without ditto tests: median import time, and what else the import loads.

Each sample is a fresh interpreter that has pytest imported already. Run: ``python benchmarks/plugin_import.py [N]``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

PROBE = """
import json, sys, time
import pytest
before = set(sys.modules)
start, cpu = time.perf_counter(), time.process_time()
import pytest_ditto.plugin
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
heavy = [n for n in ("torch", "transformers", "onnx", "numpy") if n in sys.modules]
print(json.dumps({"ms": 1000 * seconds, "cpu": 1000 * cpu, "modules": len(set(sys.modules) - before), "heavy": heavy}))
"""


def sample() -> dict[str, object]:
    """Import the plugin in a fresh interpreter."""
    found: dict[str, object] = json.loads(subprocess.check_output([sys.executable, "-c", PROBE], text=True))
    return found


def main() -> None:
    """Print the medians."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    samples = [sample() for _ in range(count + 1)][1:]  # the first one writes bytecode
    times = sorted(float(str(s["ms"])) for s in samples)
    print(
        f"import pytest_ditto.plugin: median {statistics.median(times):.1f} ms, fastest {times[0]:.1f} ms, n = {count}"
    )
    print(f"modules it loads: {samples[0]['modules']}, heavy ones among them: {samples[0]['heavy'] or 'none'}")


if __name__ == "__main__":
    main()
